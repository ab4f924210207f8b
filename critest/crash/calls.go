package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// calls hears each system call of the daemon and of its monitor that changes
// something, before it is done.
type calls struct {
	path     string // of the socket; what listenerSocket names
	listener *net.UnixListener
	where    *steps

	mu    sync.Mutex
	trace []string       // the calls since begin, in order; guarded by mu
	count map[string]int // how often each came since begin; guarded by mu
	snare *snare         // guarded by mu
}

// snare is something to do to one call, or to all below a directory.
type snare struct {
	call   string // as in calls.trace
	below  string // a directory as in calls.trace, with its slash
	errno  syscall.Errno
	kill   bool // the process that makes it
	caught chan struct{}
}

// holds tells whether the snare is for a call.
func (s *snare) holds(call string) bool {
	if s.below == "" {
		return s.call == call
	}
	_, path, _ := strings.Cut(strings.TrimPrefix(call, "daemon "), " ")
	return strings.HasPrefix(path, s.below)
}

// superviseCalls listens for programs that become supervised (see beSupervised).
func superviseCalls(dir string, where *steps) (*calls, error) {
	c := &calls{path: filepath.Join(dir, "calls.sock"), where: where, count: map[string]int{}}
	var err error
	if c.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: c.path}); err != nil {
		return nil, fmt.Errorf("listen for filters: %w", err)
	}
	if err := os.Setenv(listenerSocket, c.path); err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := c.listener.AcceptUnix()
			if err != nil {
				return // closed
			}
			fd, err := takeOver(conn)
			_ = conn.Close()
			if err == nil {
				go c.serve(fd)
			}
		}
	}()
	return c, nil
}

// serve answers the calls of one daemon and of all that it starts, until the last
// of them has ended: the kernel fails the calls of those that nobody answers.
func (c *calls) serve(listener int) {
	defer unix.Close(listener)
	n := new(notification)
	for receive(listener, n) {
		c.one(listener, n)
	}
}

func (c *calls) one(listener int, n *notification) {
	who := programOf(int(n.PID))
	what := ""
	if who != "" {
		what = describe(n)
	}
	if what == "" {
		respond(listener, n.ID, 0)
		return
	}
	call := who + " " + what
	c.mu.Lock()
	c.count[call]++
	if times := c.count[call]; times > 1 {
		call += fmt.Sprintf(" #%d", times)
	}
	c.trace = append(c.trace, call)
	s := c.snare
	if s == nil || !s.holds(call) {
		c.mu.Unlock()
		respond(listener, n.ID, 0)
		return
	}
	if s.below != "" {
		c.mu.Unlock()
		respond(listener, n.ID, s.errno)
		return
	}
	c.snare = nil
	c.mu.Unlock()
	if s.kill {
		_ = syscall.Kill(processOf(int(n.PID)), syscall.SIGKILL)
	} else {
		respond(listener, n.ID, s.errno)
	}
	close(s.caught)
}

// set lays a snare; there is one at most. It forgets what was counted.
func (c *calls) set(s *snare) {
	s.caught = make(chan struct{})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count, c.trace, c.snare = map[string]int{}, nil, s
}

// unset takes a snare away and tells whether it has caught its call.
func (c *calls) unset(s *snare) bool {
	c.mu.Lock()
	armed := c.snare == s
	if armed {
		c.snare = nil
	}
	c.mu.Unlock()
	if !armed && s.below == "" {
		<-s.caught
	}
	return !armed
}

// begin forgets what was called.
func (c *calls) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace, c.count = nil, map[string]int{}
}

// made lists the calls since begin.
func (c *calls) made() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.trace...)
}

// programOf is daemon, monitor, or nothing for another program.
func programOf(thread int) string {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", thread))
	switch filepath.Base(strings.TrimSuffix(exe, " (deleted)")) {
	case "berth":
		return "daemon"
	case "berth-monitor":
		return "monitor"
	}
	return ""
}

