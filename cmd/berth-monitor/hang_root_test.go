package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

// fifreeze and fithaw are requests of ioctl(2) that x/sys does not name.
const (
	fifreeze = 0xc0045877
	fithaw   = 0xc0045878
)

// While a write to a log hangs in the kernel there is no renewal: execve would wait
// for its thread, and all others would be gone.
func TestNoRenewalWhileAThreadHangs(t *testing.T) {
	leakcheck.Start(t)
	dir := t.TempDir()
	image, mnt := filepath.Join(dir, "disk"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 16<<20); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, mnt}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", command, err, out)
		}
	}
	defer func() {
		if out, err := exec.Command("umount", mnt).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	}()
	log, err := openLog(filepath.Join(mnt, "0.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(log)
	root, err := os.Open(mnt)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := unix.IoctlSetInt(int(root.Fd()), fifreeze, 0); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := unix.Write(log, []byte("line\n"))
		wrote <- err
	}()
	said := ""
	for end := time.Now().Add(leakcheck.Patience(20 * time.Second)); said == "" && time.Now().Before(end); {
		if err := newServer("").hanging(); err != nil {
			said = err.Error()
		}
	}
	if !strings.Contains(said, "a thread hangs in the kernel") {
		t.Errorf("hanging says %q", said)
	}
	if err := unix.IoctlSetInt(int(root.Fd()), fithaw, 0); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	if err := newServer("").hanging(); err != nil {
		t.Errorf("after it: %v", err)
	}
}
