package namespaces

import (
	"fmt"
	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// Enter runs f on a thread of its own inside the network namespace that is
// pinned at path, and waits for it. Goroutines that f starts run outside.
func Enter(path string, f func() error) error {
	return onFreshThread(func() error {
		if err := enterHere(path); err != nil {
			return err
		}
		return f()
	})
}

// EnterEach runs f for each path inside the network namespace pinned there, one
// after the other on one thread of their own, which costs a third of as many
// Enters. f gets the number of the path; where its namespace cannot be entered,
// f runs elsewhere and gets the reason. It waits for them all.
func EnterEach(paths []string, f func(i int, err error)) {
	if len(paths) == 0 {
		return
	}
	_ = onFreshThread(func() error {
		for i, path := range paths {
			f(i, enterHere(path))
		}
		return nil
	})
}

// enterHere takes the calling thread into a network namespace, for good.
func enterHere(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}

// onFreshThread runs f on an operating system thread that ends with it, so that
// the namespaces f put the thread into reach no other goroutine.
//
// It never uses the process's first thread: that one cannot end, the Go runtime
// would only park it, and the last namespaces it was in would live on with it and
// show as the daemon's own in /proc/<pid>/ns.
func onFreshThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		goruntime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine holds the first thread, the next gets another.
			done <- onFreshThread(f)
			goruntime.UnlockOSThread()
			return
		}
		done <- f() // ends locked: the thread ends too
	}()
	return <-done
}

// becomeUser gives the calling thread, and no other, the effective ids of a user;
// its capabilities stay. The thread must be one that nobody uses afterwards.
func becomeUser(uid, gid uint32) error {
	const noSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP, capabilities(7)
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, noSetuidFixup, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities of a thread: %w", err)
	}
	keep := ^uintptr(0)
	// The wrappers of package unix would do this to every thread.
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(gid), keep); e != 0 {
		return fmt.Errorf("set group of a thread: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); e != 0 {
		return fmt.Errorf("set user of a thread: %w", e)
	}
	return nil
}
