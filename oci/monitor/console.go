package monitor

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// ReceiveConsole accepts one connection, of an OCI runtime's --console-socket,
// and returns the pty's master that comes over it, nonblocking; -1 when none
// does. It blocks until the listener's deadline or end, a minute at most.
func ReceiveConsole(l *net.UnixListener) int {
	_ = l.SetDeadline(time.Now().Add(time.Minute))
	c, err := l.AcceptUnix()
	if err != nil {
		return -1
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 4096), oob)
	if err != nil {
		return -1
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1
	}
	_ = unix.SetNonblock(fds[0], true)
	return fds[0]
}
