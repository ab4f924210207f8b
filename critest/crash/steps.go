package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// steps hears each step that a daemon reaches, before the daemon takes it.
type steps struct {
	path     string // of the socket; what BERTH_FAULTS is in the daemon
	listener net.Listener

	mu    sync.Mutex
	trace []string         // what was reached since the last call of begin; guarded by mu
	traps map[string]*trap // by step; guarded by mu
}

// trap is something to do when a step is reached. It does it once, while the
// daemon stands before the step.
type trap struct {
	step   string
	spring func(pid int) // of the daemon
	sprung chan struct{} // closed behind spring
}

// hear listens for daemons that are started with BERTH_FAULTS as the socket's path.
func hear(dir string) (*steps, error) {
	s := &steps{path: filepath.Join(dir, "steps.sock"), traps: map[string]*trap{}}
	var err error
	if s.listener, err = net.Listen("unix", s.path); err != nil {
		return nil, fmt.Errorf("listen for steps: %w", err)
	}
	if err := os.Setenv("BERTH_FAULTS", s.path); err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := s.listener.Accept()
			if err != nil {
				return // closed
			}
			go s.told(c)
		}
	}()
	return s, nil
}

// told takes one step and lets the daemon go on.
func (s *steps) told(c net.Conn) {
	defer c.Close()
	lines := bufio.NewScanner(c)
	if !lines.Scan() {
		return
	}
	step := strings.TrimPrefix(lines.Text(), "/")
	s.mu.Lock()
	s.trace = append(s.trace, step)
	t := s.traps[step]
	delete(s.traps, step)
	s.mu.Unlock()
	if t != nil {
		t.spring(peer(c))
		close(t.sprung)
	}
}

// peer is the process at the other end.
func peer(c net.Conn) int {
	pid := 0
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				pid = int(cred.Pid)
			}
		})
	}
	if err != nil || pid == 0 {
		panic("a daemon's socket does not tell whose it is")
	}
	return pid
}

// set arms a trap; there is one at most at a step.
func (s *steps) set(step string, spring func(pid int)) *trap {
	t := &trap{step: step, spring: spring, sprung: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.traps[step] = t
	return t
}

// unset disarms a trap and tells whether it was sprung, after that is over.
func (s *steps) unset(t *trap) bool {
	s.mu.Lock()
	armed := s.traps[t.step] == t
	if armed {
		delete(s.traps, t.step)
	}
	s.mu.Unlock()
	if !armed {
		<-t.sprung
	}
	return !armed
}

// begin forgets what was reached.
func (s *steps) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trace = nil
}

// reached lists the steps since begin that belong to requests which change
// something, each once, in order.
func (s *steps) reached() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []string
	for _, step := range s.trace {
		rpc := step[:strings.LastIndex(step, "/")]
		if !reads(rpc) && !slices.Contains(list, step) {
			list = append(list, step)
		}
	}
	return list
}

func (s *steps) close() error { return s.listener.Close() }
