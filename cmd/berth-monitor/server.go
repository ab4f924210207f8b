package main

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	goruntime "runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// lonely is how long a monitor without daemon and living containers goes on.
const lonely = 3 * time.Second

// maxRequests bounds the requests of one connection that run at a time.
const maxRequests = 64

// server is the monitor.
type server struct {
	socket string
	lock   *monitor.Locked
	door   *door
	reaper *reaper
	kills  kills

	mu         sync.Mutex
	containers map[string]*container // guarded by mu; nil while it is being made
	logs       map[*logFile]string   // guarded by mu; container ids of those whose file is open
	daemon     *monitor.Conn         // guarded by mu; the connection that said hello last
	renewing   bool                  // guarded by mu; nothing new may begin
	cancels    map[call]func()       // guarded by mu; running creates
	idle       *time.Timer           // guarded by mu; runs while the monitor is lonely
	tidy       *time.Timer           // gives memory back when requests have ceased
}

// tidyAfter is how long there is no request before memory is given back: what a
// burst has grown, stacks above all, is not needed to sleep.
const tidyAfter = 2 * time.Second

type call struct {
	conn *monitor.Conn
	id   uint64
}

// newServer has no socket yet.
func newServer(socket string) *server {
	return &server{socket: socket, reaper: newReaper(), containers: map[string]*container{}, logs: map[*logFile]string{}, cancels: map[call]func(){},
		tidy: time.AfterFunc(tidyAfter, tidyUp)}
}

// listen takes the lock and makes the socket.
func listen(socket string) (*server, error) {
	s := newServer(socket)
	var err error
	if s.lock, err = monitor.Lock(socket); err != nil {
		return nil, err
	}
	s.door, err = openDoor(socket)
	return s, err
}

// tidyUp collects twice: stacks shrink in one collection and their spans are
// free after the next.
func tidyUp() {
	goruntime.GC()
	debug.FreeOSMemory()
}

// run serves until the monitor is lonely or told to end.
func (s *server) run() {
	go s.reaper.run()
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	go func() {
		for range term {
			s.leave()
		}
	}()
	go guard("socket", func() { s.door.watch(s.complain) })
	s.checkIdle()
	for {
		c, err := s.door.accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			log.Printf("accept: %v", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		conn := monitor.NewConn(c)
		if uid, _, err := conn.Peer(); err != nil || int(uid) != os.Geteuid() {
			_ = conn.Close()
			continue
		}
		go guard("connection", func() { s.talk(conn) })
	}
}

// leave ends the monitor, unless containers need it.
func (s *server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.needed() {
		s.door.close()
	}
}

// needed says whether a container lives or is being made: exit.json has all
// there is to know of the others. The caller holds s.mu.
func (s *server) needed() bool {
	for _, c := range s.containers {
		if c == nil || !c.ended() {
			return true
		}
	}
	return false
}

// checkIdle starts or stops the countdown of a lonely monitor.
func (s *server) checkIdle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	needed := s.daemon != nil || s.needed()
	switch {
	case needed && s.idle != nil:
		s.idle.Stop()
		s.idle = nil
	case !needed && s.idle == nil:
		s.idle = time.AfterFunc(lonely, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.idle != nil && s.daemon == nil && !s.needed() {
				s.door.close()
			}
		})
	}
}

// talk serves one connection until it breaks.
func (s *server) talk(conn *monitor.Conn) {
	slots := make(chan struct{}, maxRequests)
	for {
		m, err := conn.Receive()
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.ECONNRESET) {
				log.Printf("connection: %v", err)
			}
			break
		}
		if m.Op == monitor.OpCancel {
			m.CloseFDs()
			s.cancel(call{conn, m.Cancel})
			continue
		}
		var a *monitor.Message
		if inOrder(m.Op) {
			a = s.perform(conn, m)
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			if a == nil {
				a = s.perform(conn, m)
			}
			s.answer(conn, m.Op, a)
		}()
	}
	_ = conn.Close()
	s.hangUp(conn)
	s.mu.Lock()
	if s.daemon == conn {
		s.daemon = nil
	}
	s.mu.Unlock()
	s.checkIdle()
}

