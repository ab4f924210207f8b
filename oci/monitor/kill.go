package monitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// gone: the cgroup was removed, before or during the call.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// KillCgroup kills every process of a cgroup directory and of those below it
// and returns when none is left but zombies. Idempotent; nil when the
// directory is gone. v2 does it by cgroup.kill, v1 by freezing, killing and
// thawing until nothing is left; what somebody else froze dies as well (see
// moveToThawed). It blocks until then, until ctx ends, or until
// what is left has hung inside the kernel for 3 seconds; the error then names the
// processes and wraps context.DeadlineExceeded. They die when the kernel lets go.
func KillCgroup(ctx context.Context, dir string) error {
	if err := guard(dir); err != nil {
		return err
	}
	var hung stuck
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		pids, err := living(dir)
		if err == nil && len(pids) == 0 {
			// A daemon that was killed in the middle of killOnce has left it frozen, and
			// OCI runtimes delete no container that seems to be paused.
			freeze(dir, "THAWED", "0")
		}
		if err != nil || len(pids) == 0 {
			return err
		}
		if err := killOnce(dir); err != nil {
			return err
		}
		if pids, err = living(dir); err != nil || len(pids) == 0 {
			return err
		}
		if hung.look(pids) {
			return left(dir, pids, context.DeadlineExceeded)
		}
		select {
		case <-ctx.Done():
			return left(dir, pids, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// guard refuses what cannot be a container's cgroup: a mount point, or a
// cgroup that holds this process.
func guard(dir string) error {
	if dir == "" || !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return fmt.Errorf("kill cgroup %q: %w", dir, ErrSharedCgroup)
	}
	mounts, err := cgroupMounts()
	if err != nil {
		return err
	}
	self, err := readCgroupFile("self")
	if err != nil {
		return err
	}
	below := false
	for controller, m := range mounts {
		own := filepath.Join(m[0], strings.TrimPrefix(self[controller], strings.TrimSuffix(m[1], "/")))
		if within(own, dir) {
			return fmt.Errorf("kill cgroup %q: %w", dir, ErrSharedCgroup)
		}
		below = below || dir != m[0] && within(dir, m[0])
	}
	if !below {
		return fmt.Errorf("kill cgroup %q: it is in no hierarchy: %w", dir, ErrSharedCgroup)
	}
	return nil
}

func killOnce(dir string) error {
	err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
	if err == nil {
		return nil
	}
	// v1, or a kernel before 5.14: the freezer keeps forks from getting away.
	freeze(dir, "FROZEN", "1")
	defer freeze(dir, "THAWED", "0")
	pids, err := Processes(dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return fmt.Errorf("kill %d of cgroup %s: %w", pid, dir, err)
		}
	}
	thawBelow(dir)
	return moveToThawed(dir, pids)
}

// thawBelow lets go what groups below dir hold by themselves, as an OCI runtime
// inside of the container may have frozen one.
func thawBelow(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if e.IsDir() {
			below := filepath.Join(dir, e.Name())
			_ = os.WriteFile(filepath.Join(below, "freezer.state"), []byte("THAWED"), 0)
			thawBelow(below)
		}
	}
}

// moveToThawed lets killed processes die where somebody froze an ancestor of
// their cgroup, such as the whole pod. v2 kills frozen processes; v1 keeps them
// until they are thawed, or come into a cgroup that is not frozen. So they do,
// and what else is frozen stays so. It waits for their end: they are no longer
// found in dir.
func moveToThawed(dir string, pids []int) error {
	if data, err := os.ReadFile(filepath.Join(dir, "freezer.parent_freezing")); err != nil || strings.TrimSpace(string(data)) != "1" {
		return nil
	}
	thawed := filepath.Dir(dir)
	for {
		state, err := os.ReadFile(filepath.Join(thawed, "freezer.state")) // the hierarchy's root has none
		if err != nil || strings.TrimSpace(string(state)) == "THAWED" {
			break
		}
		thawed = filepath.Dir(thawed)
	}
	fds := map[int]int{}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}()
	for _, pid := range pids { // all of them before any is waited for: an init waits for its children
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it is gone
		}
		fds[pid] = fd
		if err := os.WriteFile(filepath.Join(thawed, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return left(dir, []int{pid}, err)
		}
	}
	end := time.Now().Add(stuckPatience)
	for pid, fd := range fds {
		if err := awaitEnd(fd, end); err != nil {
			return left(dir, []int{pid}, err)
		}
	}
	return nil
}

