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
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// Limits of an exec's end.
const (
	// drainLimit is how long output is read after the main process has ended
	// while a child holds the pipes.
	drainLimit = 200 * time.Millisecond
	// startGrace is how much longer the binary may take to start an exec that is
	// over already. Killing it would leave its own children behind as zombies in
	// the container, which cannot end before they are reaped.
	startGrace = 5 * time.Second
	// killLimit is how long the processes of a timed-out exec may take to die.
	killLimit = 5 * time.Second
)

// running is one exec.
type running struct {
	r       *Runtime
	id      string
	process rspec.Process
	root    oci.Root
	stdin   io.Reader    // nil: /dev/null
	sinks   [2]io.Writer // where its output goes; with a terminal only the first is used

	group  string // its cgroup directory; empty: none
	inside string // the container's cgroup directory
	pid    int
	pidfd  *os.File
	ends   [3]*os.File // ours, of its streams; with a terminal the master is [1] alone
	out    [2]*copier  // reading ends[1] and ends[2], once the process runs

	connected func() // called when the streams are there; nil: nobody asks
}

// Exec implements oci.Runtime.
func (r *Runtime) Exec(ctx context.Context, id string, req oci.ExecRequest) (oci.ExecResult, error) {
	stdout, stderr := &keeper{limit: req.Limit}, &keeper{limit: req.Limit}
	x := &running{root: req.Root, stdin: req.Stdin, sinks: [2]io.Writer{stdout, stderr}}
	if req.Process != nil {
		x.process = *req.Process
	}
	x.process.Terminal, x.process.ConsoleSize = false, nil
	if req.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, req.Timeout, oci.ErrExecTimeout)
		defer cancel()
	}
	code, err := r.exec(ctx, id, x)
	if err != nil {
		return oci.ExecResult{}, err
	}
	return oci.ExecResult{Stdout: stdout.buf, Stderr: stderr.buf, ExitCode: code, Truncated: stdout.cut || stderr.cut}, nil
}

// exec runs x to its end, after which nothing is written to its sinks.
func (r *Runtime) exec(ctx context.Context, id string, x *running) (int32, error) {
	if len(x.process.Args) == 0 {
		return 0, errors.New("exec without a command")
	}
	ct, ok := r.monitor.Container(id)
	if !ok {
		return 0, fmt.Errorf("exec in %s: %w", id, oci.ErrNotFound)
	}
	if ct.Exit != nil {
		return 0, fmt.Errorf("exec in %s: %w", id, oci.ErrNotRunning)
	}
	x.r, x.id, x.inside = r, id, ct.Cgroups.Kill()
	defer x.close()
	if err := x.start(ctx, ct); err != nil {
		var e *oci.ExecError
		if errors.As(err, &e) && e.Err == nil && e.ExitCode > 0 {
			e.Err = oci.ErrRefused
			if monitor.Ended(ct.PID, ct.StartTime) { // meanwhile; what the binary trips over then varies
				e.Err = oci.ErrNotRunning
			}
		}
		return 0, x.failed(ctx, err)
	}
	defer r.await(ctx, "its process", x.pid)()
	return x.wait(ctx)
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
	spec, err := memfile("process.json", &x.process)
	if err != nil {
		return err
	}
	defer spec.Close()
	said, err := memfile("log", nil)
	if err != nil {
		return err
	}
	defer said.Close()
	args := []string{"--root", x.r.root, "--log", "/proc/self/fd/4", "--log-format", "json",
		"exec", "--detach", "--process", "/proc/self/fd/3", "--pid-file", pidFile}
	var c *console
	if x.process.Terminal {
		if c, err = listenConsole(x.r.monitor.ConsoleSocket()); err != nil {
			return err
		}
		defer c.close()
		args = append(args, "--console-socket", c.path)
	}
	args = append(args, x.makeGroup(ct, name)...)
	cmd := exec.Command(x.r.binary, append(args, x.id)...)
	cmd.ExtraFiles = []*os.File{spec, said}
	if err = x.spawn(ctx, cmd); err == nil || !errors.Is(err, errSpawn) {
		err = x.adopt(cmd, pidFile, said, err)
	}
	if err != nil {
		return err
	}
	if c != nil {
		if x.ends[1], err = c.receive(); err != nil {
			_ = x.killAll()
			return err
		}
	}
	x.connect()
	return nil
}

// errSpawn: the binary did not even begin.
var errSpawn = errors.New("start the OCI runtime")

