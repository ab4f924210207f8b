package stats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Processes counts what runs in a cgroup and all below it.
type Processes struct {
	Count     uint64
	OpenFiles *Limit // of the init; nil when that is not there
}

// Limit is a soft limit of a process.
type Limit struct {
	Soft     uint64
	Infinite bool
}

// Files are the descriptors that processes hold; one that two processes share
// counts twice.
type Files struct {
	At          time.Time
	Descriptors uint64
	Sockets     uint64 // those that are sockets
}

// processRoot is the hierarchy to look for processes in.
func (c *Cgroups) processRoot() (string, error) {
	for _, root := range []string{c.unified, c.pids, c.cpuacct, c.memory} {
		if root != "" {
			return root, nil
		}
	}
	return "", ErrNoCgroups
}

// eachProcess calls visit with the id of every process of a cgroup and of
// those below it. ErrGone when the cgroup is not there.
func (c *Cgroups) eachProcess(path string, visit func(pid int)) error {
	root, err := c.processRoot()
	if err == nil && path == "" {
		err = ErrGone
	}
	if err == nil {
		err = walkProcesses(filepath.Join(root, path), visit)
	}
	if err != nil {
		return fmt.Errorf("list processes of cgroup %s: %w", path, err)
	}
	return nil
}

func walkProcesses(dir string, visit func(pid int)) error {
	err := numbers(filepath.Join(dir, "cgroup.procs"), func(n uint64) { visit(int(n)) })
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // a threaded cgroup: its processes are its parent's
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Nlink == 2 {
		return nil // the usual case: no directory below
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // it has just gone, with its processes
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := walkProcesses(filepath.Join(dir, e.Name()), visit); err != nil && !errors.Is(err, ErrGone) {
			return err
		}
	}
	return nil
}

// processes counts those of a cgroup and looks at its init's limits.
func (c *Cgroups) processes(path string, init int) (*Processes, error) {
	p, found := &Processes{}, false
	err := c.eachProcess(path, func(pid int) {
		p.Count++
		found = found || pid == init
	})
	if err != nil {
		return nil, err
	}
	var limit unix.Rlimit
	if found && init > 0 && unix.Prlimit(init, unix.RLIMIT_NOFILE, nil, &limit) == nil {
		p.OpenFiles = &Limit{Soft: limit.Cur, Infinite: limit.Cur == unix.RLIM_INFINITY}
	}
	return p, nil
}

// files counts the descriptors of a cgroup's processes, one by one: the kernel
// keeps no such number. Processes that end meanwhile are left out.
func (c *Cgroups) files(path string) (Files, error) {
	f := Files{At: time.Now()}
	err := c.eachProcess(path, func(pid int) { f.count(fmt.Sprintf("/proc/%d/fd", pid)) })
	return f, err
}

// count adds what one process holds.
func (f *Files) count(dir string) {
	d, err := os.Open(dir)
	if err != nil {
		return
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(1024)
		for _, name := range names {
			var target [len("socket:")]byte
			n, err := unix.Readlinkat(int(d.Fd()), name, target[:])
			if err != nil {
				continue // closed meanwhile
			}
			f.Descriptors++
			if string(target[:n]) == "socket:" {
				f.Sockets++
			}
		}
		if err != nil {
			return
		}
	}
}