// processOf is the process of a thread.
func processOf(thread int) int {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	for line := range strings.Lines(string(data)) {
		if text, ok := strings.CutPrefix(line, "Tgid:"); ok {
			if pid, err := strconv.Atoi(strings.TrimSpace(text)); err == nil {
				return pid
			}
		}
	}
	return thread
}

// describe names a call by what it does to what, the same in each life; nothing for
// a message that is not between daemon and monitor.
func describe(n *notification) string {
	name := changing[n.Data.Number]
	text := ""
	if name == message {
		op := operation.FindSubmatch(messageOf(int(n.PID), n.Data.Args[1]))
		if op == nil {
			return ""
		}
		return name + " " + string(op[1])
	}
	if at, ok := pathArgument[name]; ok {
		text = readString(int(n.PID), n.Data.Args[at])
		if !strings.HasPrefix(text, "/") && at > 0 && name != "mount" {
			text = filepath.Join(fileOf(int(n.PID), n.Data.Args[at-1]), text)
		}
	} else if at, ok := fileArgument[name]; ok {
		text = fileOf(int(n.PID), n.Data.Args[at])
	}
	return strings.TrimSpace(name + " " + plain(text))
}

// fileOf is the path of a thread's descriptor.
func fileOf(thread int, fd uint64) string {
	path, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", thread, int32(fd)))
	return path
}

// readString reads a string out of a thread's memory.
func readString(thread int, at uint64) string {
	text, _, _ := bytes.Cut(memoryOf(thread, at, 4096), []byte{0})
	return string(text)
}

// operation is what a message between daemon and monitor is about: four bytes of
// length, then JSON.
var operation = regexp.MustCompile(`(?s)^....\{(?:"id":\d+,)?"op":"(\w+)"`)

// messageOf is the beginning of what a struct msghdr of a thread has.
func messageOf(thread int, header uint64) []byte {
	const pointer, iov = 8, 16 // bytes; where the list of parts is
	list := memoryOf(thread, header+iov, pointer)
	if len(list) < pointer {
		return nil
	}
	part := memoryOf(thread, binary.NativeEndian.Uint64(list), pointer)
	if len(part) < pointer {
		return nil
	}
	return memoryOf(thread, binary.NativeEndian.Uint64(part), 64)
}

// memoryOf reads a thread's memory: at most size bytes, fewer where it ends.
func memoryOf(thread int, at uint64, size int) []byte {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", thread))
	if err != nil || at == 0 {
		return nil
	}
	defer f.Close()
	buffer := make([]byte, size)
	n, _ := f.ReadAt(buffer, int64(at))
	return buffer[:n]
}

// What differs from life to life in a path.
var (
	nodeDirectory = regexp.MustCompile(`^.*/berth-[0-9]+/`)
	longID        = regexp.MustCompile(`[0-9a-f]{32,}`)
	anyNumber     = regexp.MustCompile(`[0-9]+`)
	leash         = regexp.MustCompile(`berth-plugins-[0-9a-f]+(/([A-Za-z]+)\.[^/]+)?`)
	trash         = regexp.MustCompile(`(/trash/)[^/]+`)
	execFile      = regexp.MustCompile(`/(\.?exec-)[^/]+`)
	temporary     = regexp.MustCompile(`(-|\.)[A-Za-z0-9]*[0-9]{5,}[A-Za-z0-9]*`)
)

// plain is a path without what is random in it.
func plain(path string) string {
	path = nodeDirectory.ReplaceAllString(path, "")
	path = execFile.ReplaceAllString(path, "/${1}X")
	path = leash.ReplaceAllString(path, "berth-plugins-X/${2}")
	path = temporary.ReplaceAllString(trash.ReplaceAllString(path, "${1}X"), "${1}N")
	return anyNumber.ReplaceAllString(longID.ReplaceAllString(path, "ID"), "N")
}
