package monitor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Options of a Client.
type Options struct {
	Binary string // berth-monitor, absolute
	Socket string // the monitor's socket, below 100 bytes; its directory must exist
	// OnExit hears of each exit once, from a goroutine of the client, when
	// exit.json is written; of those before Open returned, Restore tells. It
	// must not block for long. May be nil.
	OnExit func(Exit)
	// Shelf is a third place for descriptors, nil: there is none. Shelved is what an
	// earlier daemon put there.
	Shelf   Shelf
	Shelved []Shelved
	// Await hears that a request waits for the monitor: what for, and the monitor's
	// pid, 0 while there is none; it is called back when that is over. May be nil.
	Await func(ctx context.Context, what string, pid int) (done func())
	// OnTrouble hears, in plain words, of a monitor that was lost, of what
	// replacing it could not keep, and of output that logs cannot take. May be nil.
	OnTrouble func(error)
}

// Client is the daemon's end: one connection, renewed when the monitor is
// replaced, and the table of all containers with their parked descriptors.
// There must be one Client per socket. Its methods may be called from many
// goroutines.
type Client struct {
	o     Options
	reap  *reaper
	tasks sync.WaitGroup
	ctx   context.Context // of the client's life
	end   context.CancelFunc

	mu       sync.Mutex
	table    map[string]*entry // guarded by mu
	conn     *Conn             // guarded by mu; nil while there is none
	changed  chan struct{}     // guarded by mu; closed when conn changes
	waiting  map[uint64]chan *Message
	lastID   uint64
	pid      int                    // of the monitor, guarded by mu
	can      map[string]bool        // the monitor's extensions, guarded by mu
	attached map[uint64]*Attachment // by session; guarded by mu
	opened   bool                   // guarded by mu; until then exits are kept for Restore, not told
	paused   bool                   // guarded by mu; the monitor is being renewed, requests wait
	missing  missing                // guarded by mu; of use while conn is nil

	renewal    sync.Mutex // held by Renew
	connecting sync.Mutex // held from the loss of a connection until the next one is the present one

	dirty   map[string]bool   // ids of containers that the shelf does not have as they are; guarded by mu
	wake    chan struct{}     // dirty has something
	shelved map[string]string // name on the shelf by id, of shelve's goroutine
	serials map[string]int64  // of what is on the shelf, likewise
}

// Open connects to the node's monitor, starting it when there is none, and
// takes over the list of its containers. It also makes this process the
// subreaper of what a dead monitor leaves. Close the client to release it; the
// monitor goes on. ErrUnavailable, ErrVersion.
func Open(ctx context.Context, o Options) (*Client, error) {
	c := newClient(o)
	r, err := startReaper(c.ctx)
	if err != nil {
		c.end()
		return nil, err
	}
	c.reap = r
	c.unshelve()
	c.tasks.Add(1)
	go c.shelve(c.ctx)
	c.connecting.Lock()
	err = c.connect(ctx)
	c.connecting.Unlock()
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	c.mu.Lock()
	c.opened = true
	c.mu.Unlock()
	return c, nil
}

// newClient has no monitor yet.
func newClient(o Options) *Client {
	c := &Client{o: o, table: map[string]*entry{}, waiting: map[uint64]chan *Message{}, attached: map[uint64]*Attachment{}, changed: make(chan struct{}),
		dirty: map[string]bool{}, wake: make(chan struct{}, 1), shelved: map[string]string{}, serials: map[string]int64{}}
	c.ctx, c.end = context.WithCancel(context.Background())
	c.missing = missing{since: time.Now(), what: "a berth-monitor that takes requests"}
	return c
}

// Close drops the connection and the parked descriptors and waits for the
// client's goroutines. The monitor and the containers go on.
func (c *Client) Close() error {
	c.end()
	c.mu.Lock()
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.mu.Unlock()
	c.tasks.Wait()
	c.reap.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.table {
		e.release()
	}
	c.table = map[string]*entry{}
	return nil
}

// MonitorPID is the pid of the monitor that is connected, 0 while there is none.
func (c *Client) MonitorPID() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return 0
	}
	return c.pid
}

