package runc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci"
)

// A seccomp profile that kills threads may kill the one of the binary's init that
// is about to become the program. The others live on and do nothing, and the
// binary, or whoever waits for the container's end, waits for ever. Such an init is
// known by its name, which ends when the program begins.

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
				for _, pid := range childrenOf(createPID(id)) {
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
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err != nil || !strings.HasPrefix(string(comm), initName) || !isZombie(pid, pid) {
		return false
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", pid))
	if err != nil {
		return false
	}
	for _, t := range threads {
		tid, err := strconv.Atoi(filepath.Base(t))
		if err == nil && tid != pid && !isZombie(pid, tid) {
			return true
		}
	}
	return false
}

// isZombie also says yes of a thread that is gone.
func isZombie(pid, tid int) bool {
	state, _, ok := statOf(fmt.Sprintf("/proc/%d/task/%d/stat", pid, tid))
	return !ok || state == "Z" || state == "X"
}

// statOf reads the state and the parent of a process or thread.
func statOf(file string) (state string, parent int, ok bool) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", 0, false
	}
	f := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(f) < 2 {
		return "", 0, false
	}
	parent, err = strconv.Atoi(f[1])
	return f[0], parent, err == nil
}

// childrenOf lists a process's children, zombies too.
func childrenOf(parent int) (pids []int) {
	if parent == 0 {
		return nil
	}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		if _, p, ok := statOf(f); ok && p == parent {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			if err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
