package runtime

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

// ErrNoSocket: where a socket is to be there is something else.
var ErrNoSocket = errors.New("is no socket")

// socketEvery is how often the CRI socket is looked for at its path. Tests shorten it.
var socketEvery = 2 * time.Second

// CheckSocket tells whether a socket can be made at path: there is nothing, or an
// old socket. Else ErrNoSocket.
func CheckSocket(path string) error {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s %w; move it away", path, ErrNoSocket)
	}
	return nil
}

// socket is the CRI socket. A socket without its file is one that nobody can reach,
// while the unit looks well: so it is made again.
type socket struct {
	path   string
	log    *logrus.Entry
	closed chan struct{}

	mu       sync.Mutex
	listener *net.UnixListener // guarded by mu
	file     os.FileInfo       // guarded by mu
}

// Listen makes the CRI socket with mode 0660 in a directory that others may
// only pass through. A socket nobody listens on is replaced; what is no socket is
// left alone, ErrNoSocket. Where the socket is removed or replaced later, it is made
// again, which is logged; who is connected stays connected. The caller closes it.
func Listen(path string, log *logrus.Entry) (net.Listener, error) {
	l, file, err := listen(path)
	if err != nil {
		return nil, err
	}
	s := &socket{path: path, log: log, closed: make(chan struct{}), listener: l, file: file}
	go s.watch()
	return s, nil
}

func listen(path string) (*net.UnixListener, os.FileInfo, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, nil, fmt.Errorf("make socket directory: %w", err)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, nil, fmt.Errorf("socket %s: another process listens on it", path)
	}
	if err := CheckSocket(path); err != nil {
		return nil, nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, fmt.Errorf("remove old socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // it may be another's by then
	err = os.Chmod(path, 0o660)
	if err == nil {
		var file os.FileInfo
		if file, err = os.Lstat(path); err == nil {
			return l, file, nil
		}
	}
	_ = l.Close()
	return nil, nil, fmt.Errorf("set mode of socket: %w", err)
}

// Accept implements net.Listener.
func (s *socket) Accept() (net.Conn, error) {
	for {
		l := s.current()
		c, err := l.Accept()
		if err == nil || l == s.current() {
			return c, err
		}
	}
}

func (s *socket) current() *net.UnixListener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listener
}

// Addr implements net.Listener.
func (s *socket) Addr() net.Addr { return s.current().Addr() }

// Close removes the socket's file, unless it is another's by now.
func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return net.ErrClosed
	default:
	}
	close(s.closed)
	if s.inPlace() {
		_ = os.Remove(s.path)
	}
	return s.listener.Close()
}

// inPlace tells whether the path still leads to the socket. The caller holds mu.
func (s *socket) inPlace() bool {
	at, err := os.Lstat(s.path)
	return err == nil && os.SameFile(at, s.file)
}

// watch mends the socket until it is closed.
func (s *socket) watch() {
	look := time.NewTicker(socketEvery)
	defer look.Stop()
	said := ""
	for {
		select {
		case <-s.closed:
			return
		case <-look.C:
		}
		mended, err := s.mend()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			s.log.WithError(err).Error("the CRI socket was removed or replaced and cannot be made again: nobody can connect")
		case mended:
			said = ""
			s.log.WithField("socket", s.path).Warn("the CRI socket was removed or replaced; it is made again")
		}
	}
}

func (s *socket) mend() (mended bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return false, nil
	default:
	}
	if s.inPlace() {
		return false, nil
	}
	l, file, err := listen(s.path)
	if err != nil {
		return false, err
	}
	_ = s.listener.Close()
	s.listener, s.file = l, file
	return true, nil
}
