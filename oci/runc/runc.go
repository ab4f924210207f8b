package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/leash"
	"berth/oci/monitor"
)

// Options of a Runtime.
type Options struct {
	Binary  string          // runc or alike; a bare name is looked up in PATH
	Root    string          // the binary's --root, made when missing
	Monitor *monitor.Client // of the node; closed by its owner, after the last call
	// Answer tells whether a file answers that is about to be run: whoever runs one that
	// does not, this daemon or the monitor, stops all its goroutines with it. Its error
	// has the path. nil: nobody asks.
	Answer func(ctx context.Context, paths ...string) error
	// Await hears that ctx's call waits for an exec's process, by its pid, and is called
	// back when it has ended. nil: nobody asks.
	Await func(ctx context.Context, what string, pid int) (done func())
	Leash *leash.Leash // holds commands; nil: they are not held
}

// Runtime drives one binary. It implements oci.Runtime; exits are told by the
// monitor client's OnExit (see Exit).
type Runtime struct {
	binary  string
	root    string
	monitor *monitor.Client
	answer  func(ctx context.Context, paths ...string) error
	await   func(ctx context.Context, what string, pid int) (done func())
	leash   *leash.Leash

	features   func() (*features.Features, error)
	subCgroups func() bool // the binary's exec has --cgroup

	born int64 // with seq it names an exec, unlike those of an earlier daemon
	mu   sync.Mutex
	seq  int // of execs, guarded by mu
}

var _ oci.Runtime = (*Runtime)(nil)

// New finds the binary and prepares its root. It runs nothing yet.
func New(o Options) (*Runtime, error) {
	binary, err := exec.LookPath(o.Binary)
	if err != nil {
		return nil, fmt.Errorf("find OCI runtime: %w", err)
	}
	if binary, err = filepath.Abs(binary); err != nil {
		return nil, fmt.Errorf("find OCI runtime: %w", err)
	}
	if err := os.MkdirAll(o.Root, 0o700); err != nil {
		return nil, fmt.Errorf("make root of %s: %w", filepath.Base(binary), err)
	}
	r := &Runtime{binary: binary, root: o.Root, monitor: o.Monitor, leash: o.Leash, answer: o.Answer, await: o.Await, born: time.Now().UnixNano()}
	if r.answer == nil {
		r.answer = func(context.Context, ...string) error { return nil }
	}
	if r.await == nil {
		r.await = func(context.Context, string, int) func() { return func() {} }
	}
	r.features = lasting(r.readFeatures)
	probe := lasting(r.probeSubCgroups)
	r.subCgroups = func() bool { has, err := probe(); return has && err == nil }
	return r, nil
}

// Exit turns the monitor's record into oci's, for monitor.Options.OnExit.
func Exit(x monitor.Exit) oci.Exit {
	return oci.Exit{ID: x.ID, Code: x.Code, OOMKilled: x.OOMKilled, At: x.At, Unknown: x.Unknown, Dropped: x.Dropped}
}

// answers asks whether the binary does.
func (r *Runtime) answers(ctx context.Context) error {
	if err := r.answer(ctx, r.binary); err != nil {
		return fmt.Errorf("OCI runtime: %w", err)
	}
	return nil
}

// Create implements oci.Runtime.
func (r *Runtime) Create(ctx context.Context, req oci.CreateRequest) (oci.Process, error) {
	if err := checkID(req.ID); err != nil {
		return oci.Process{}, err
	}
	if _, err := os.Lstat(filepath.Join(r.root, req.ID)); err == nil {
		return oci.Process{}, fmt.Errorf("create %s: %w", req.ID, oci.ErrExists)
	}
	if err := errors.Join(r.answers(ctx), r.leash.Settle(ctx, req.ID, 0)); err != nil {
		return oci.Process{}, fmt.Errorf("create %s: %w", req.ID, err)
	}
	c := r.createCall(req)
	cgroup, end, err := r.leash.Hold("create", req.ID)
	if err != nil {
		return oci.Process{}, fmt.Errorf("create %s: %w", req.ID, err)
	}
	if cgroup != nil {
		c.Cgroup = cgroup.Name()
	}
	stop := guardCreate(req.ID)
	ct, err := r.monitor.Create(ctx, c)
	ended := stop()
	end(err != nil)
	if err != nil {
		if errors.Is(err, monitor.ErrExists) {
			return oci.Process{}, fmt.Errorf("create %s: %w", req.ID, oci.ErrExists)
		}
		err = r.createError(c, err)
		if ended {
			err = fmt.Errorf("%w: %w", errHalfDead, err)
		}
		if cerr := r.undo(ctx, c, errors.Is(err, monitor.ErrUnavailable)); cerr != nil {
			err = fmt.Errorf("%w (and %w)", err, cerr)
		}
		return oci.Process{}, fmt.Errorf("create %s: %w", req.ID, err)
	}
	_ = os.Remove(logPath(req.Bundle))
	return oci.Process{PID: ct.PID, StartTime: ct.StartTime}, nil
}