// Create lets the monitor spawn the OCI runtime's create. It blocks until the
// init waits for start. When ctx ends the create is killed; what it made until
// then is left to the caller, as after any error. A monitor that dies when it has
// told of the container, and before it has answered, has made it: the next one gets
// it as it gets all others. *Error, ErrExists, ErrUnavailable.
func (c *Client) Create(ctx context.Context, r Create) (Container, error) {
	if _, known := c.Container(r.ID); known {
		return Container{}, fmt.Errorf("create %s: %w", r.ID, ErrExists)
	}
	m, err := c.call(ctx, &Message{Op: OpCreate, Create: &r})
	if err != nil {
		if ct, made := c.Container(r.ID); made {
			return ct, nil
		}
		return Container{}, err
	}
	if m.Container == nil {
		return Container{}, fmt.Errorf("create %s: answer without a container: %w", r.ID, ErrProtocol)
	}
	return *m.Container, nil
}

// Reopen closes and opens a container's log by its path. When the monitor dies over
// it, the next one is asked: of a failure the kubelet believes that output goes to
// the old file still. ErrNotFound, ErrEnded.
func (c *Client) Reopen(ctx context.Context, id string) error {
	return c.insist(ctx, OpReopen, id)
}

// Forget drops a container whose init has ended, on both sides. Idempotent.
func (c *Client) Forget(ctx context.Context, id string) error {
	err := c.insist(ctx, OpForget, id)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.table[id]; ok {
		e.release()
		delete(c.table, id)
		c.touch(id)
	}
	return nil
}

// receive serves one connection until it breaks, then brings up the next.
func (c *Client) receive(conn *Conn) {
	defer c.tasks.Done()
	for {
		m, err := conn.Receive()
		if err != nil {
			_ = conn.Close()
			c.lost(conn, err)
			return
		}
		c.handle(m)
	}
}

func (c *Client) handle(m *Message) {
	defer m.CloseFDs()
	switch m.Op {
	case OpPark:
		if m.Container != nil {
			c.park(*m.Container, m.Take())
		}
	case OpExit:
		if m.Exit != nil {
			c.exited(*m.Exit)
		}
	case OpTrouble:
		if m.Error != nil {
			c.noteLog(m.Target, m.Error)
			c.trouble(m.Error)
		}
	case OpDetached:
		c.detached(m)
	case OpAnswer:
		c.mu.Lock()
		answer := c.waiting[m.ID]
		delete(c.waiting, m.ID)
		c.mu.Unlock()
		if answer != nil {
			answer <- m
		}
	}
}

// lost fails what waits and, unless the client is closed, finds or starts the
// next monitor, for as long as that takes. The connection may be lost before it
// was the present one: connect then makes it that first.
func (c *Client) lost(conn *Conn, cause error) {
	c.mu.Lock()
	for id, answer := range c.waiting {
		answer <- nil
		delete(c.waiting, id)
	}
	if c.conn == conn {
		c.conn = nil
	}
	c.missing = missing{since: time.Now(), what: "a berth-monitor that takes requests"}
	if !c.paused { // else it may still be the same monitor, as another build
		c.bereaved()
	}
	c.mu.Unlock()
	c.connecting.Lock()
	defer c.connecting.Unlock()
	c.mu.Lock()
	if c.conn == conn {
		c.conn = nil
	}
	c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	if !errors.Is(cause, io.EOF) && !errors.Is(cause, net.ErrClosed) {
		c.trouble(fmt.Errorf("connection to the monitor: %w", cause))
	}
	for wait := 10 * time.Millisecond; c.ctx.Err() == nil; wait = min(2*wait, 5*time.Second) {
		err := c.connect(c.ctx)
		if err == nil {
			return
		}
		c.trouble(fmt.Errorf("replace the monitor: %w", err))
		select {
		case <-time.After(wait):
		case <-c.ctx.Done():
		}
	}
}

// bereaved ends what only the lost monitor could go on with. The caller holds c.mu.
func (c *Client) bereaved() {
	c.detachAll()
	c.watchOrphans()
	for _, e := range c.table {
		e.stalled = "" // the next monitor tells by itself
	}
}

func (c *Client) trouble(err error) {
	if c.o.OnTrouble != nil && c.ctx.Err() == nil {
		c.o.OnTrouble(err)
	}
}