// inOrder are the operations of which a later one must not overtake an earlier.
// They wait for nothing.
func inOrder(op string) bool {
	return op == monitor.OpAttach || op == monitor.OpDetach || op == monitor.OpStdin
}

// perform runs a request and returns its answer.
func (s *server) perform(conn *monitor.Conn, m *monitor.Message) *monitor.Message {
	defer m.CloseFDs()
	a := &monitor.Message{ID: m.ID, Op: monitor.OpAnswer, Version: monitor.Version, PID: os.Getpid()}
	err := errors.New("panic in the monitor; see its log")
	guard(m.Op, func() { err = s.handle(conn, m, a) })
	if err != nil {
		a.Error = refusal(err)
	}
	return a
}

func (s *server) answer(conn *monitor.Conn, op string, a *monitor.Message) {
	if err := conn.Send(a); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Printf("answer %s: %v", op, err)
	}
	s.checkIdle()
	s.tidy.Reset(tidyAfter)
}

func refusal(err error) *monitor.Error {
	var e *monitor.Error
	if errors.As(err, &e) {
		return e
	}
	e = &monitor.Error{Text: err.Error()}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		e.Errno = int(errno)
	}
	switch {
	case errors.Is(err, monitor.ErrExists):
		e.Kind = "exists"
	case errors.Is(err, monitor.ErrNotFound):
		e.Kind = "notfound"
	case errors.Is(err, monitor.ErrEnded):
		e.Kind = "ended"
	case errors.Is(err, monitor.ErrVersion):
		e.Kind = "version"
	case errors.Is(err, monitor.ErrSlow):
		e.Kind = "slow"
	}
	return e
}

func (s *server) handle(conn *monitor.Conn, m, a *monitor.Message) (err error) {
	switch m.Op {
	case monitor.OpHello:
		if a.Version, err = monitor.Agree(m.Version, m.Oldest); err != nil {
			return err
		}
		a.Extensions = []string{monitor.ExtAttach, monitor.ExtRenew}
		a.Sessions, err = s.hello(conn, m.Sessions)
	case monitor.OpCreate:
		a.Container, err = s.create(call{conn, m.ID}, m.Create)
	case monitor.OpAdopt:
		return s.adopt(conn, m.Container, m.Take())
	case monitor.OpRenew:
		return s.renew(m)
	case monitor.OpReopen:
		return s.reopen(conn, m.Target)
	case monitor.OpForget:
		return s.forget(m.Target)
	case monitor.OpAttach:
		return s.attach(conn, m)
	case monitor.OpDetach:
		return s.detach(conn, m)
	case monitor.OpStdin:
		c, err := s.find(m.Target)
		if err == nil {
			c.closeStdin()
		}
		return err
	default:
		return fmt.Errorf("unknown operation %q", m.Op)
	}
	return err
}

// hello makes conn the daemon's and parks every container with it. What the
// daemon before had attached ends first: its stdin must not be parked again. Of
// what was attached before this process was renewed the sessions go on that the
// daemon names; kept says which were still there.
func (s *server) hello(conn *monitor.Conn, sessions []uint64) (kept []uint64, err error) {
	s.mu.Lock()
	old := s.daemon
	s.mu.Unlock()
	if old != nil && old != conn {
		_ = old.Close()
		s.hangUp(old)
	}
	s.mu.Lock()
	s.daemon = conn
	s.mu.Unlock()
	for _, c := range s.all() {
		kept = append(kept, c.reclaim(conn, sessions)...)
		if err := c.park(conn); err != nil {
			return nil, err
		}
		if c.log == nil {
			continue
		}
		for _, now := range c.log.troubles() {
			if err := complain(conn, c.info.ID, now.Kind, now.Text); err != nil {
				return nil, err
			}
		}
	}
	return kept, nil
}

// all are the containers that are made.
func (s *server) all() []*container {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*container
	for _, c := range s.containers {
		if c != nil {
			all = append(all, c)
		}
	}
	return all
}

