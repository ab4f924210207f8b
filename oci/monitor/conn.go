package monitor

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// sendLimit is how long a peer may leave its socket full.
const sendLimit = 10 * time.Second

// Conn frames messages over a unix stream socket: four bytes of length, big
// endian, then JSON; descriptors come with the first byte. Send may be called
// from many goroutines, Receive from one.
type Conn struct {
	c    *net.UnixConn
	send sync.Mutex
	fds  []int // received, not yet claimed by a message
}

// NewConn takes over c.
func NewConn(c *net.UnixConn) *Conn { return &Conn{c: c} }

// Close closes the socket and what was received and not claimed.
func (c *Conn) Close() error { return c.c.Close() }

// Peer tells the uid and the pid of the process at the other end.
func (c *Conn) Peer() (uid uint32, pid int, err error) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, 0, err
	}
	if cerr != nil {
		return 0, 0, cerr
	}
	return cred.Uid, int(cred.Pid), nil
}

// Send writes a message with duplicates of the descriptors fds, named in order
// by m.FDs. It blocks at most 10 s; after an error the connection is unusable.
func (c *Conn) Send(m *Message, fds ...int) error {
	if len(fds) != len(m.FDs) || len(fds) > maxFDs {
		return fmt.Errorf("send %s with %d descriptors for %d names: %w", m.Op, len(fds), len(m.FDs), ErrProtocol)
	}
	body, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.Op, err)
	}
	if len(body) > maxFrame {
		return fmt.Errorf("send %s of %d bytes: %w", m.Op, len(body), ErrProtocol)
	}
	frame := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	frame = append(frame, body...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	c.send.Lock()
	defer c.send.Unlock()
	_ = c.c.SetWriteDeadline(time.Now().Add(sendLimit))
	n, _, err := c.c.WriteMsgUnix(frame, oob, nil)
	if err == nil && n < len(frame) {
		_, err = c.c.Write(frame[n:])
	}
	if err != nil {
		_ = c.c.Close() // half a frame may be out
		return fmt.Errorf("send %s: %w", m.Op, err)
	}
	return nil
}

// Receive reads the next message. Its descriptors belong to the caller: Take
// or CloseFDs. io.EOF when the peer has closed between two messages.
func (c *Conn) Receive() (*Message, error) {
	m, err := c.receive()
	if err != nil {
		closeAll(c.fds)
		c.fds = nil
		return nil, err
	}
	return m, nil
}

func (c *Conn) receive() (*Message, error) {
	var head [4]byte
	if err := c.fill(head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, fmt.Errorf("receive a frame of %d bytes: %w", n, ErrProtocol)
	}
	body := make([]byte, n)
	if err := c.fill(body); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	m := &Message{}
	if err := json.Unmarshal(body, m); err != nil {
		return nil, fmt.Errorf("decode: %v: %w", err, ErrProtocol)
	}
	if len(m.FDs) > len(c.fds) {
		return nil, fmt.Errorf("receive %s: %d of %d descriptors: %w", m.Op, len(c.fds), len(m.FDs), ErrProtocol)
	}
	m.fds, c.fds = c.fds[:len(m.FDs):len(m.FDs)], c.fds[len(m.FDs):]
	return m, nil
}

// fill reads exactly len(b) bytes and keeps the descriptors on the way.
func (c *Conn) fill(b []byte) error {
	var oob [256]byte
	for got := 0; got < len(b); {
		n, oobn, _, _, err := c.c.ReadMsgUnix(b[got:], oob[:])
		if oobn > 0 {
			if err := c.claim(oob[:oobn]); err != nil {
				return err
			}
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			if got == 0 {
				return io.EOF
			}
			return io.ErrUnexpectedEOF
		}
		got += n
	}
	return nil
}

func (c *Conn) claim(oob []byte) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("parse control message: %w", err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		c.fds = append(c.fds, fds...)
	}
	if len(c.fds) > 2*maxFDs {
		return fmt.Errorf("receive %d descriptors: %w", len(c.fds), ErrProtocol)
	}
	return nil
}

// Take returns the received descriptors by name; they belong to the caller then.
func (m *Message) Take() map[string]int {
	fds := make(map[string]int, len(m.fds))
	for i, fd := range m.fds {
		if old, twice := fds[m.FDs[i]]; twice {
			_ = unix.Close(old)
		}
		fds[m.FDs[i]] = fd
	}
	m.fds = nil
	return fds
}

// CloseFDs closes the received descriptors that nobody took.
func (m *Message) CloseFDs() {
	closeAll(m.fds)
	m.fds = nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
