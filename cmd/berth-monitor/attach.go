package main

import (
	"errors"
	"fmt"
	"log"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// viewers are the attachments to one container. Without any it is one nil map:
// an idle container pays nothing.
type viewers struct {
	mu       sync.Mutex
	sessions map[call]*viewer // guarded by mu
	ended    bool             // guarded by mu; none can come any more
}

// viewer is one attachment: sockets that never block, of which the daemon reads
// the other ends.
type viewer struct {
	out     [2]int   // -1: not wanted
	skipped [2]int64 // bytes that did not fit since the last that did
	input   bool     // its client writes to stdin
}

func (v *viewer) close() {
	for i, fd := range v.out {
		if fd >= 0 {
			_ = unix.Close(fd)
			v.out[i] = -1
		}
	}
}

// attach begins a copy of what the container writes from now on.
func (s *server) attach(conn *monitor.Conn, m *monitor.Message) error {
	c, err := s.find(m.Target)
	if err != nil {
		return err
	}
	fds := m.Take()
	v := &viewer{out: [2]int{take(fds, monitor.FDStdout), take(fds, monitor.FDStderr)}, input: m.Input}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	for _, fd := range v.out {
		if fd >= 0 {
			_ = unix.SetNonblock(fd, true)
		}
	}
	c.viewers.mu.Lock()
	defer c.viewers.mu.Unlock()
	if c.viewers.ended {
		v.close()
		return fmt.Errorf("attach to %s: %w", m.Target, monitor.ErrEnded)
	}
	if c.viewers.sessions == nil {
		c.viewers.sessions = map[call]*viewer{}
	}
	c.viewers.sessions[call{conn, m.ID}] = v
	return nil
}

// detach ends an attachment. One that is over already is no error.
func (s *server) detach(conn *monitor.Conn, m *monitor.Message) error {
	c, err := s.find(m.Target)
	if errors.Is(err, monitor.ErrNotFound) {
		return nil
	}
	if err == nil {
		c.drop(call{conn, m.Session})
	}
	return err
}

// hangUp ends the attachments of a connection that is over.
func (s *server) hangUp(conn *monitor.Conn) {
	for _, c := range s.all() {
		for _, k := range c.viewers.of(conn) {
			c.drop(k)
		}
	}
}

// of are the sessions of a connection.
func (vs *viewers) of(conn *monitor.Conn) (keys []call) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for k := range vs.sessions {
		if k.conn == conn {
			keys = append(keys, k)
		}
	}
	return keys
}

// reclaim gives a connection the sessions that are nobody's since this process
// was renewed, and ends those that it does not want.
func (c *container) reclaim(conn *monitor.Conn, wanted []uint64) (kept []uint64) {
	for _, k := range c.viewers.of(nil) {
		if !slices.Contains(wanted, k.id) {
			c.drop(k)
			continue
		}
		c.viewers.mu.Lock()
		if v, ok := c.viewers.sessions[k]; ok {
			delete(c.viewers.sessions, k)
			c.viewers.sessions[call{conn, k.id}] = v
			kept = append(kept, k.id)
		}
		c.viewers.mu.Unlock()
	}
	return kept
}

// drop forgets a viewer. A stdin that was for one client ends with it.
func (c *container) drop(k call) {
	c.viewers.mu.Lock()
	v, ok := c.viewers.sessions[k]
	c.viewers.remove(k)
	c.viewers.mu.Unlock()
	if ok && v.input {
		c.closeStdin()
	}
}

// remove takes a viewer out. The caller holds mu.
func (vs *viewers) remove(k call) {
	if v, ok := vs.sessions[k]; ok {
		v.close()
		delete(vs.sessions, k)
	}
	if len(vs.sessions) == 0 {
		vs.sessions = nil
	}
}

// closeStdin closes the stdin of a container where it is for one client only
// and no pty, as CRI's stdin_once says.
func (c *container) closeStdin() {
	if !c.info.IO.StdinOnce || c.info.IO.Terminal {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stdin >= 0 && !c.gone {
		_ = unix.Close(c.stdin)
		c.stdin = -1
	}
}

// show copies bytes that were just read to every viewer of the stream. It never
// waits: what does not fit is skipped, and a viewer whose daemon has gone is
// dropped.
func (c *container) show(stream int, b []byte) {
	c.viewers.mu.Lock()
	defer c.viewers.mu.Unlock()
	for k, v := range c.viewers.sessions {
		if v.out[stream] < 0 {
			continue
		}
		if err := v.write(stream, b, c.info.IO.Terminal); err != nil {
			c.viewers.remove(k)
			if v.input {
				go guard("attachment of "+c.info.ID, c.closeStdin)
			}
		}
	}
}

// write gives bytes to a viewer. One that has missed some gets more when half of
// what it can be behind is read, and first a line that says what is missing. The
// error is that of a viewer that is gone.
func (v *viewer) write(stream int, b []byte, terminal bool) error {
	fd := v.out[stream]
	if n := v.skipped[stream]; n > 0 {
		if !halfFree(fd) {
			v.skipped[stream] += int64(len(b))
			return nil
		}
		end := "\n"
		if terminal {
			end = "\r\n"
		}
		v.skipped[stream] = 0
		if _, err := writeSome(fd, fmt.Appendf(nil, "%s[berth: %d bytes of output skipped, this client reads too slowly]%s", end, n, end)); err != nil {
			return err
		}
	}
	n, err := writeSome(fd, b)
	v.skipped[stream] = int64(len(b) - n)
	return err
}

// halfFree tells whether at most half of what a socket takes waits in it.
func halfFree(fd int) bool {
	limit, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return false
	}
	waiting, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	return err == nil && waiting <= limit/2
}

// writeSome writes what fits.
func writeSome(fd int, b []byte) (done int, err error) {
	for done < len(b) {
		n, err := unix.Write(fd, b[done:])
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return done, nil
		case err != nil:
			return done, err
		default:
			done += n
		}
	}
	return done, nil
}

// endViewers ends every attachment: all output has been shown.
func (c *container) endViewers() {
	c.viewers.mu.Lock()
	ends := map[call]error{}
	for k, v := range c.viewers.sessions {
		ends[k] = nil
		if v.skipped != [2]int64{} {
			ends[k] = fmt.Errorf("attachment to %s: %w", c.info.ID, monitor.ErrSlow)
		}
		c.viewers.remove(k)
	}
	c.viewers.ended = true
	c.viewers.mu.Unlock()
	for k, err := range ends {
		go guard("attachment of "+c.info.ID, func() { c.tellDetached(k, err) })
	}
}

func (c *container) tellDetached(k call, cause error) {
	if k.conn == nil {
		return // the daemon comes back for what is left of its sessions
	}
	m := &monitor.Message{Op: monitor.OpDetached, Target: c.info.ID, Session: k.id}
	if cause != nil {
		m.Error = refusal(cause)
	}
	if err := k.conn.Send(m); err != nil && !errors.Is(err, net.ErrClosed) {
		log.Print(err)
	}
}
