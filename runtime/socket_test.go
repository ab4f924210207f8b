package runtime

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logged "github.com/sirupsen/logrus/hooks/test"
)

func quiet() *logrus.Entry {
	log, _ := logged.NewNullLogger()
	return logrus.NewEntry(log)
}

// An old socket is replaced; what is none, and one that is listened on, stay.
func TestListenDeletesOnlySockets(t *testing.T) {
	dir := t.TempDir()
	file, link, socket := filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "new", "socket")
	for _, err := range []error{os.WriteFile(file, []byte("precious"), 0o600), os.Symlink(file, link)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{file, link, dir} {
		if l, err := Listen(path, quiet()); !errors.Is(err, ErrNoSocket) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v; want ErrNoSocket", path, l, err)
		}
	}
	if text, err := os.ReadFile(link); err != nil || string(text) != "precious" {
		t.Errorf("the file is %q, %v", text, err)
	}
	l, err := Listen(socket, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Listen(socket, quiet()); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a socket in use: %v, %v", again, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	_ = old.Close()
	again, err := Listen(socket, quiet())
	if err != nil {
		t.Fatalf("an old socket: %v", err)
	}
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("mode %v, %v", info, err)
	}
	_ = again.Close()
}

// Whatever happens to the socket's file, clients can connect again as soon as nothing
// of others is in its place, and the log tells of it.
func TestSocketIsMadeAgain(t *testing.T) {
	before := socketEvery
	socketEvery = 10 * time.Millisecond
	defer func() { socketEvery = before }()
	log, lines := logged.NewNullLogger()
	path := filepath.Join(t.TempDir(), "run", "berth.sock")
	l, err := Listen(path, logrus.NewEntry(log))
	if err != nil {
		t.Fatal(err)
	}
	greeted := make(chan error)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				greeted <- err
				return
			}
			_, _ = c.Write([]byte("berth"))
			_ = c.Close()
		}
	}()
	greets := func() bool {
		c, err := net.Dial("unix", path)
		if err != nil {
			return false
		}
		defer c.Close()
		b := make([]byte, 5)
		n, _ := c.Read(b)
		return string(b[:n]) == "berth"
	}
	file := path + ".file"
	for _, a := range []struct {
		name          string
		happens, then func() error // then makes room
		level         logrus.Level
	}{
		{"removed", func() error { return os.Remove(path) }, nil, logrus.WarnLevel},
		{"removed with its directory", func() error { return os.RemoveAll(filepath.Dir(path)) }, nil, logrus.WarnLevel},
		{"a file instead", func() error { return errors.Join(os.WriteFile(file, nil, 0o600), os.Rename(file, path)) },
			func() error { return os.Remove(path) }, logrus.ErrorLevel},
	} {
		lines.Reset()
		if err := a.happens(); err != nil {
			t.Fatalf("%s: %v", a.name, err)
		}
		eventually(t, a.name+": a line of the log", func() bool { e := lines.LastEntry(); return e != nil && e.Level == a.level })
		if a.then != nil {
			if err := a.then(); err != nil {
				t.Fatalf("%s: %v", a.name, err)
			}
		}
		eventually(t, a.name+": a connection", greets)
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o660 {
			t.Errorf("%s: mode %v, %v", a.name, info, err)
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-greeted; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the end of a closed socket: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a closed socket is left: %v", err)
	}
}
