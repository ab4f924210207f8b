// Package oci says what berth asks of an OCI runtime, whichever binary stands
// behind it, and holds the types that travel between the flows in runtime and
// the drivers in oci/runc.
//
// It owns the Runtime interface, the exit and process types and the errors. It
// does not own the specification's content (oci/spec), the command line of a
// binary (oci/runc) or the talk with the node's monitor (oci/monitor).
//
// On disk a container has a bundle, /run/berth/containers/<id>, with config.json
// (written by WriteBundle), rootfs (mounted by image/rootfs) and exit.json
// (written by the monitor once, when the container's init ends).
package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"syscall"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrNotFound: the runtime knows no container of that id.
	ErrNotFound = errors.New("container not found in the runtime")
	// ErrExists: a container of that id exists already.
	ErrExists = errors.New("container exists in the runtime")
	// ErrNotRunning: the container's init has ended or was never started.
	ErrNotRunning = errors.New("container is not running")
	// ErrUnsupported: the node's monitor is of an older release that cannot do it.
	ErrUnsupported = errors.New("unsupported by the running monitor")
	// ErrRefused: the binary cannot be run, or cannot make a container of the specification, or give
	// it those limits, for a reason that only its words tell.
	ErrRefused = errors.New("the OCI runtime refuses")
	// ErrProgram: the container has no such program, or one that cannot be run.
	ErrProgram = errors.New("the program cannot be run")
	// ErrLimit: the kernel refuses the value of a resource limit.
	ErrLimit = errors.New("resource limit refused by the kernel")
	// ErrNoCheckpoint: this machine cannot checkpoint containers.
	ErrNoCheckpoint = errors.New("checkpoints are not possible here")
	// ErrSlow: a client of an attach was too far behind to get the last output.
	ErrSlow = errors.New("the client read too slowly")
	// ErrMonitorUnavailable: the node's monitor cannot be reached or started.
	ErrMonitorUnavailable = errors.New("monitor unavailable")
)

// ExecError is a runtime command that ended with a failure.
type ExecError struct {
	Args     []string // the command line
	ExitCode int      // -1 when killed or never started
	Stderr   string   // what it said, trimmed and bounded to 4 KiB
	Err      error    // the cause, when it is one of the sentinels or an os error
}

func (e *ExecError) Error() string {
	name := "OCI runtime"
	if len(e.Args) > 0 {
		name = filepath.Base(e.Args[0])
	}
	switch {
	case e.Stderr != "":
		return name + ": " + e.Stderr
	case e.Err != nil && e.ExitCode <= 0:
		return name + ": " + e.Err.Error()
	default:
		return fmt.Sprintf("%s ended with code %d and said nothing", name, e.ExitCode)
	}
}

func (e *ExecError) Unwrap() error { return e.Err }

// IO says where a container's standard streams go. It is fixed at creation.
type IO struct {
	LogPath   string // CRI log file, absolute; empty: output is read and discarded
	Terminal  bool   // a pty; stderr is merged into stdout
	Stdin     bool   // keep a stdin pipe for attach; otherwise /dev/null
	StdinOnce bool   // close stdin when the first attach session ends
	MaxLine   int    // bytes of one log piece; 0 means 16384
	UID, GID  uint32 // owner given to the pipes or pty, so a non-root process may reopen /dev/stderr
}

// CreateRequest is what Create needs; the bundle holds config.json already.
type CreateRequest struct {
	ID     string
	Bundle string // absolute directory
	IO     IO
	// Restore is a directory that Checkpoint wrote: the container's processes go
	// on from there as soon as it is created, without Start. Empty: none.
	Restore string
	// SystemdCgroup has systemd make the cgroup; the specification's cgroupsPath
	// is then slice:prefix:name.
	SystemdCgroup bool
}

// Checkpoint says where Runtime.Checkpoint writes. Both directories are made
// when missing, and are the caller's to remove.
type Checkpoint struct {
	Images string // the state of the processes
	Work   string // logs
}

// Process is a container's init as the kernel knows it.
type Process struct {
	PID       int
	StartTime uint64 // field 22 of /proc/<pid>/stat, clock ticks since boot: with PID it names the process for this boot
}

// Exit is the end of a container's init.
type Exit struct {
	ID        string
	Code      int32 // 0..255; 128+n for signal n; 255 when Unknown is set
	OOMKilled bool  // init died of SIGKILL and the cgroup's oom_kill counter rose in this life
	At        time.Time
	Unknown   string // why the code is not known; empty when it is
	Dropped   uint64 // bytes of output, about, that the log could not take
}

// Handle names a container that an earlier daemon made.
type Handle struct {
	ID      string
	Bundle  string
	Process Process
}

// State is what Restore found out about a Handle.
type State struct {
	Running bool
	Started bool  // the user's process was let run, also if it has ended since
	Exit    *Exit // set when the init has ended
}

// ExecRequest is one process run in a container to its end (CRI ExecSync).
type ExecRequest struct {
	Process *rspec.Process
	Timeout time.Duration // 0: none
	Limit   int64         // bytes kept of each stream, the rest is drained and dropped
	Stdin   io.Reader     // nil: /dev/null
	Root    Root
}