// tell sends to the daemon, if there is one. A daemon that cannot be told learns
// it when it connects again.
func (s *server) tell(send func(*monitor.Conn) error) {
	s.mu.Lock()
	conn := s.daemon
	s.mu.Unlock()
	if conn == nil {
		return
	}
	if err := send(conn); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Print(err)
	}
}

// complain writes a trouble of the monitor's own to its log and tells the daemon.
func (s *server) complain(text string) {
	log.Print(text)
	s.tell(func(conn *monitor.Conn) error {
		return conn.Send(&monitor.Message{Op: monitor.OpTrouble, Error: &monitor.Error{Text: text}})
	})
}

func (s *server) find(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, fmt.Errorf("container %s: %w", id, monitor.ErrNotFound)
	}
	return c, nil
}

// making tells whether a container is being made.
func (s *server) making(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, reserved := s.containers[id]
	return reserved && c == nil
}

func (s *server) reopen(conn *monitor.Conn, id string) error {
	c, err := s.find(id)
	if err != nil {
		return err
	}
	c.mu.Lock()
	ended := c.exit != nil || c.gone || pidfdEnded(c.pidfd)
	c.mu.Unlock()
	if ended {
		return fmt.Errorf("reopen log of %s: %w", id, monitor.ErrEnded)
	}
	if err := c.log.reopen(); err != nil {
		return err
	}
	return c.park(conn)
}

func pidfdEnded(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// recordPatience is how long the exit of an init that has ended may take to be
// recorded: its last output is drained first.
const recordPatience = 5 * time.Second

// forget drops an ended container. The daemon may know of the end, by exit.json
// or the pidfd, an instant before this process is done with it, and has killed what
// it has lost the connection over while it was being made.
func (s *server) forget(id string) error {
	for until := time.Now().Add(recordPatience); s.making(id) && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
	c, err := s.find(id)
	if err != nil {
		return err
	}
	for until := time.Now().Add(recordPatience); !c.ended(); time.Sleep(time.Millisecond) {
		c.mu.Lock()
		alive := !pidfdEnded(c.pidfd)
		c.mu.Unlock()
		if alive || time.Now().After(until) {
			return fmt.Errorf("forget %s: its init, pid %d, has not ended", id, c.info.PID)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.containers, id)
	return nil
}

// reserve takes an id for a container that is being made.
func (s *server) reserve(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.containers[id]; taken {
		return fmt.Errorf("container %s: %w", id, monitor.ErrExists)
	}
	if s.renewing {
		return fmt.Errorf("container %s: %w", id, errRenewing)
	}
	s.containers[id] = nil
	return nil
}

// settle ends reserve: with the container, whose output is not read yet, or with
// nil to give the id back.
func (s *server) settle(id string, c *container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c == nil {
		delete(s.containers, id)
		return
	}
	s.containers[id] = c
	s.kills.join(c)
	l := c.log
	s.logs[l] = id
	l.complain = func(kind, text string) {
		go s.tell(func(conn *monitor.Conn) error { return complain(conn, id, kind, text) })
	}
	l.released = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.logs, l)
	}
}

func complain(conn *monitor.Conn, id, kind, text string) error {
	return conn.Send(&monitor.Message{Op: monitor.OpTrouble, Target: id, Error: &monitor.Error{Kind: kind, Text: "container " + id + ": " + text}})
}

// ended records an end and tells the daemon.
func (s *server) ended(c *container, status unix.WaitStatus, at time.Time, unknown string) {
	guard("end of "+c.info.ID, func() {
		exit, first := c.finish(status, at, unknown, s.kills.leave)
		if !first {
			return
		}
		s.tell(func(conn *monitor.Conn) error {
			return conn.Send(&monitor.Message{Op: monitor.OpExit, Exit: &exit})
		})
		s.checkIdle()
	})
}

func (s *server) cancel(k call) {
	s.mu.Lock()
	f := s.cancels[k]
	s.mu.Unlock()
	if f != nil {
		f()
	}
}
