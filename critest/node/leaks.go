package node

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"berth/sandbox/leakcheck"
)

// Leaks waits a little for the kernel and returns what is there of the node
// that was not there before it, the daemon and its monitor apart. Call it when
// every pod is removed.
func (n *Node) Leaks() ([]string, error) {
	end := time.Now().Add(settle)
	for {
		leaks, err := n.LeaksNow()
		if err != nil || len(leaks) == 0 || time.Now().After(end) {
			return leaks, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// LeaksNow is Leaks without the wait.
func (n *Node) LeaksNow() ([]string, error) {
	after, err := leakcheck.Snapshot(n.scope)
	if err != nil {
		return nil, err
	}
	mine := map[string]bool{}
	for _, pid := range n.Daemons() {
		mine[fmt.Sprintf("process %d ", pid)] = true
	}
	var leaks []string
	for _, l := range leakcheck.Diff(n.before, after) {
		if first, _, _ := strings.Cut(l, "("); mine[first] || first == "mount "+n.Root()+" " || first == "mount "+n.State()+" " {
			continue // UseDisk and LoseState have mounted another
		}
		leaks = append(leaks, l)
	}
	leaks = append(leaks, n.ports()...)
	return append(leaks, n.cgroups()...), nil
}

// cgroups lists the cgroups that are left of any pod the node ever had. Without
// a process in them nothing else would tell whose they are: the daemons of a
// machine share a parent.
func (n *Node) cgroups() []string {
	for _, name := range n.readWatch() {
		n.pods[name] = true
	}
	var found []string
	for _, pattern := range []string{"/sys/fs/cgroup/berth/*", "/sys/fs/cgroup/*/berth/*"} {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			continue // the patterns are constants
		}
		for _, dir := range dirs {
			if n.pods[filepath.Base(dir)] {
				found = append(found, "cgroup "+dir)
			}
		}
	}
	return found
}

// watchPods has the kernel note every name that appears in the folder of pod
// records, from now until Close.
func (n *Node) watchPods() error {
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch the pod records: %w", err)
	}
	dir := filepath.Join(n.Root(), "sandboxes")
	err = os.MkdirAll(dir, 0o700)
	if err == nil {
		_, err = syscall.InotifyAddWatch(fd, dir, syscall.IN_CREATE|syscall.IN_MOVED_TO)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return fmt.Errorf("watch the pod records: %w", err)
	}
	n.watch = os.NewFile(uintptr(fd), "inotify")
	return nil
}

// readWatch returns the names noted since the last call.
func (n *Node) readWatch() []string {
	var names []string
	buffer := make([]byte, 64<<10)
	for n.watch != nil {
		if err := n.watch.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			return names
		}
		size, err := n.watch.Read(buffer)
		if err != nil {
			return names // nothing more
		}
		for rest := buffer[:size]; len(rest) >= syscall.SizeofInotifyEvent; {
			length := int(binary.NativeEndian.Uint32(rest[12:16]))
			name := rest[syscall.SizeofInotifyEvent : syscall.SizeofInotifyEvent+length]
			names = append(names, string(bytes.TrimRight(name, "\x00")))
			rest = rest[syscall.SizeofInotifyEvent+length:]
		}
	}
	return names
}

// ports lists the veth ends in this network namespace, which nothing but the
// node's pods makes.
func (n *Node) ports() []string {
	links, err := net.Interfaces()
	if err != nil {
		return []string{"network links cannot be listed: " + err.Error()}
	}
	var found []string
	for _, l := range links {
		if strings.HasPrefix(l.Name, "veth") {
			found = append(found, "network link "+l.Name)
		}
	}
	return found
}
