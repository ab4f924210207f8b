package monitor

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Shelf is a third place, beside both processes, where descriptors stay open:
// systemd's descriptor store. Its methods do not block for long.
type Shelf interface {
	// Put keeps a duplicate of fd.
	Put(name string, fd int) error
	// Drop closes what was put under a name. Idempotent.
	Drop(name string) error
}

// Shelved is what an earlier daemon put on the shelf.
type Shelved struct {
	Name string
	FD   int // taken over by Open
}

// One thing on the shelf is one container: a socket in which a message with the
// description and all the descriptors waits, to be peeked at. So a node's
// containers need no more than one descriptor each in the store, and one short
// name in the environment of the next daemon, which has to fit in 128 KiB.
const (
	shelfPrefix = "berth-"
	shelfIDs    = 8 // letters of a container's id in a name
	shelfRetry  = time.Second
)

// shelfName is a new name: a replacement is put before its predecessor is dropped.
func shelfName(id string, serial int64) string {
	return shelfPrefix + id[:min(shelfIDs, len(id))] + "." + strconv.FormatInt(serial, 36)
}

// pack puts a container and duplicates of its descriptors into a new socket.
func pack(ct Container, fds map[string]int, serial int64) (int, error) {
	m := Message{ID: uint64(serial), Op: OpPark, Container: &ct}
	var numbers []int
	for name, fd := range fds {
		m.FDs, numbers = append(m.FDs, name), append(numbers, fd)
	}
	data, err := json.Marshal(m)
	if err != nil {
		return -1, fmt.Errorf("encode %s: %w", ct.ID, err)
	}
	// Datagrams: the socket does not hang up when its other end is closed, over
	// which systemd would drop it.
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("make socket pair: %w", err)
	}
	defer unix.Close(p[1])
	if err := unix.Sendmsg(p[1], data, unix.UnixRights(numbers...), nil, 0); err != nil {
		_ = unix.Close(p[0])
		return -1, fmt.Errorf("pack descriptors of %s: %w", ct.ID, err)
	}
	return p[0], nil
}

// unpack reads what pack made, and leaves it there for the next daemon. The
// descriptors belong to the caller.
func unpack(socket int) (ct Container, fds map[string]int, serial int64, err error) {
	data, oob := make([]byte, 64<<10), make([]byte, 512)
	n, oobn, flags, _, err := unix.Recvmsg(socket, data, oob, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return ct, nil, 0, fmt.Errorf("read shelved descriptors: %w", err)
	}
	c := Conn{}
	err = c.claim(oob[:oobn])
	m := Message{}
	if err == nil {
		err = json.Unmarshal(data[:n], &m)
	}
	if err == nil && (flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || m.Container == nil || m.Container.ID == "" || len(m.FDs) != len(c.fds)) {
		err = ErrProtocol
	}
	if err != nil {
		closeAll(c.fds)
		return ct, nil, 0, fmt.Errorf("read shelved descriptors: %w", err)
	}
	m.fds = c.fds
	return *m.Container, m.Take(), int64(m.ID), nil
}

// unshelve fills the table from the shelf, before a monitor is there: one that
// knows a container better parks it again.
func (c *Client) unshelve() {
	for _, s := range c.o.Shelved {
		ct, fds, serial, err := unpack(s.FD)
		_ = unix.Close(s.FD)
		if err == nil && c.wanted(ct, serial) {
			if old, ok := c.shelved[ct.ID]; ok {
				c.drop(old)
			}
			c.shelved[ct.ID], c.serials[ct.ID] = s.Name, serial
			c.park(ct, fds)
			continue
		}
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		if err != nil {
			c.trouble(fmt.Errorf("%s: %w", s.Name, err))
		}
		c.drop(s.Name)
	}
}

// wanted tells whether a thing from the shelf is the newest of its container, of
// whose end nothing is recorded.
func (c *Client) wanted(ct Container, serial int64) bool {
	if c.serials[ct.ID] > serial {
		return false
	}
	if _, err := os.Lstat(ct.Bundle); err != nil {
		return false
	}
	x, err := ReadExit(ct.Bundle)
	return err != nil || x.PID != ct.PID || x.StartTime != ct.StartTime
}

// touch has the shelf follow what has changed of a container. The caller holds c.mu.
func (c *Client) touch(id string) {
	if c.o.Shelf == nil {
		return
	}
	c.dirty[id] = true
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// shelve keeps the shelf as the table is, until ctx ends.
func (c *Client) shelve(ctx context.Context) {
	defer c.tasks.Done()
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-again:
		}
		again = nil
		c.mu.Lock()
		dirty := c.dirty
		c.dirty = map[string]bool{}
		c.mu.Unlock()
		for id := range dirty {
			err := c.reshelve(id)
			if err == nil {
				continue
			}
			c.trouble(fmt.Errorf("keep descriptors of %s with systemd: %w", id, err))
			c.mu.Lock()
			c.dirty[id] = true
			c.mu.Unlock()
			again = time.After(shelfRetry)
		}
	}
}

// reshelve puts a container on the shelf as it is now, or takes it off.
func (c *Client) reshelve(id string) error {
	c.mu.Lock()
	fds := map[string]int{}
	var ct Container
	if e, ok := c.table[id]; ok && e.exit == nil {
		ct = e.container
		for name, fd := range e.fds {
			if dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				fds[name] = dup
			}
		}
	}
	c.mu.Unlock()
	old, had := c.shelved[id]
	delete(c.shelved, id)
	if len(fds) > 0 {
		serial := max(time.Now().UnixNano(), c.serials[id]+1)
		name := shelfName(id, serial)
		socket, err := pack(ct, fds, serial)
		for fd := range maps.Values(fds) {
			_ = unix.Close(fd)
		}
		if err == nil {
			err = c.o.Shelf.Put(name, socket)
			_ = unix.Close(socket)
		}
		if err != nil {
			if had {
				c.shelved[id] = old
			}
			return err
		}
		c.shelved[id], c.serials[id] = name, serial
	} else {
		delete(c.serials, id)
	}
	if had {
		return c.o.Shelf.Drop(old)
	}
	return nil
}

// drop takes something off the shelf that nobody will ask for.
func (c *Client) drop(name string) {
	if c.o.Shelf == nil || !strings.HasPrefix(name, shelfPrefix) {
		return
	}
	if err := c.o.Shelf.Drop(name); err != nil {
		c.trouble(fmt.Errorf("drop %s from the shelf: %w", name, err))
	}
}
