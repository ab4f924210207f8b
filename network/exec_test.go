package network

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/sandbox/leakcheck"
)

// runScript runs a script as a plugin.
func runScript(t *testing.T, ctx context.Context, text string) (string, error) {
	t.Helper()
	file := t.TempDir() + "/fake"
	must(t, writeScript(file, text))
	out, err := (&pluginExec{runs: unheld{}}).ExecPlugin(ctx, file, []byte("input"), []string{"CNI_COMMAND=ADD", "PATH=" + os.Getenv("PATH")})
	return string(out), err
}

func TestPluginOutput(t *testing.T) {
	out, err := runScript(t, context.Background(), `echo "\"$CNI_COMMAND: $(cat)\""; echo noise >&2`)
	if err != nil || out != "\"ADD: input\"\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestPluginErrors(t *testing.T) {
	for script, want := range map[string]string{
		`echo '{"code":11,"msg":"try later","details":"in a minute"}'; exit 1`: "CNI plugin fake ADD: try later; in a minute (code 11)",
		`echo oops >&2; exit 3`:          "CNI plugin fake ADD: exit status 3; stderr: oops",
		`echo not JSON; exit 3`:          "CNI plugin fake ADD: exit status 3; stdout: not JSON",
		`kill -9 $$`:                     "CNI plugin fake ADD: signal: killed",
		`echo '{"msg":"m"}'; exit 1`:     "CNI plugin fake ADD: m",
		`echo hello; echo oops >&2`:      "CNI plugin fake ADD: its result is not JSON; stdout: hello; stderr: oops",
		`echo " a " >&2; echo>&2; false`: "CNI plugin fake ADD: exit status 1; stderr: a",
	} {
		_, err := runScript(t, context.Background(), script)
		if plugin := (*PluginError)(nil); !errors.As(err, &plugin) || err.Error() != want {
			t.Errorf("%s\n gave %v\n want %s", script, err, want)
		}
	}
	_, err := runScript(t, context.Background(), `head -c 100000 /dev/zero | tr '\0' x >&2; false`)
	if err == nil || len(err.Error()) > maxStderr+100 {
		t.Errorf("stderr is not bounded: %d bytes", len(err.Error()))
	}
}

// TestDeadlineTakesTheChildrenWithIt kills a plugin whose child holds its output.
func TestDeadlineTakesTheChildrenWithIt(t *testing.T) {
	pidFile := t.TempDir() + "/pid"
	ctx, cancel := context.WithTimeout(context.Background(), leakcheck.Patience(300*time.Millisecond))
	defer cancel()
	begin := time.Now()
	_, err := runScript(t, ctx, "sleep 60 & echo $! > "+pidFile+"; wait")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no answer within its deadline") {
		t.Errorf("error %v", err)
	}
	if took := time.Since(begin); took > leakcheck.Patience(2*time.Second) {
		t.Errorf("took %v", took)
	}
	waitGone(t, strings.TrimSpace(read(t, pidFile)))
}

// TestChildHoldsTheOutput has a plugin that ends well and leaves a child behind
// with its output open.
func TestChildHoldsTheOutput(t *testing.T) {
	pidFile := t.TempDir() + "/pid"
	begin := time.Now()
	out, err := runScript(t, context.Background(), "sleep 60 & echo $! > "+pidFile+"; echo {}")
	if err != nil || out != "{}\n" || time.Since(begin) > leakcheck.Patience(5*time.Second) {
		t.Errorf("%q, %v after %v", out, err, time.Since(begin))
	}
	pid, err := strconv.Atoi(strings.TrimSpace(read(t, pidFile)))
	must(t, err)
	child, err := os.FindProcess(pid)
	must(t, err)
	must(t, child.Kill())
}

// TestPluginsOfADeadDaemon kills a process that runs plugins: an ADD that went on
// could come after the DEL of the next daemon, a DEL must come to its end.
func TestPluginsOfADeadDaemon(t *testing.T) {
	const dirVariable, verbVariable = "BERTH_TEST_DIR", "BERTH_TEST_VERB"
	if dir := os.Getenv(dirVariable); dir != "" {
		verb := os.Getenv(verbVariable)
		must(t, writeScript(dir+"/fake", "echo $$ > "+dir+"/pid.new; mv "+dir+"/pid.new "+dir+"/pid; sleep 0.5; touch "+dir+"/done"))
		(&pluginExec{runs: unheld{}}).ExecPlugin(context.Background(), dir+"/fake", nil, []string{"CNI_COMMAND=" + verb, "PATH=" + os.Getenv("PATH")})
		return
	}
	for verb, finishes := range map[string]bool{"ADD": false, "DEL": true} {
		dir := t.TempDir()
		daemon := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
		daemon.Env = append(os.Environ(), dirVariable+"="+dir, verbVariable+"="+verb)
		must(t, daemon.Start())
		for end := time.Now().Add(leakcheck.Patience(10 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
			if _, err := os.Stat(dir + "/pid"); err == nil {
				break
			} else if time.Now().After(end) {
				t.Fatal("the plugin was not started")
			}
		}
		must(t, daemon.Process.Kill())
		daemon.Wait()
		waitGone(t, strings.TrimSpace(read(t, dir+"/pid")))
		if _, err := os.Stat(dir + "/done"); (err == nil) != finishes {
			t.Errorf("%s came to its end: %v, want %v", verb, err == nil, finishes)
		}
	}
}

func waitGone(t *testing.T, pid string) {
	t.Helper()
	for end := time.Now().Add(leakcheck.Patience(3 * time.Second)); ; time.Sleep(10 * time.Millisecond) {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil || strings.Contains(string(status), "State:\tZ") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("process %s lives on", pid)
		}
	}
}

// TestTextFileBusy runs a plugin whose file is open for writing at first.
func TestTextFileBusy(t *testing.T) {
	file := t.TempDir() + "/fake"
	must(t, writeScript(file, "echo done"))
	writer, err := os.OpenFile(file, os.O_WRONLY, 0)
	must(t, err)
	time.AfterFunc(300*time.Millisecond, func() { writer.Close() })
	out, err := (&pluginExec{runs: unheld{}}).ExecPlugin(context.Background(), file, nil, []string{"PATH=" + os.Getenv("PATH")})
	if err != nil || string(out) != "done\n" {
		t.Errorf("%q, %v", out, err)
	}
}
