package regular

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOnlyRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, size := range map[string]int64{"fits": 10, "empty": 0, "large": 11, "huge": 1 << 40} {
		if err := errors.Join(os.WriteFile(at(name), nil, 0o600), os.Truncate(at(name), size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(unix.Mkfifo(at("fifo"), 0o600), os.Symlink("fits", at("link")), os.Symlink("fifo", at("to-fifo")), os.Symlink("/dev/zero", at("to-zero"))); err != nil {
		t.Fatal(err)
	}
	const no = " is no regular file"
	for _, c := range []struct {
		path string
		size int
		why  string // empty: it is read
	}{
		{at("fits"), 10, ""}, {at("empty"), 0, ""}, {at("link"), 10, ""},
		{at("large"), 0, " is larger than 10 bytes"}, {at("huge"), 0, " is larger than 10 bytes"},
		{at("fifo"), 0, no}, {at("to-fifo"), 0, no}, {at("to-zero"), 0, no},
		{dir, 0, no}, {"/dev/zero", 0, no}, {"/dev/null", 0, no}, {"/proc/kmsg", 0, no}, {"/proc/self/status", 0, no},
	} {
		data, err := Read(c.path, 10)
		checked := Check(c.path, 10)
		if c.why == "" {
			if err != nil || checked != nil || len(data) != c.size {
				t.Errorf("%s: %d bytes, %v, %v", c.path, len(data), err, checked)
			}
			continue
		}
		for _, err := range []error{err, checked} {
			if !errors.Is(err, ErrNot) || !strings.Contains(err.Error(), c.path+c.why) {
				t.Errorf("%s: %v", c.path, err)
			}
		}
	}
	if _, err := Read(at("none"), 10); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestOpenTakesAnySize(t *testing.T) {
	dir := t.TempDir()
	large, fifo := filepath.Join(dir, "large"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.WriteFile(large, []byte("begin"), 0o600), os.Truncate(large, 1<<40), unix.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	f, err := Open(large)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 5)
	if _, err := f.ReadAt(b, 0); err != nil || string(b) != "begin" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := Open(fifo); !errors.Is(err, ErrNot) {
		t.Errorf("a FIFO: %v", err)
	}
}
