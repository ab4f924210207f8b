package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
)

// Limits of an exec's end.
const (
	// drainLimit is how long output is read after the main process has ended
	// while a child holds the pipes.
	drainLimit = 200 * time.Millisecond
	// killLimit is how long the processes of a timed-out exec may take to die.
	killLimit = 5 * time.Second
)

// running is one exec.
type running struct {
	r      *Runtime
	id     string
	req    oci.ExecRequest
	group  string // its cgroup directory; empty: none
	inside string // the container's cgroup directory
	pid    int
	pidfd  *os.File
	out    [2]*collector
	stdin  *os.File // write end; nil: none
}

// Exec implements oci.Runtime.
func (r *Runtime) Exec(ctx context.Context, id string, req oci.ExecRequest) (oci.ExecResult, error) {
	if req.Process == nil || len(req.Process.Args) == 0 {
		return oci.ExecResult{}, errors.New("exec without a command")
	}
	ct, ok := r.monitor.Container(id)
	if !ok {
		return oci.ExecResult{}, fmt.Errorf("exec in %s: %w", id, oci.ErrNotFound)
	}
	if ct.Exit != nil {
		return oci.ExecResult{}, fmt.Errorf("exec in %s: %w", id, oci.ErrNotRunning)
	}
	limited := ctx
	if req.Timeout > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeoutCause(ctx, req.Timeout, oci.ErrExecTimeout)
		defer cancel()
	}
	x := &running{r: r, id: id, req: req, inside: ct.Cgroups.Kill()}
	defer x.close()
	if err := x.start(limited, ct); err != nil {
		return oci.ExecResult{}, x.failed(limited, err)
	}
	return x.wait(limited)
}

// failed decides between the failure itself and the end of the time.
func (x *running) failed(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	if kerr := x.killAll(); kerr != nil {
		return fmt.Errorf("%w (and %w)", context.Cause(ctx), kerr)
	}
	return context.Cause(ctx)
}