// undo removes what a failed create left, also when ctx has ended. Of a lost monitor
// nobody knows how far it came; where only the connection was lost, it goes on.
func (r *Runtime) undo(ctx context.Context, c monitor.Create, lost bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanLimit)
	defer cancel()
	if !lost {
		return r.sweep(ctx, c.ID, c.Bundle)
	}
	awaitCreate(ctx, c.ID)
	if err := r.sweep(ctx, c.ID, c.Bundle); err != nil {
		return err
	}
	err := r.monitor.Forget(ctx, c.ID)
	_ = os.Remove(c.PidFile) // else the monitor removes it
	monitor.RemoveContainer(c.Bundle)
	return asOCI(err)
}

func logPath(dir string) string { return filepath.Join(dir, "runtime.log") }

// createCall is the whole command line of a create and where its results are.
func (r *Runtime) createCall(req oci.CreateRequest) monitor.Create {
	c := monitor.Create{ID: req.ID, Bundle: req.Bundle, PidFile: filepath.Join(req.Bundle, "init.pid"), IO: monitor.IO{
		LogPath: req.IO.LogPath, Terminal: req.IO.Terminal, Stdin: req.IO.Stdin, StdinOnce: req.IO.StdinOnce,
		MaxLine: req.IO.MaxLine, UID: req.IO.UID, GID: req.IO.GID,
	}}
	if c.IO.MaxLine <= 0 {
		c.IO.MaxLine = 16384
	}
	c.Args = []string{r.binary, "--root", r.root, "--log", logPath(req.Bundle), "--log-format", "json"}
	if req.SystemdCgroup {
		c.Args = append(c.Args, "--systemd-cgroup")
	}
	if req.Restore != "" {
		c.Args = append(c.Args, "restore", "--detach", "--no-subreaper", "--image-path", req.Restore, "--work-path", req.Bundle,
			"--tcp-established", "--file-locks", "--bundle", req.Bundle, "--pid-file", c.PidFile)
	} else {
		c.Args = append(c.Args, "create", "--bundle", req.Bundle, "--pid-file", c.PidFile)
	}
	if req.IO.Terminal {
		c.ConsoleSocket = r.monitor.ConsoleSocket()
		c.Args = append(c.Args, "--console-socket", c.ConsoleSocket)
	}
	c.Args = append(c.Args, req.ID)
	return c
}

// createError says what the binary said.
func (r *Runtime) createError(c monitor.Create, err error) error {
	var refused *monitor.Error
	if !errors.As(err, &refused) {
		if errors.Is(err, monitor.ErrUnavailable) {
			return fmt.Errorf("%w: %w", oci.ErrMonitorUnavailable, err)
		}
		return err
	}
	if strings.Contains(refused.Text, "ended before it was started") {
		return fmt.Errorf("%w: %s: %w", errStopped, filepath.Base(r.binary), err)
	}
	if !refused.Command {
		return fmt.Errorf("%s: %w", filepath.Base(r.binary), err)
	}
	text := readLog(logPath(c.Bundle))
	if text == "" {
		text = plainLog(refused.Stderr)
	}
	if text == "" && refused.ExitCode < 0 {
		text = refused.Text
	}
	cause := sentinelOf(text)
	if cause == nil && (refused.ExitCode > 0 || strings.HasPrefix(refused.Text, "start ")) { // or was not there
		cause = oci.ErrRefused
	}
	return &oci.ExecError{Args: c.Args, ExitCode: refused.ExitCode, Stderr: bounded(text), Err: cause}
}

// execPatience is how long Start waits for the binary's own code in the container
// to make way for the container's program. It has nearly always done so before.
const execPatience = 200 * time.Millisecond

