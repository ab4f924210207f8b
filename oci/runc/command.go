package runc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go/features"

	"berth/oci"
	"berth/sandbox/regular"
)

// stderrLimit bounds what is kept of a command's complaint.
const stderrLimit = 4096

// run spawns the binary to its end and returns its stdout. Its failure is an
// *oci.ExecError. When ctx ends the process is killed. What acts on a container is
// held, and ends whole when it fails.
func (r *Runtime) run(ctx context.Context, stdin io.Reader, args ...string) (_ []byte, err error) {
	if err := r.answers(ctx); err != nil {
		return nil, err
	}
	argv := append([]string{"--root", r.root}, args...)
	cmd := exec.CommandContext(ctx, r.binary, argv...)
	var stdout, stderr tail
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &stdout, &stderr
	// start's hooks may leave something that holds the pipes.
	cmd.WaitDelay = time.Second
	if verb := args[0]; verb == "start" || verb == "update" || verb == "delete" {
		end, err := r.hold(ctx, cmd, verb, args[len(args)-1])
		if err != nil {
			return nil, err
		}
		defer func() { end(err != nil) }()
	}
	err = cmd.Run()
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return stdout.kept, nil
	}
	e := &oci.ExecError{Args: cmd.Args, ExitCode: -1, Stderr: bounded(plainLog(stderr.String()))}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		e.ExitCode = exit.ExitCode()
		e.Err = causeOf(e.Stderr, exit)
		if ctx.Err() != nil {
			e.Err = ctx.Err()
		}
	} else {
		e.Err = fmt.Errorf("%w: %w", oci.ErrRefused, err) // it is not there, or no program
	}
	return nil, e
}

// hold has a command about a container run in a cgroup of its own, so that a daemon
// that follows this one finds it with its children; and first ends what an earlier
// one has left there. end must be called when the command has ended.
func (r *Runtime) hold(ctx context.Context, cmd *exec.Cmd, verb, id string) (end func(kill bool), err error) {
	if err := r.leash.Settle(ctx, id, 0); err != nil {
		return nil, err
	}
	cgroup, end, err := r.leash.Hold(verb, id)
	if cgroup != nil {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	}
	return end, err
}

// causeOf is the sentinel of a command's complaint, or the signal that ended it.
func causeOf(stderr string, exit *exec.ExitError) error {
	if err := sentinelOf(stderr); err != nil || exit.ExitCode() >= 0 {
		return err
	}
	return errors.New(exit.String())
}

// sentinelOf recognises the few failures that a caller acts on. The words are
// those of runc and crun.
func sentinelOf(stderr string) error {
	switch {
	case strings.Contains(stderr, "container does not exist"), strings.Contains(stderr, "No such container"):
		return oci.ErrNotFound
	case strings.Contains(stderr, "cannot start a container that has stopped"):
		return errStopped
	case strings.Contains(stderr, "container not running"), strings.Contains(stderr, "container is not running"),
		strings.Contains(stderr, "cannot exec in a stopped container"), strings.Contains(stderr, "cannot exec a container that has stopped"):
		return oci.ErrNotRunning
	case refusedLimit(stderr):
		return oci.ErrLimit
	case missingProgram(stderr):
		return oci.ErrProgram
	case strings.Contains(stderr, syscall.ENOSPC.Error()):
		return syscall.ENOSPC
	case strings.Contains(stderr, syscall.EDQUOT.Error()):
		return syscall.EDQUOT
	}
	return nil
}

// refusedLimit recognises a value that the kernel does not take for a file of a
// cgroup: a processor that is not there, a limit out of range or below its use.
func refusedLimit(stderr string) bool {
	if strings.Contains(stderr, "unable to set memory limit") {
		return true
	}
	if !strings.Contains(stderr, "failed to write") && !strings.Contains(stderr, "write to `") {
		return false
	}
	for _, e := range []syscall.Errno{syscall.EINVAL, syscall.ERANGE, syscall.ENODEV, syscall.EBUSY} {
		if strings.Contains(strings.ToLower(stderr), strings.ToLower(e.Error())) {
			return true
		}
	}
	return false
}

