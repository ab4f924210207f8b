package runtime

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
		if l, err := Listen(path); !errors.Is(err, ErrNoSocket) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v; want ErrNoSocket", path, l, err)
		}
	}
	if text, err := os.ReadFile(link); err != nil || string(text) != "precious" {
		t.Errorf("the file is %q, %v", text, err)
	}
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Listen(socket); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a socket in use: %v, %v", again, err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Listen(socket)
	if err != nil {
		t.Fatalf("an old socket: %v", err)
	}
	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("mode %v, %v", info, err)
	}
	_ = again.Close()
}
