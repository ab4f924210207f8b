package admin

import "time"

// Why tells what operations wait for, and why a pod or container is not ready or
// has ended.
const Why Method[WhyRequest, WhyReply] = "Why"

// WhyRequest asks about one pod or container and what belongs to it.
type WhyRequest struct {
	// Object is the name of a pod or container (a pod's also as namespace/name), or an
	// id, or the beginning of one, or of what an operation works on; empty: every
	// running operation.
	Object string `json:"object,omitempty"`
}

// WhyReply has the objects that were asked for: a pod with its containers.
type WhyReply struct {
	Operations []WhyOperation `json:"operations"` // those that run, the oldest first
	Objects    []WhyObject    `json:"objects"`
}

// WhyOperation is a running operation.
type WhyOperation struct {
	Verb        string    `json:"verb"`
	Object      string    `json:"object"` // its name
	ID          string    `json:"id,omitempty"`
	Began       time.Time `json:"began"`
	Seconds     float64   `json:"seconds"`
	Step        string    `json:"step"`
	StepSeconds float64   `json:"stepSeconds"`
	Waits       []WhyWait `json:"waits"` // what it waits for, as far as that can be told
}

// WhyWait is something that an operation may wait for: a process, or a lock, a path
// or a registry.
type WhyWait struct {
	PID     int     `json:"pid,omitempty"` // 0: no process
	Parent  int     `json:"parent,omitempty"`
	What    string  `json:"what"` // "CNI plugin bridge ADD", "runc create", "init of container …", "path …", or the process's name
	Seconds float64 `json:"seconds,omitempty"`
	State   string  `json:"state,omitempty"` // as ps(1) has it: D is uninterruptible sleep
	Channel string  `json:"channel,omitempty"`
	// Stack is where it is in the kernel, where the daemon may know.
	Stack []string `json:"stack,omitempty"`
}

// WhyObject is a pod or a container.
type WhyObject struct {
	Kind   string      `json:"kind"`         // pod, container, or object where nothing but a failure is known
	ID     string      `json:"id,omitempty"` // empty: there is no record
	Name   string      `json:"name"`
	State  string      `json:"state"`
	Reason string      `json:"reason,omitempty"` // why it is not ready, or ended
	Log    string      `json:"log,omitempty"`    // of a container that has ended
	Failed *WhyFailure `json:"failed,omitempty"` // the last operation on it that failed since the daemon's start
}

// WhyFailure is an operation that failed.
type WhyFailure struct {
	Verb  string    `json:"verb"`
	Step  string    `json:"step"`
	Error string    `json:"error"`
	At    time.Time `json:"at"`
}