// Root are the node's ids behind a container's user and group 0; zero when it has
// no user namespace. By them an exec's pipes are given to its user.
type Root struct{ UID, GID uint32 }

// ExecResult is the end of an exec.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32
	Truncated      bool // a stream was longer than Limit
}

// Size is that of a terminal, in characters.
type Size struct{ Columns, Rows uint16 }

// Streams are a client's ends of a session. When the session's context ends,
// their owner makes every Read and Write on them return; a Read may outlive the
// session until then.
type Streams struct {
	Stdin  io.Reader   // nil: none
	Stdout io.Writer   // nil: dropped; with a terminal it has both streams
	Stderr io.Writer   // nil: dropped
	Resize <-chan Size // sizes of the client's terminal; nil: none. It need not be closed
}

// SessionRequest is one process with a client at its other end (CRI Exec). With
// Process.Terminal it gets a pty.
type SessionRequest struct {
	Process *rspec.Process
	Root    Root
	Streams
}

// ErrExecTimeout: the exec's deadline passed and all its processes were killed.
var ErrExecTimeout = errors.New("exec timed out")

// Runtime drives one OCI runtime binary. All methods may be called from many
// goroutines; calls for one container are ordered by the caller.
type Runtime interface {
	// Create spawns `create` as a child of the monitor. It blocks until the
	// init waits for Start. On error nothing is left behind. ErrExists.
	Create(ctx context.Context, r CreateRequest) (Process, error)
	// Start lets the init run the user's process. Not idempotent.
	Start(ctx context.Context, id string) error
	// Signal sends sig to the init by pidfd. ErrNotRunning when it has ended,
	// ErrNotFound when it is unknown, or deleted.
	Signal(id string, sig syscall.Signal) error
	// KillAll kills every process of the container's cgroup (cgroup.kill, or the
	// v1 freezer walk). Idempotent; nil when there is none.
	KillAll(ctx context.Context, id string) error
	// Exec runs a process to its end. It returns when the main process ends,
	// after a short drain, even if a child holds its pipes. On timeout or a
	// cancelled ctx every process of the exec is gone before it returns.
	Exec(ctx context.Context, id string, r ExecRequest) (ExecResult, error)
	// ExecSession runs a process with a client at its streams and returns its
	// exit code. It ends as Exec does: with the main process, once what it wrote
	// before is with the client; when ctx ends, with every process of the exec.
	ExecSession(ctx context.Context, id string, r SessionRequest) (int32, error)
	// Attach joins a client to the streams of a container's init, from now on.
	// It returns nil when the container ends, and ctx's error when that ends:
	// the container goes on then, but its stdin closes where IO.StdinOnce says
	// so, as it does when s.Stdin ends. Input for a container without stdin is
	// dropped. Many may be attached. None is
	// waited for: when one lags by more than about 8 MiB, a line tells it how
	// much was skipped (ErrSlow when that was the end).
	// ErrNotFound, ErrNotRunning, ErrUnsupported; ErrMonitorUnavailable when
	// the monitor was lost, after which Attach works again.
	Attach(ctx context.Context, id string, s Streams) error
	// Update applies resources to a created or running container.
	Update(ctx context.Context, id string, r *rspec.LinuxResources) error
	// Delete removes the runtime's state, cgroup and the monitor's record of an
	// ended container. Idempotent: an unknown id is nil. A living init is killed first.
	Delete(ctx context.Context, id string) error
	// ReopenLog closes and reopens the log file by its path (after rotation).
	// ErrNotRunning when the init has ended; no new file is made then.
	ReopenLog(ctx context.Context, id string) error
	// Restore adopts a container of an earlier daemon and says what became of it,
	// before any other method is called for it. Idempotent. On an error nothing is
	// known of it, and it is to be asked again.
	Restore(ctx context.Context, h Handle) (State, error)
	// IDs are those of every container that the binary or the monitor knows,
	// whoever made it; one may be there twice.
	IDs() ([]string, error)
	// Exited returns the exit of a container once known. Never blocks; the
	// kernel (pidfd, exit.json) is asked again when no notice has come.
	Exited(id string) (Exit, bool)
	// Pause stops every process of the container until Resume. Idempotent.
	// ErrNotFound, ErrNotRunning.
	Pause(ctx context.Context, id string) error
	// Resume lets a paused container go on. Idempotent; nil when it has ended.
	Resume(id string) error
	// CanCheckpoint asks binary and kernel, in some 50 ms. ErrNoCheckpoint says
	// what is lacking.
	CanCheckpoint(ctx context.Context) error
	// Checkpoint writes the state of a container's processes (CRIU), which go on
	// when it returns, or stay paused where they were. When it fails, what it
	// wrote is the caller's to remove, and the container to be resumed.
	Checkpoint(ctx context.Context, id string, c Checkpoint) error
	// Features is `runc features`, read once.
	Features(ctx context.Context) (*features.Features, error)
	// Version is the first line of the binary's --version.
	Version(ctx context.Context) (string, error)
}
