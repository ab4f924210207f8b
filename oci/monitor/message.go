package monitor

import (
	"syscall"
	"time"
)

// Limits of one message.
const (
	maxFrame = 1 << 20 // bytes of JSON
	maxFDs   = 8       // descriptors that travel with it
)

// Operations. A request has an ID and gets one answer with the same ID and the
// operation "answer"; "park", "exit", "detached" and "trouble" come from the monitor by
// themselves.
const (
	OpHello    = "hello"  // answered after a park for each container
	OpCreate   = "create" // spawns the OCI runtime's create
	OpCancel   = "cancel" // ends the create whose ID is in Cancel
	OpAdopt    = "adopt"  // hands a container to a new monitor
	OpReopen   = "reopen" // reopens a container's log
	OpForget   = "forget" // drops an ended container
	OpAttach   = "attach" // copies output to the sockets FDStdout and FDStderr that come along
	OpDetach   = "detach" // ends that attachment
	OpStdin    = "closestdin"
	OpRenew    = "renew" // makes the monitor become Binary in place; answered only when that fails
	OpAnswer   = "answer"
	OpPark     = "park"     // a container and its descriptors
	OpExit     = "exit"     // a container's init has ended
	OpDetached = "detached" // an attachment has ended in the monitor
	OpTrouble  = "trouble"  // for an operator to know
)

// Names of the descriptors of a container, in Message.FDs.
const (
	FDStdout = "stdout" // read end of the pipe
	FDStderr = "stderr" // read end of the pipe
	FDStdin  = "stdin"  // write end of the pipe
	FDTTY    = "tty"    // master of the pty
	FDBuffer = "buffer" // pipe between the pty and the tape
	FDLog    = "log"    // the open log file
	FDTape   = "tape"   // memfd of what is read and not yet logged
	FDPid    = "pidfd"  // of the init
)

// Message is one frame in either direction.
type Message struct {
	ID      uint64 `json:"id,omitempty"`
	Op      string `json:"op"`
	Version int    `json:"version,omitempty"` // in hello and renew the newest that the daemon speaks, in hello's answer the one agreed on
	Oldest  int    `json:"oldest,omitempty"`  // in hello and renew
	PID     int    `json:"pid,omitempty"`     // the monitor's, in the answer to hello

	Create     *Create    `json:"create,omitempty"`
	Cancel     uint64     `json:"cancel,omitempty"`
	Container  *Container `json:"container,omitempty"`
	Target     string     `json:"target,omitempty"`     // container id of reopen, forget, attach, detach, closestdin, detached
	Session    uint64     `json:"session,omitempty"`    // ID of the attach that detach and detached are about
	Sessions   []uint64   `json:"sessions,omitempty"`   // in hello those that a renewed monitor is to go on with, in its answer those it has
	Input      bool       `json:"input,omitempty"`      // attach: this client writes to stdin
	Binary     string     `json:"binary,omitempty"`     // renew: absolute
	Extensions []string   `json:"extensions,omitempty"` // in the answer to hello
	Exit       *Exit      `json:"exit,omitempty"`
	Error      *Error     `json:"error,omitempty"`

	FDs []string `json:"fds,omitempty"` // names of the descriptors that come along, in order
	fds []int
}

// Kinds of a trouble about the log of the container in Target.
const (
	Stalled = "stalled" // it does not answer
	Answers = "answers" // it does again
	Dropped = "dropped" // it could not take output, which is lost
)

// Error is a refusal by the monitor, or a trouble.
type Error struct {
	Kind     string `json:"kind,omitempty"` // "exists", "notfound", "ended", "version", "slow", Stalled, Answers, Dropped or empty
	Text     string `json:"text"`
	Errno    int    `json:"errno,omitempty"`    // of the system call that failed
	ExitCode int    `json:"exitCode,omitempty"` // of the OCI runtime's create
	Stderr   string `json:"stderr,omitempty"`   // what it wrote there
	Command  bool   `json:"command,omitempty"`  // the OCI runtime ran and failed
}

var kinds = map[string]error{"exists": ErrExists, "notfound": ErrNotFound, "ended": ErrEnded, "version": ErrVersion, "slow": ErrSlow}

func (e *Error) Error() string { return e.Text }

// Unwrap gives the sentinel of the error's kind and its errno.
func (e *Error) Unwrap() []error {
	var causes []error
	if cause, ok := kinds[e.Kind]; ok {
		causes = append(causes, cause)
	}
	if e.Errno != 0 {
		causes = append(causes, syscall.Errno(e.Errno))
	}
	return causes
}

// Create asks for a container. The command line is complete: the monitor adds
// nothing to it, and knows where its results appear.
type Create struct {
	ID            string   `json:"id"`
	Bundle        string   `json:"bundle"` // absolute
	Args          []string `json:"args"`   // the OCI runtime's create
	PidFile       string   `json:"pidFile"`
	ConsoleSocket string   `json:"consoleSocket,omitempty"` // the monitor listens there; wanted when Terminal
	// Cgroup is the directory, of version 2, into which the command is born; empty:
	// the monitor's own. What a create that has succeeded leaves there moves to the
	// monitor's own before the answer: it is the container's. Else it is the caller's.
	Cgroup string `json:"cgroup,omitempty"`
	IO     IO     `json:"io"`
}

// IO says where a container's streams go.
type IO struct {
	LogPath   string `json:"logPath,omitempty"` // empty: read and drop
	Terminal  bool   `json:"terminal,omitempty"`
	Stdin     bool   `json:"stdin,omitempty"`
	StdinOnce bool   `json:"stdinOnce,omitempty"`
	MaxLine   int    `json:"maxLine"` // bytes of one log piece
	UID       uint32 `json:"uid,omitempty"`
	GID       uint32 `json:"gid,omitempty"`
}

// Container is what outlives both processes; monitor.json holds it.
type Container struct {
	Version   int     `json:"version"`
	ID        string  `json:"id"`
	Bundle    string  `json:"bundle"`
	PID       int     `json:"pid"`
	StartTime uint64  `json:"startTime"` // field 22 of /proc/<pid>/stat
	IO        IO      `json:"io"`
	Cgroups   Cgroups `json:"cgroups"`
	OOMKills  uint64  `json:"oomKills,omitempty"` // the memory cgroup's counter when the container was made
	// Pipes are the inodes of the pipes of stdout and stderr: by them a new
	// monitor finds the pipes in the container when nobody parked them.
	Pipes [2]uint64 `json:"pipes,omitempty"`
	// Exit is set in a park message when the init has ended. Never on disk.
	Exit *Exit `json:"exit,omitempty"`
}

// Exit is the end of an init; exit.json holds it.
type Exit struct {
	Version   int       `json:"version"`
	ID        string    `json:"id"`
	PID       int       `json:"pid"`
	StartTime uint64    `json:"startTime"`
	Code      int32     `json:"code"` // 0..255, 128+n for signal n, 255 when unknown
	OOMKilled bool      `json:"oomKilled,omitempty"`
	At        time.Time `json:"at"`
	Unknown   string    `json:"unknown,omitempty"` // why the code is not known
	Dropped   uint64    `json:"dropped,omitempty"` // bytes of output that no log could take
}