// start spawns the binary and waits for it to leave the process running.
func (x *running) start(ctx context.Context, ct monitor.Container) error {
	name := x.r.nextExec()
	pidFile := filepath.Join(ct.Bundle, name+".pid")
	defer os.Remove(pidFile)
	process := *x.req.Process
	process.Terminal, process.ConsoleSize = false, nil
	spec, err := memfile("process.json", &process)
	if err != nil {
		return err
	}
	defer spec.Close()
	said, err := memfile("log", nil)
	if err != nil {
		return err
	}
	defer said.Close()
	stdio, err := x.pipes(x.req.Process.User)
	if err != nil {
		return err
	}
	args := []string{"--root", x.r.root, "--log", "/proc/self/fd/4", "--log-format", "json",
		"exec", "--detach", "--process", "/proc/self/fd/3", "--pid-file", pidFile}
	args = append(args, x.makeGroup(ct, name)...)
	cmd := exec.Command(x.r.binary, append(args, x.id)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio[0], stdio[1], stdio[2]
	cmd.ExtraFiles = []*os.File{spec, said}
	err = cmd.Start()
	for _, f := range stdio {
		_ = f.Close()
	}
	if err != nil {
		return &oci.ExecError{Args: cmd.Args, ExitCode: -1, Err: err}
	}
	x.feed()
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	err = cmd.Wait()
	stop()
	return x.adopt(cmd, pidFile, said, err)
}

// adopt takes over the process that the binary left, by its pid file.
func (x *running) adopt(cmd *exec.Cmd, pidFile string, said *os.File, failure error) error {
	data, err := os.ReadFile(pidFile)
	if failure == nil && err == nil {
		x.pid, err = strconv.Atoi(strings.TrimSpace(string(data)))
	}
	if failure == nil && err == nil {
		// Nobody else waits for it, so the pid is its own until we do.
		x.r.monitor.Track(x.pid)
		var fd int
		if fd, err = unix.PidfdOpen(x.pid, unix.PIDFD_NONBLOCK); err == nil {
			x.pidfd = os.NewFile(uintptr(fd), "pidfd")
			return nil
		}
		x.reap()
	}
	if failure == nil {
		return fmt.Errorf("find the process of an exec in %s: %w", x.id, err)
	}
	_, _ = said.Seek(0, io.SeekStart)
	e := &oci.ExecError{Args: cmd.Args, ExitCode: -1, Stderr: bounded(errorsOf(said))}
	if e.Stderr == "" {
		for _, c := range x.out {
			c.finish(drainLimit)
		}
		e.Stderr = bounded(plainLog(string(x.out[1].bytes())))
	}
	var exit *exec.ExitError
	if errors.As(failure, &exit) {
		e.ExitCode = exit.ExitCode()
	}
	e.Err = sentinelOf(e.Stderr)
	return e
}

// wait returns when the main process has ended and its output is read, or when
// the time is over and everything is killed.
func (x *running) wait(ctx context.Context) (oci.ExecResult, error) {
	raw, err := x.pidfd.SyscallConn()
	if err != nil {
		return oci.ExecResult{}, fmt.Errorf("wait for exec in %s: %w", x.id, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = x.pidfd.SetReadDeadline(time.Unix(1, 0)) })
	err = raw.Read(func(fd uintptr) bool { return ready(int(fd)) })
	stop()
	if err != nil {
		kerr := x.killAll()
		x.reap()
		if kerr != nil {
			return oci.ExecResult{}, fmt.Errorf("%w (and %w)", context.Cause(ctx), kerr)
		}
		return oci.ExecResult{}, context.Cause(ctx)
	}
	status, ok := x.reap()
	if !ok {
		return oci.ExecResult{}, fmt.Errorf("exit status of an exec in %s is lost", x.id)
	}
	res := oci.ExecResult{ExitCode: monitor.Code(status)}
	limit := time.Now().Add(drainLimit)
	for _, c := range x.out {
		c.finish(time.Until(limit))
	}
	res.Stdout, res.Stderr = x.out[0].bytes(), x.out[1].bytes()
	res.Truncated = x.out[0].cut || x.out[1].cut
	return res, nil
}

func ready(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// reap waits for the main process, which must have ended or be about to.
func (x *running) reap() (unix.WaitStatus, bool) {
	if x.pid == 0 {
		return 0, false
	}
	defer func() {
		x.r.monitor.Untrack(x.pid)
		x.pid = 0
	}()
	var status unix.WaitStatus
	for limit := time.Now().Add(killLimit); ; time.Sleep(time.Millisecond) {
		pid, err := unix.Wait4(x.pid, &status, unix.WNOHANG, nil)
		if pid == x.pid {
			return status, true
		}
		if err != nil && err != unix.EINTR || time.Now().After(limit) {
			return 0, false
		}
	}
}

// killAll kills every process of the exec and returns when they are gone.
func (x *running) killAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), killLimit)
	defer cancel()
	if x.group != "" {
		return monitor.KillCgroup(ctx, x.group)
	}
	return killTree(ctx, x.pid)
}

// close releases everything. A process that the exec left on purpose moves to
// the container's own cgroup and lives on.
func (x *running) close() {
	for _, c := range x.out {
		if c != nil {
			c.close()
		}
	}
	if x.stdin != nil {
		_ = x.stdin.Close()
	}
	if x.pidfd != nil {
		_ = x.pidfd.Close()
	}
	if x.pid != 0 {
		x.reap()
	}
	if x.group != "" {
		monitor.DissolveCgroup(x.group, x.inside)
	}
}

// memfile is a file without a name that holds v as JSON.
func memfile(name string, v *rspec.Process) (*os.File, error) {
	fd, err := unix.MemfdCreate("berth-"+name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if v == nil {
		return f, nil
	}
	if err := json.NewEncoder(f).Encode(v); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write %s: %w", name, err)
	}
	return f, nil
}

func (r *Runtime) nextExec() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seq++
	return fmt.Sprintf("exec-%x-%d", r.born, r.seq)
}
