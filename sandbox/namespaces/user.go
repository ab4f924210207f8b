package namespaces

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// IDMaps say which ids of the node stand behind those of a user namespace. Each
// list has at least one range; the ids of a range's ends are inclusive.
type IDMaps struct{ UIDs, GIDs []syscall.SysProcIDMap }

// Root is the node's user and group behind 0 in the namespace; false when either
// is not mapped.
func (m IDMaps) Root() (uid, gid uint32, ok bool) {
	u, mapped := hostID(m.UIDs, 0)
	g, ok := hostID(m.GIDs, 0)
	return uint32(u), uint32(g), ok && mapped
}

func hostID(ranges []syscall.SysProcIDMap, id int) (int, bool) {
	for _, r := range ranges {
		if id >= r.ContainerID && id-r.ContainerID < r.Size {
			return r.HostID + id - r.ContainerID, true
		}
	}
	return 0, false
}

// check refuses what the kernel would refuse with a bare EINVAL.
func (m IDMaps) check() error {
	for _, list := range []struct {
		name   string
		ranges []syscall.SysProcIDMap
	}{{"uid", m.UIDs}, {"gid", m.GIDs}} {
		if len(list.ranges) == 0 {
			return fmt.Errorf("%w: a user namespace without %s mappings", ErrInvalid, list.name)
		}
		for _, r := range list.ranges {
			if r.Size <= 0 || r.ContainerID < 0 || r.HostID < 0 ||
				r.ContainerID+r.Size > math.MaxUint32 || r.HostID+r.Size > math.MaxUint32 {
				return fmt.Errorf("%w: %s mapping %d:%d of %d ids", ErrInvalid, list.name, r.ContainerID, r.HostID, r.Size)
			}
		}
	}
	return nil
}

// OpenUser makes a user namespace that lives as long as the returned file, or a
// mount that uses it. It makes one process and ends it. Errors: ErrInvalid.
func OpenUser(m IDMaps) (*os.File, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	var file *os.File
	err := onFreshThread(func() error {
		return withProcess(unix.CLONE_NEWUSER, m, func(task string) (err error) {
			file, err = os.Open(task + "/ns/user")
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("make user namespace: %w", err)
	}
	return file, nil
}

// pinInUserNamespace binds new namespaces that belong to a new user namespace, and
// moves the calling thread, which nobody uses afterwards, into all of them but the
// user namespace: a process of several threads cannot enter one. The thread has
// every capability inside nevertheless, as the node's root.
func pinInUserNamespace(s Spec) error {
	if err := withProcess(uintptr(s.flags()), *s.User, s.bind); err != nil {
		return err
	}
	for _, k := range kinds {
		if k.name == User || !s.own(k.name) {
			continue
		}
		fd, err := unix.Open(Path(s.Dir, k.name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("enter %s namespace: %w", k.name, err)
		}
		err = unix.Setns(fd, k.flag)
		unix.Close(fd)
		if err != nil {
			return fmt.Errorf("enter %s namespace: %w", k.name, err)
		}
	}
	return nil
}

// withProcess runs use with the directory in /proc of a process in new namespaces,
// and ends that process. It is traced by the calling thread and thereby stopped at
// its exec, so that not one instruction of a program runs in it; should the
// calling thread end first (the daemon is killed), it is killed too.
func withProcess(flags uintptr, m IDMaps, use func(task string) error) error {
	p, err := os.StartProcess("/proc/self/exe", []string{"berth-user-namespace", "--version"}, &os.ProcAttr{
		Dir: "/", Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags: flags, UidMappings: m.UIDs, GidMappings: m.GIDs, GidMappingsEnableSetgroups: true,
			Ptrace: true, Pdeathsig: syscall.SIGKILL,
		},
	})
	if err != nil {
		return fmt.Errorf("start a process in a new user namespace: %w%s", err, hint(err))
	}
	err = use("/proc/" + strconv.Itoa(p.Pid))
	if kerr := p.Kill(); kerr != nil && !errors.Is(kerr, os.ErrProcessDone) {
		return errors.Join(err, kerr)
	}
	_, werr := p.Wait()
	return errors.Join(err, werr)
}

// hint names the setting that is the usual cause of an error.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return " (the limit user.max_user_namespaces)"
	case errors.Is(err, unix.EPERM):
		return " (forbidden by kernel.yama.ptrace_scope 3, or by who started berth)"
	}
	return ""
}

// applyAsOwner sets a sysctl. The kernel lets the node's root, not root of the
// owning user namespace, write some, and only the latter others (System V IPC and
// message queues since Linux 6.9); the thread becomes him when the node's root is
// refused. It keeps its capabilities.
func applyAsOwner(c sysctl, m *IDMaps) error {
	err := c.apply()
	if m == nil || !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
		return err
	}
	uid, gid, ok := m.Root()
	if !ok {
		return err
	}
	if err := becomeUser(uid, gid); err != nil {
		return fmt.Errorf("set sysctl %q: %w", c.name, err)
	}
	return c.apply()
}

// translate turns the groups in net.ipv4.ping_group_range, the one sysctl made of
// ids, into the node's: the kernel reads them with the eyes of whoever writes, and
// that is the node's root. An upper end beyond the mapping is cut: no group of the
// pod is there.
func (c *sysctl) translate(groups []syscall.SysProcIDMap) error {
	if strings.Join(c.path, "/") != "net/ipv4/ping_group_range" {
		return nil
	}
	f := strings.Fields(c.value)
	if len(f) != 2 {
		return c.refuse("it takes two groups", nil)
	}
	var ends [2]int
	for i := range ends {
		id, err := strconv.ParseUint(f[i], 10, 31)
		if err != nil {
			return c.refuse("it takes two groups, each a number from 0 to 2147483647", nil)
		}
		ends[i] = int(id)
	}
	low, mapped := hostID(groups, ends[0])
	if !mapped {
		return c.refuse(fmt.Sprintf("group %d is not mapped in the pod's user namespace", ends[0]), nil)
	}
	high, mapped := hostID(groups, ends[1])
	for _, g := range groups {
		if last := g.ContainerID + g.Size - 1; !mapped && last < ends[1] {
			high = max(high, g.HostID+g.Size-1)
		}
	}
	c.written = fmt.Sprintf("%d %d", low, high)
	return nil
}