// connect reaches a monitor, learns its containers, gives it those that it does
// not know, and makes it the present one. One of a release too far away to talk
// with is first renewed. What takes long is told. The caller holds connecting.
func (c *Client) connect(ctx context.Context) error {
	slow := time.AfterFunc(slowStart, func() {
		c.trouble(fmt.Errorf("no monitor takes requests for %s, which wait for %s", slowStart, c.Missing()))
	})
	defer slow.Stop()
	before := c.IDs()
	c.mu.Lock()
	old := c.pid
	c.mu.Unlock()
	var conn *Conn
	var known map[string]bool
	var answer *Message
	renewed := false
	for limit := time.Now().Add(startLimit); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if conn, err = c.dialOrStart(ctx); err != nil {
			return err
		}
		if _, pid, perr := conn.Peer(); perr == nil {
			c.awaits("the monitor to answer", pid)
		}
		if known, answer, err = c.hello(conn); err == nil {
			break
		}
		if errors.Is(err, ErrVersion) && !renewed {
			renewed = true
			if err = renewStranger(conn, c.o.Binary, err); err == nil {
				continue
			}
		}
		_ = conn.Close()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.trouble(err) // that may take a minute: nobody shall wonder
		}
		// A monitor that is just dying accepts and says nothing.
		if !errors.Is(err, ErrUnavailable) || ctx.Err() != nil || time.Now().After(limit) {
			return err
		}
	}
	c.tasks.Add(1)
	go c.receive(conn)
	handed := 0
	for _, id := range before {
		if !known[id] && c.handBack(ctx, conn, id) {
			handed++
		}
	}
	c.present(conn, answer)
	if old != 0 && old != answer.PID {
		c.trouble(fmt.Errorf("monitor %d has died; monitor %d has taken its place, and over %d containers", old, answer.PID, handed))
	}
	return nil
}

// present makes a monitor the one that requests go to.
func (c *Client) present(conn *Conn, answer *Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pid != 0 && c.pid != answer.PID {
		c.bereaved()
	}
	c.conn, c.pid, c.can = conn, answer.PID, map[string]bool{}
	for _, e := range answer.Extensions {
		c.can[e] = true
	}
	c.keepSessions(answer.Sessions)
	c.turn()
}

// turn lets those look again who wait for the connection. The caller holds c.mu.
func (c *Client) turn() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// hello is the first exchange. The monitor parks every container, then answers.
func (c *Client) hello(conn *Conn) (known map[string]bool, answer *Message, err error) {
	_ = conn.c.SetReadDeadline(time.Now().Add(sendLimit))
	defer conn.c.SetReadDeadline(time.Time{})
	c.mu.Lock()
	sessions := slices.Collect(maps.Keys(c.attached))
	c.mu.Unlock()
	if err := conn.Send(&Message{ID: 1, Op: OpHello, Version: Version, Oldest: Oldest, Sessions: sessions}); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	known = map[string]bool{}
	for {
		m, err := conn.Receive()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if _, pid, perr := conn.Peer(); perr == nil {
				err = fmt.Errorf("the monitor has not answered for %v, %s: %w", sendLimit, Whereabouts(pid), err)
			}
		}
		if err != nil {
			return nil, nil, fmt.Errorf("hello: %w: %w", ErrUnavailable, err)
		}
		if m.Op == OpPark && m.Container != nil {
			known[m.Container.ID] = true
		}
		if m.Op == OpAnswer {
			m.CloseFDs()
			if m.Error != nil {
				return nil, nil, fmt.Errorf("hello to monitor %d: %w", m.PID, m.Error)
			}
			if m.Version < Oldest || m.Version > Version {
				return nil, nil, fmt.Errorf("hello to monitor %d: it answers in version %d, this daemon speaks %s: %w", m.PID, m.Version, versions(Oldest, Version), ErrVersion)
			}
			return known, m, nil
		}
		c.handle(m)
	}
}

// handBack gives a container that lives to a monitor that does not know it.
func (c *Client) handBack(ctx context.Context, conn *Conn, id string) bool {
	c.mu.Lock()
	e, ok := c.table[id]
	if !ok || e.exit != nil {
		c.mu.Unlock()
		return false
	}
	ct := e.container
	m := &Message{Op: OpAdopt, Container: &ct}
	var fds []int
	for name, fd := range e.fds {
		// A duplicate, for the entry may be released meanwhile.
		if dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			m.FDs, fds = append(m.FDs, name), append(fds, dup)
		}
	}
	c.mu.Unlock()
	defer closeAll(fds)
	if _, err := c.exchange(ctx, conn, m, fds...); err != nil {
		c.trouble(fmt.Errorf("hand container %s to the new monitor: %w", id, err))
		return false
	}
	return true
}
