package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/sandbox/leakcheck"
)

// fault is one thing that goes wrong while a request is served.
type fault interface {
	String() string
	arm(*world) error
	// release ends the fault, after the request; false: nothing went wrong, for it
	// was not reached.
	release(*world) (bool, error)
	// answer says what is wrong about the request's own answer.
	answer(error) error
}

// killAt ends the daemon or the monitor when a step is reached.
type killAt struct {
	victim, step string
	trap         *trap
	missed       bool // there was no monitor yet
}

func (f *killAt) String() string { return f.victim + " killed at " + f.step }

func (f *killAt) arm(w *world) error {
	f.trap = w.steps.set(f.step, func(pid int) {
		if f.victim == "monitor" {
			pid = w.monitor()
		}
		if f.missed = pid == 0; !f.missed {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return nil
}

func (f *killAt) release(w *world) (bool, error) {
	sprung := w.steps.unset(f.trap) && !f.missed
	return sprung, w.await(sprung && f.victim == "daemon")
}

func (f *killAt) answer(err error) error {
	if f.victim == "daemon" && err == nil {
		return errors.New("the request succeeded although its daemon was killed")
	}
	return nil
}

// killIn ends the daemon or the monitor in the middle of a system call of its own.
type killIn struct {
	victim, call string
	snare        *snare
}

func (f *killIn) String() string { return f.victim + " killed in " + f.call }

func (f *killIn) arm(w *world) error {
	f.snare = &snare{call: f.call, kill: true}
	w.calls.set(f.snare)
	return nil
}

func (f *killIn) release(w *world) (bool, error) {
	caught := w.calls.unset(f.snare)
	return caught, w.await(caught && f.victim == "daemon")
}

// answer: the call may be one of the background, so the request may have been
// answered before.
func (f *killIn) answer(error) error { return nil }

// failIn fails a system call.
type failIn struct {
	call  string
	errno syscall.Errno
	snare *snare
}

func (f *failIn) String() string { return fmt.Sprintf("%v in %s", f.errno, f.call) }

func (f *failIn) arm(w *world) error {
	f.snare = &snare{call: f.call, errno: f.errno}
	w.calls.set(f.snare)
	return nil
}

func (f *failIn) release(w *world) (bool, error) { return w.calls.unset(f.snare), nil }

// answer: of a message that the monitor could not send the daemon knows only that its
// connection has ended.
func (f *failIn) answer(err error) error {
	if strings.HasPrefix(f.call, "monitor "+message) && err != nil && strings.Contains(err.Error(), "monitor unavailable") {
		return nil
	}
	return names(err, f.errno)
}

// names wants an error to say what the kernel said, with the code for it. No error
// is right where the daemon did without the call.
func names(err error, errno syscall.Errno) error {
	if err == nil {
		return nil
	}
	s, rpc := status.FromError(err)
	if text := err.Error(); !rpc { // of crictl or of a verb
		if !strings.Contains(text, errno.Error()) {
			return fmt.Errorf("the command does not say %q: %s", errno.Error(), text)
		}
		return nil
	}
	text, code := s.Message(), s.Code()
	switch {
	case errno == syscall.ENOSPC && code != codes.ResourceExhausted:
		return fmt.Errorf("a full disk has the code %s: %s", code, text)
	case code == codes.Internal || code == codes.NotFound || code == codes.OK || code == codes.DeadlineExceeded:
		return fmt.Errorf("%q has the code %s: %s", errno.Error(), code, text)
	case !strings.Contains(text, errno.Error()):
		return fmt.Errorf("the error does not say %q: %s", errno.Error(), text)
	}
	return nil
}

// breakPart has runc or a CNI plugin misbehave.
type breakPart struct {
	who, verb, mode string
	times           int
}

func (f *breakPart) String() string {
	return fmt.Sprintf("%s %s %s (%d times)", f.who, f.verb, f.mode, f.times)
}

func (f *breakPart) arm(w *world) error { return w.parts.breaks(f.who, f.verb, f.mode, f.times) }

func (f *breakPart) release(w *world) (bool, error) {
	broke := w.parts.broke()
	w.parts.mends()
	return broke, nil
}

func (f *breakPart) answer(err error) error {
	if err == nil {
		if f.verb == "DEL" || f.verb == "delete" {
			return nil // these are tried again at once
		}
		return errors.New("the request succeeded")
	}
	text, code := status.Convert(err).Message(), status.Code(err)
	who := f.who
	if who == "host-local" {
		who = "bridge" // which calls it, and is all that the daemon sees
	}
	says := map[string]string{"refuses": "the injected refusal", "loses": "the injected refusal", "hangs": "", "killed": "killed", "babbles": ""}[f.mode]
	if f.mode == "killed" && f.verb == "create" {
		says = "code 137" // the monitor's word, which has no other
	}
	switch {
	case code == codes.Internal || code == codes.NotFound || code == codes.OK || code == codes.InvalidArgument:
		return fmt.Errorf("the code is %s: %s", code, text)
	case f.mode == "hangs" && code != codes.DeadlineExceeded:
		return fmt.Errorf("the code is %s, not that of a deadline: %s", code, text)
	case f.mode == "hangs" && f.verb == "exec":
		return nil // nobody can join an exec: it ends with its caller, who reads no answer any more
	case !strings.Contains(text, says) || !strings.Contains(text, who):
		return fmt.Errorf("the error does not name %s or does not say %q: %s", who, says, text)
	}
	return nil
}

// fillDisk leaves nothing free in a filesystem of the daemon from a step on.
type fillDisk struct {
	step, dir string // dir is root or state
	trap      *trap
	failed    error // of the fault itself
}

func (f *fillDisk) String() string { return f.dir + " full from " + f.step + " on" }

func (f *fillDisk) path(w *world) string {
	return map[string]string{"root": w.Root(), "state": w.State()}[f.dir]
}

func (f *fillDisk) arm(w *world) error {
	f.trap = w.steps.set(f.step, func(int) { f.failed = fill(f.path(w)) })
	return nil
}

func (f *fillDisk) release(w *world) (bool, error) {
	if !w.steps.unset(f.trap) {
		return false, nil
	}
	return true, errors.Join(f.failed, empty(f.path(w)))
}

func (f *fillDisk) answer(err error) error { return names(err, syscall.ENOSPC) }

// denyAll fails each call that changes something below a directory of the daemon,
// from a step on: also those that undo.
type denyAll struct {
	step, dir string // dir is root or state
	errno     syscall.Errno
	trap      *trap
	snare     *snare
}

func (f *denyAll) String() string {
	return fmt.Sprintf("%v all over %s from %s on", f.errno, f.dir, f.step)
}

func (f *denyAll) arm(w *world) error {
	f.snare = &snare{below: f.dir + "/", errno: f.errno}
	f.trap = w.steps.set(f.step, func(int) { w.calls.set(f.snare) })
	return nil
}

func (f *denyAll) release(w *world) (bool, error) {
	if !w.steps.unset(f.trap) {
		return false, nil
	}
	w.calls.unset(f.snare)
	return true, nil
}

func (f *denyAll) answer(err error) error { return names(err, f.errno) }

// shortDeadline is the client's own, for what hangs longer than anybody waits.
var shortDeadline = leakcheck.Patience(3 * time.Second)

// limit is how long the request may take in which f happens.
func limit(ctx context.Context, f fault) (context.Context, context.CancelFunc) {
	if b, ok := f.(*breakPart); ok && b.mode == "hangs" {
		return context.WithTimeout(ctx, shortDeadline)
	}
	return context.WithTimeout(ctx, patience)
}
