package node

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Systemd stands in for the service manager of a unit with a descriptor store:
// it keeps what the daemon sends it and passes it on to the next one. Close it
// after the node.
type Systemd struct {
	conn *net.UnixConn
	done chan struct{}

	mu    sync.Mutex
	store []kept   // guarded by mu
	said  []string // states, guarded by mu
}

type kept struct {
	name string
	file *os.File
}

// NewSystemd listens at path.
func NewSystemd(path string) (*Systemd, error) {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("listen for notifications: %w", err)
	}
	s := &Systemd{conn: conn, done: make(chan struct{})}
	go s.serve()
	return s, nil
}

// Close forgets everything.
func (s *Systemd) Close() error {
	err := s.conn.Close()
	<-s.done
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.store {
		err = errors.Join(err, k.file.Close())
	}
	s.store = nil
	return err
}

// Stored are the names in the store.
func (s *Systemd) Stored() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.store {
		names = append(names, k.name)
	}
	return names
}

// Said are the states that the daemon has told.
func (s *Systemd) Said() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.said)
}

func (s *Systemd) serve() {
	defer close(s.done)
	text, oob := make([]byte, 64<<10), make([]byte, 4<<10)
	for {
		n, oobn, _, _, err := s.conn.ReadMsgUnix(text, oob)
		if err != nil {
			return
		}
		var files []*os.File
		if messages, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
			for _, m := range messages {
				fds, _ := unix.ParseUnixRights(&m) // credentials are none
				for _, fd := range fds {
					unix.CloseOnExec(fd)
					files = append(files, os.NewFile(uintptr(fd), "stored"))
				}
			}
		}
		s.handle(strings.Split(string(text[:n]), "\n"), files)
	}
}

func (s *Systemd) handle(lines []string, files []*os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := "stored"
	for _, l := range lines {
		if value, ok := strings.CutPrefix(l, "FDNAME="); ok {
			name = value
		}
	}
	switch {
	case slices.Contains(lines, "FDSTORE=1"):
		for _, f := range files {
			if !slices.Contains(lines, "FDPOLL=0") && hungUp(f) {
				_ = f.Close() // as systemd does
				continue
			}
			s.store = append(s.store, kept{name, f})
		}
		return
	case slices.Contains(lines, "FDSTOREREMOVE=1"):
		s.store = slices.DeleteFunc(s.store, func(k kept) bool {
			if k.name == name {
				_ = k.file.Close()
			}
			return k.name == name
		})
	default:
		s.said = append(s.said, lines...)
	}
	for _, f := range files {
		_ = f.Close()
	}
}

func hungUp(f *os.File) bool {
	p := []unix.PollFd{{Fd: int32(f.Fd())}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// pass gives a daemon that is about to be started what systemd would: the
// command's process gets its own pid into LISTEN_PID.
func (s *Systemd) pass(args []string) (command []string, env []string, files []*os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, k := range s.store {
		names, files = append(names, k.name), append(files, k.file)
	}
	env = []string{"NOTIFY_SOCKET=" + s.conn.LocalAddr().String()}
	if len(files) > 0 {
		env = append(env, fmt.Sprintf("LISTEN_FDS=%d", len(files)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
		args = append([]string{"/bin/sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh"}, args...)
	}
	return args, env, files
}