// spawn runs the binary's exec with the streams of the process to be, until it
// has left that process behind.
func (x *running) spawn(ctx context.Context, cmd *exec.Cmd) (err error) {
	if err := x.r.answers(ctx); err != nil {
		return fmt.Errorf("%w: %w", errSpawn, err)
	}
	stdio, err := x.stdio()
	if err != nil {
		return fmt.Errorf("%w: %w", errSpawn, err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio[0], stdio[1], stdio[2]
	// In a session of its own: what a killed binary leaves behind is then reaped
	// as an orphan. A zombie in the container's PID namespace keeps the
	// container's end waiting.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// Held until the process runs: then it moves out, where it is still in.
	end, err := x.r.hold(ctx, cmd, "exec", x.id)
	if err != nil {
		closeFiles(stdio)
		return fmt.Errorf("%w: %w", errSpawn, err)
	}
	defer func() { end(err != nil) }()
	err = cmd.Start()
	closeFiles(stdio)
	if err != nil {
		return fmt.Errorf("%w: %w", errSpawn, &oci.ExecError{Args: cmd.Args, ExitCode: -1, Err: err})
	}
	x.r.monitor.Track(cmd.Process.Pid)
	defer x.r.monitor.Untrack(cmd.Process.Pid)
	over := make(chan struct{})
	defer close(over)
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-over:
		case <-time.After(startGrace):
			_ = cmd.Process.Kill()
		}
	})
	defer stop()
	err = cmd.Wait()
	return err
}

// adopt takes over the process that the binary left, by its pid file.
func (x *running) adopt(cmd *exec.Cmd, pidFile string, said *os.File, failure error) error {
	data, err := regular.Read(pidFile, regular.Most)
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
	if f := x.ends[2]; e.Stderr == "" && f != nil {
		_ = f.SetReadDeadline(time.Now().Add(drainLimit))
		text, _ := io.ReadAll(io.LimitReader(f, tailLimit))
		e.Stderr = bounded(plainLog(string(text)))
	}
	e.Err = sentinelOf(e.Stderr)
	var exit *exec.ExitError
	if errors.As(failure, &exit) {
		e.ExitCode = exit.ExitCode()
		e.Err = causeOf(e.Stderr, exit)
	}
	return e
}

// wait returns when the main process has ended and its output is delivered, or
// when the time is over and everything is killed.
func (x *running) wait(ctx context.Context) (int32, error) {
	raw, err := x.pidfd.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("wait for exec in %s: %w", x.id, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = x.pidfd.SetReadDeadline(time.Unix(1, 0)) })
	err = raw.Read(func(fd uintptr) bool { return ready(int(fd)) })
	stop()
	if err != nil {
		kerr := x.killAll()
		x.reap()
		if kerr != nil {
			return 0, fmt.Errorf("%w (and %w)", context.Cause(ctx), kerr)
		}
		return 0, context.Cause(ctx)
	}
	status, ok := x.reap()
	if !ok {
		return 0, fmt.Errorf("exit status of an exec in %s is lost", x.id)
	}
	limit := time.Now().Add(drainLimit)
	for _, c := range x.out {
		if c != nil {
			c.finish(time.Until(limit))
		}
	}
	return monitor.Code(status), nil
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
			c.stop()
		}
	}
	closeFiles(x.ends)
	if x.pidfd != nil {
		_ = x.pidfd.Close()
	}
	if x.pid != 0 {
		x.reap()
	}
	if x.group != "" {
		_ = monitor.DissolveCgroup(x.group, x.inside) // what is left ends with the container
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

// endForeignExecs kills what an exec of an earlier daemon still runs: whoever
// asked for it went with that daemon. What cannot be killed ends with the container.
func (r *Runtime) endForeignExecs(ctx context.Context, ct monitor.Container) {
	dirs, err := filepath.Glob(filepath.Join(ct.Cgroups.Kill(), "exec-*"))
	if err != nil || ct.Cgroups.Kill() == "" {
		return
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		if !execName.MatchString(name) || strings.HasPrefix(name, fmt.Sprintf("exec-%x-", r.born)) {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, killLimit)
		if monitor.KillCgroup(limited, dir) == nil {
			_ = monitor.RemoveCgroup(dir)
		}
		cancel()
		_ = os.Remove(filepath.Join(ct.Bundle, name+".pid"))
	}
}

// execName is what nextExec returns.
var execName = regexp.MustCompile(`^exec-[0-9a-f]+-[0-9]+$`)

func (r *Runtime) nextExec() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seq++
	return fmt.Sprintf("exec-%x-%d", r.born, r.seq)
}