// Start implements oci.Runtime. The binary only tells its init to go on; a signal
// that meets the init's own code, and not the program, would end it as Go does.
func (r *Runtime) Start(ctx context.Context, id string) error {
	exe := ""
	ct, ok := r.monitor.Container(id)
	if ok {
		exe = fmt.Sprintf("/proc/%d/exe", ct.PID)
	}
	before, readErr := os.Readlink(exe)
	if _, err := r.run(ctx, nil, "start", id); errors.Is(err, errStopped) {
		return fmt.Errorf("start %s: %w", id, errStopped)
	} else if err != nil || readErr != nil {
		return err
	}
	pause := 50 * time.Microsecond
	for end := time.Now().Add(execPatience); time.Now().Before(end); pause = min(2*pause, time.Millisecond) {
		now, err := os.Readlink(exe)
		if err != nil {
			return r.endedEarly(ct)
		}
		if now != before {
			break
		}
		time.Sleep(pause)
	}
	return nil
}

// endedEarly says why an init ended, or half of it did, before it was the program;
// nil when it had become that.
func (r *Runtime) endedEarly(ct monitor.Container) error {
	if err := r.neverRan(ct); err != nil {
		return err
	}
	if halfDead(ct.PID) && unix.Kill(ct.PID, unix.SIGKILL) == nil { // still, although its end was waited for
		return fmt.Errorf("start %s: %w", ct.ID, errHalfDead)
	}
	return nil
}

// Signal implements oci.Runtime.
func (r *Runtime) Signal(id string, sig syscall.Signal) error {
	return asOCI(r.monitor.Signal(id, sig))
}

// KillAll implements oci.Runtime.
func (r *Runtime) KillAll(ctx context.Context, id string) error {
	ct, ok := r.monitor.Container(id)
	if !ok {
		return nil
	}
	if dir := ct.Cgroups.Kill(); dir != "" {
		return monitor.KillCgroup(ctx, dir)
	}
	// Without a cgroup of its own there is nothing but the init to go by.
	if err := r.monitor.Signal(id, syscall.SIGKILL); err != nil && !errors.Is(err, monitor.ErrEnded) {
		return asOCI(err)
	}
	return nil
}

// ReopenLog implements oci.Runtime.
func (r *Runtime) ReopenLog(ctx context.Context, id string) error {
	return asOCI(r.monitor.Reopen(ctx, id))
}

// Exited implements oci.Runtime.
func (r *Runtime) Exited(id string) (oci.Exit, bool) {
	x, ok := r.monitor.Exit(id)
	return Exit(x), ok
}

// Restore implements oci.Runtime.
func (r *Runtime) Restore(ctx context.Context, h oci.Handle) (oci.State, error) {
	ct, err := r.monitor.Restore(ctx, h.ID, h.Bundle, h.Process.PID, h.Process.StartTime)
	if err != nil {
		return oci.State{}, fmt.Errorf("restore %s: %w", h.ID, asOCI(err))
	}
	st := oci.State{Running: ct.Exit == nil, Started: r.started(h.ID)}
	if ct.Exit != nil {
		x := Exit(*ct.Exit)
		st.Exit = &x
	} else {
		r.endForeignExecs(ctx, ct)
	}
	return st, nil
}

// IDs implements oci.Runtime.
func (r *Runtime) IDs() ([]string, error) {
	ids := r.monitor.IDs()
	entries, err := os.ReadDir(r.root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return ids, fmt.Errorf("list states of containers: %w", err)
	}
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, nil
}

// started tells whether a created container's init was let run: it waits at a
// FIFO in the binary's state, which `start` removes.
func (r *Runtime) started(id string) bool {
	dir := filepath.Join(r.root, id)
	if _, err := os.Lstat(dir); err != nil {
		return false
	}
	_, err := os.Lstat(filepath.Join(dir, "exec.fifo"))
	return errors.Is(err, os.ErrNotExist)
}

// asOCI gives errors of the monitor package oci's sentinels.
func asOCI(err error) error {
	for from, to := range map[error]error{
		monitor.ErrNotFound: oci.ErrNotFound, monitor.ErrEnded: oci.ErrNotRunning, monitor.ErrUnavailable: oci.ErrMonitorUnavailable,
		monitor.ErrUnsupported: oci.ErrUnsupported, monitor.ErrSlow: oci.ErrSlow,
	} {
		if errors.Is(err, from) {
			return fmt.Errorf("%w: %w", to, err)
		}
	}
	return err
}

// checkID refuses what could leave the binary's root.
func checkID(id string) error {
	if id == "" || id == "." || id == ".." || strings.ContainsAny(id, "/\x00") || strings.HasPrefix(id, "-") {
		return fmt.Errorf("container id %q: %w", id, oci.ErrNotFound)
	}
	return nil
}