// missingProgram recognises a create, and an exec, that looked for its program in
// vain.
func missingProgram(stderr string) bool {
	if !strings.Contains(stderr, "create failed") && !strings.Contains(stderr, "exec failed") || !strings.Contains(stderr, `exec: "`) {
		return false
	}
	for _, text := range []string{"no such file or directory", "executable file not found in $PATH", "permission denied", "is a directory", "not a directory"} {
		if strings.Contains(stderr, text) {
			return true
		}
	}
	return false
}

// tail keeps the last MiB of what is written to it, and at most one more. It embeds
// no buffer: exec would read into that past Write, without an end.
type tail struct{ kept []byte }

const tailLimit = 1 << 20

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p[max(0, len(p)-tailLimit):]...)
	if n := len(t.kept); n > 2*tailLimit {
		t.kept = append(t.kept[:0], t.kept[n-tailLimit:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return string(t.kept) }

// bounded cuts a complaint to stderrLimit, at its end, where the cause is.
func bounded(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > stderrLimit {
		s = "…" + strings.ToValidUTF8(s[len(s)-stderrLimit+3:], "")
	}
	return s
}

// readLog returns the messages of a --log file in JSON that are errors.
func readLog(path string) string {
	f, err := regular.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	return errorsOf(io.LimitReader(f, tailLimit))
}

func errorsOf(r io.Reader) string {
	var said []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, tailLimit)
	for lines.Scan() {
		var l struct{ Level, Msg string }
		if json.Unmarshal(lines.Bytes(), &l) == nil && (l.Level == "error" || l.Level == "fatal" || l.Level == "panic") && l.Msg != "" {
			said = append(said, l.Msg)
		}
	}
	return strings.Join(said, "; ")
}

// plainLog takes the messages out of the text log that runc writes to stderr
// when it has no --log: time="…" level=error msg="…".
func plainLog(s string) string {
	var said []string
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		_, msg, ok := strings.Cut(line, " msg=")
		if ok && strings.HasPrefix(line, "time=") {
			if strings.Contains(line, "level=warning") || strings.Contains(line, "level=info") || strings.Contains(line, "level=debug") {
				continue
			}
			line = msg
			if strings.HasPrefix(msg, `"`) {
				if err := json.Unmarshal([]byte(msg), &line); err != nil {
					line = msg
				}
			}
		}
		if line != "" {
			said = append(said, line)
		}
	}
	return strings.Join(said, "; ")
}

// Version implements oci.Runtime.
func (r *Runtime) Version(ctx context.Context) (string, error) {
	out, err := r.run(ctx, nil, "--version")
	if err != nil {
		return "", fmt.Errorf("read version of %s: %w", filepath.Base(r.binary), err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line), nil
}

// Features implements oci.Runtime.
func (r *Runtime) Features(ctx context.Context) (*features.Features, error) {
	type result struct {
		f   *features.Features
		err error
	}
	c := make(chan result, 1)
	go func() {
		f, err := r.features()
		c <- result{f, err}
	}()
	select {
	case x := <-c:
		return x.f, x.err
	case <-ctx.Done():
		return nil, fmt.Errorf("read features of %s: %w", filepath.Base(r.binary), ctx.Err())
	}
}

func (r *Runtime) readFeatures() (*features.Features, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := r.run(ctx, nil, "features")
	if err != nil {
		return nil, fmt.Errorf("read features of %s: %w", filepath.Base(r.binary), err)
	}
	f := &features.Features{}
	if err := json.Unmarshal(out, f); err != nil {
		return nil, fmt.Errorf("decode features of %s: %w", filepath.Base(r.binary), err)
	}
	return f, nil
}

// probeSubCgroups asks the binary's help for exec --cgroup.
func (r *Runtime) probeSubCgroups() (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := r.run(ctx, nil, "exec", "--help")
	return bytes.Contains(out, []byte("--cgroup")), err
}

// lasting asks a binary once what it can do. A binary that was killed, was late, or
// could not be run, has not answered: it is asked again.
func lasting[T any](ask func() (T, error)) func() (T, error) {
	var mu sync.Mutex
	var known bool
	var answer T
	var refusal error
	return func() (T, error) {
		mu.Lock()
		defer mu.Unlock()
		if known {
			return answer, refusal
		}
		var e *oci.ExecError
		answer, refusal = ask()
		known = refusal == nil || errors.As(refusal, &e) && e.ExitCode > 0
		return answer, refusal
	}
}
