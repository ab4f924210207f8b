package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

const (
	maxOutput = 4 << 20 // bytes of a plugin's result
	maxStderr = 4 << 10 // bytes of what it says about a failure
	// pipeGrace is how long the output is waited for after the plugin has ended,
	// in case a child of its own has kept it open.
	pipeGrace = time.Second
)

// PluginError is a plugin that ended with a failure or was not started.
type PluginError struct {
	Plugin, Verb string
	Code         uint   // CNI's error code; 0 when the plugin gave none
	Msg, Details string // in the plugin's words
	Stdout       string // where it is no error in CNI's form; trimmed, bounded to 4 KiB
	Stderr       string // trimmed, bounded to 4 KiB
	Err          error  // how the process ended
}

// Error says it in one line.
func (e *PluginError) Error() string {
	text := fmt.Sprintf("CNI plugin %s %s: ", e.Plugin, e.Verb)
	switch {
	case errors.Is(e.Err, context.DeadlineExceeded):
		text += "no answer within its deadline, killed"
	case errors.Is(e.Err, context.Canceled):
		text += "canceled, killed"
	case e.Msg != "":
		text += e.Msg
	default:
		text += e.Err.Error()
	}
	if e.Details != "" {
		text += "; " + e.Details
	}
	if e.Code != 0 {
		text += fmt.Sprintf(" (code %d)", e.Code)
	}
	if e.Stdout != "" {
		text += "; stdout: " + e.Stdout
	}
	if e.Stderr != "" {
		text += "; stderr: " + e.Stderr
	}
	return text
}

// Unwrap returns how the process ended.
func (e *PluginError) Unwrap() error { return e.Err }

// pluginErrorOf drops libcni's words around an error of a plugin, or returns err
// as it is.
func pluginErrorOf(err error) error {
	if plugin := (*PluginError)(nil); errors.As(err, &plugin) {
		return plugin
	}
	return err
}

// pluginExec runs plugins for libcni. Unlike libcni's own it takes a plugin's
// children with it when the deadline is over, and an ADD does not outlive the
// daemon: going on after a crash it could come after the DEL of the restart. A DEL
// goes on: stopped halfway, bridge has removed the link and no longer knows the
// addresses whose rules it should remove. The restart's DEL waits for it.
type pluginExec struct {
	version.PluginDecoder
	runs Runs
}

// FindInPath returns the plugin's file, or ErrPluginNotFound.
func (*pluginExec) FindInPath(plugin string, paths []string) (string, error) {
	file, err := invoke.FindInPath(plugin, paths)
	if err != nil {
		return "", fmt.Errorf("%w: %q in %s", ErrPluginNotFound, plugin, strings.Join(paths, ":"))
	}
	return file, nil
}

// ExecPlugin runs the plugin and returns its standard output.
func (e *pluginExec) ExecPlugin(ctx context.Context, file string, stdin []byte, environ []string) ([]byte, error) {
	for {
		stdout, stderr, err := e.run(ctx, file, stdin, environ)
		if err == nil && (valueOf(environ, "CNI_COMMAND") != "ADD" || json.Valid(stdout)) {
			return stdout, nil
		}
		if err == nil {
			err = errNoResult
		}
		if errors.Is(err, syscall.ETXTBSY) && sleep(ctx, 200*time.Millisecond) == nil {
			continue // the file is being installed just now
		}
		failure := &PluginError{Plugin: filepath.Base(file), Verb: valueOf(environ, "CNI_COMMAND"), Stderr: stderr, Err: err}
		if ctx.Err() != nil {
			failure.Err = ctx.Err()
		}
		var said types.Error
		if json.Unmarshal(stdout, &said) == nil {
			failure.Code, failure.Msg, failure.Details = said.Code, said.Msg, said.Details
		} else {
			failure.Stdout = plain(stdout)
		}
		return nil, failure
	}
}

// errNoResult: a plugin that ended well gave nothing that CNI could read.
var errNoResult = errors.New("its result is not JSON")

// plain is the beginning of what a plugin wrote that does not speak CNI's error
// format, such as a script that fails: "" where it wrote nothing.
func plain(stdout []byte) string {
	return strings.TrimSpace(strings.ToValidUTF8(string(stdout[:min(len(stdout), maxStderr)]), "�"))
}

// run runs the program once, held. What it started and left behind goes on when it
// has succeeded, and goes with it when it has not.
func (e *pluginExec) run(ctx context.Context, file string, stdin []byte, environ []string) (stdout []byte, stderr string, err error) {
	cgroup, end, err := e.runs.Hold(valueOf(environ, "CNI_COMMAND"), valueOf(environ, "CNI_CONTAINERID"))
	if err != nil {
		return nil, "", err
	}
	defer func() { end(err != nil) }()
	return runPlugin(ctx, file, stdin, environ, cgroup)
}

// runPlugin is run in a cgroup, where it is not nil. The goroutine keeps its thread
// meanwhile: the kernel sends the parent-death signal when the thread ends that made
// the child.
func runPlugin(ctx context.Context, file string, stdin []byte, environ []string, cgroup *os.File) (stdout []byte, stderr string, err error) {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	out, diagnosis := &bounded{limit: maxOutput}, &bounded{limit: maxStderr}
	cmd := exec.CommandContext(ctx, file)
	cmd.Env = environ
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Stdout, cmd.Stderr = out, diagnosis
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if valueOf(environ, "CNI_COMMAND") != "DEL" {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if cgroup != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeGrace
	err = cmd.Run()
	if cmd.Process != nil {
		reapGroup(cmd.Process.Pid, ctx.Err() != nil)
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // it ended well, only a child of its own still holds the output
	}
	return out.kept.Bytes(), strings.TrimSpace(diagnosis.kept.String()), err
}

// reapGroup collects the children of a plugin that ended before them, which fall
// to the daemon where it is a subreaper; they were killed with it when it was.
func reapGroup(group int, killed bool) {
	for end := time.Now().Add(pipeGrace); ; {
		pid, err := syscall.Wait4(-group, nil, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR, pid > 0:
		case err != nil, !killed, time.Now().After(end): // no child of that group, or one that lives on
			return
		default:
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func valueOf(environ []string, name string) string {
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, name+"="); ok {
			return value
		}
	}
	return ""
}

// sleep waits, or returns ctx's error when it ends before.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// bounded keeps the first limit bytes and drops the rest. It does not embed the
// buffer, whose ReadFrom would go round the limit.
type bounded struct {
	kept  bytes.Buffer
	limit int
}

func (b *bounded) Write(p []byte) (int, error) {
	if room := b.limit - b.kept.Len(); room > 0 {
		b.kept.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
