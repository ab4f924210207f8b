package runc

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
)

// A seccomp profile that kills threads may kill the one of the binary's init that
// is about to become the program. The others live on and do nothing, and the
// binary, or whoever waits for the container's end, waits for ever. Such an init is
// known by its name, which ends when the program begins.

// errStopped is a create or start whose init has ended by itself.
var errStopped = fmt.Errorf("%w: its init ended before the program began, as by a seccomp profile that kills", oci.ErrRefused)

// errHalfDead says so.
var errHalfDead = fmt.Errorf("%w: a thread of its init was killed before the program began, as by a seccomp profile that kills", oci.ErrRefused)

// initName is what the binary calls its processes until they are the program.
const initName = "runc:["

// halfDeadEvery is how often a create that takes long is looked at. What is half dead
// at two looks is so for good: in passing, every process with threads is that dies.
const halfDeadEvery = time.Second

// guardCreate ends what is half dead of a create while it runs. stop ends the
// guard and tells whether there was something.
func guardCreate(id string) (stop func() bool) {
	over, ended := make(chan struct{}), false
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(halfDeadEvery)
		defer tick.Stop()
		before := map[int]bool{}
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				now := map[int]bool{}
				for _, pid := range monitor.Children(createPID(id)) {
					now[pid] = halfDead(pid)
					if now[pid] && before[pid] {
						ended = unix.Kill(pid, unix.SIGKILL) == nil || ended
					}
				}
				before = now
			}
		}
	})
	return func() bool {
		close(over)
		done.Wait()
		return ended
	}
}

// halfDead tells an init whose first thread is dead and others are not.
func halfDead(pid int) bool {
	if at, ok := monitor.Look(pid); !ok || !strings.HasPrefix(at.Name, initName) || !dead(pid) {
		return false
	}
	return slices.ContainsFunc(monitor.Threads(pid), func(tid int) bool { return !dead(tid) })
}

// dead also says yes of a thread that is gone.
func dead(tid int) bool {
	state, _, ok := monitor.State(tid)
	return !ok || state == "Z" || state == "X"
}