// awaitEnd waits for the end of a pidfd's process.
func awaitEnd(fd int, end time.Time) error {
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, int(max(time.Until(end).Milliseconds(), 0)))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("wait for a process: %w", err)
		case n == 0:
			return context.DeadlineExceeded
		default:
			return nil
		}
	}
}

// freeze asks v1's or v2's freezer. Where neither is there, or a process cannot
// be frozen, the caller's loop has to do.
func freeze(dir, v1, v2 string) {
	state := filepath.Join(dir, "freezer.state")
	if os.WriteFile(state, []byte(v1), 0) != nil {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte(v2), 0)
		return
	}
	for range 20 {
		if data, err := os.ReadFile(state); err != nil || strings.TrimSpace(string(data)) == v1 {
			return
		}
		time.Sleep(250 * time.Microsecond)
	}
}

// living are the processes that are not zombies: those wait for their parent
// and run no more.
func living(dir string) ([]int, error) {
	pids, err := Processes(dir)
	if err != nil {
		return nil, err
	}
	alive := pids[:0]
	for _, pid := range pids {
		if s, err := readStat(pid); err == nil && s.state != 'Z' && s.state != 'X' {
			alive = append(alive, pid)
		}
	}
	return alive, nil
}

// RemoveCgroup removes an empty cgroup and those below it. Idempotent.
func RemoveCgroup(dir string) error {
	if err := guard(dir); err != nil {
		return err
	}
	return removeTree(dir)
}

// busyPatience is how long the dead may keep a cgroup busy. They leave it when the
// kernel runs them a last time, which takes a while where many want the CPU.
const busyPatience = 5 * time.Second

func removeTree(dir string) error {
	if err := unix.Rmdir(dir); err == nil || err == unix.ENOENT {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !gone(err) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	end := time.Now().Add(busyPatience)
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if err = unix.Rmdir(dir); err == nil || err == unix.ENOENT {
			return nil
		}
		if pids, lerr := living(dir); err != unix.EBUSY || lerr != nil || len(pids) > 0 || time.Now().After(end) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(wait)
	}
}

// DissolveCgroup removes a cgroup directory below another one, to which it
// moves the processes that are in it. What forks meanwhile is moved again, and what
// forks on and on is frozen for it: it goes on where it comes to. An error where
// something is left.
func DissolveCgroup(dir, into string) error {
	const calm = 3 // rounds, of which one does nearly always
	for round := range 20 {
		if err := unix.Rmdir(dir); err == nil || err == unix.ENOENT {
			return nil
		}
		pids, err := Processes(dir)
		if err != nil {
			return err
		}
		if round >= calm && len(pids) > 0 {
			freeze(dir, "FROZEN", "1")
		}
		for _, pid := range pids {
			_ = os.WriteFile(filepath.Join(into, "cgroup.procs"), strconv.AppendInt(nil, int64(pid), 10), 0)
		}
		if len(pids) == 0 {
			time.Sleep(time.Millisecond) // a dying process still counts
		}
	}
	freeze(dir, "THAWED", "0")
	return fmt.Errorf("dissolve cgroup %s: %w", dir, unix.EBUSY)
}

// RemoveCgroups kills what is in a cgroup path, relative to the hierarchies'
// mounts, and removes it from each. Idempotent.
func RemoveCgroups(ctx context.Context, path string) error {
	mounts, err := cgroupMounts()
	if err != nil {
		return err
	}
	for _, controller := range slices.SortedFunc(maps.Keys(mounts), freezerFirst) {
		dir := filepath.Join(mounts[controller][0], path)
		if _, err := os.Lstat(dir); err != nil {
			continue
		}
		if err := killAndRemove(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

// freezerFirst: what is in a frozen pod dies only by way of that hierarchy.
func freezerFirst(a, b string) int {
	switch {
	case a == b:
		return 0
	case a == "freezer":
		return -1
	case b == "freezer":
		return 1
	}
	return strings.Compare(a, b)
}

// killAndRemove begins again when somebody has come into the cgroup meanwhile: an
// OCI runtime that is being killed moves its init from hierarchy to hierarchy.
func killAndRemove(ctx context.Context, dir string) error {
	for try := 0; ; try++ {
		if err := KillCgroup(ctx, dir); err != nil {
			return err
		}
		err := RemoveCgroup(dir)
		if try == 5 || !errors.Is(err, unix.EBUSY) || ctx.Err() != nil {
			return err
		}
	}
}
