package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// serve starts a virtiofsd for each folder; they end with qemu.
func (m *machine) serve(folders []string) error {
	program := ""
	for _, path := range []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"} {
		if _, err := os.Stat(path); err == nil {
			program = path
		}
	}
	if program == "" {
		return fmt.Errorf("%w: there is no virtiofsd to share folders with it", errGuest)
	}
	help, err := exec.Command(program, "--help").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: ask virtiofsd for its options: %w", errGuest, err)
	}
	log, err := os.OpenFile(filepath.Join(m.dir, "virtiofsd"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the log of virtiofsd: %w", err)
	}
	defer log.Close()
	for i, folder := range folders {
		// The program in C takes options in mount's manner, its successor does not.
		args := []string{"-f", "-o", "source=" + folder, "-o", "cache=always", "-o", "sandbox=chroot", "-o", "xattr"}
		if strings.Contains(string(help), "--shared-dir") {
			args = []string{"--shared-dir", folder, "--cache", "always", "--sandbox", "chroot", "--xattr"}
		}
		// Its own wish for descriptors is more than root may have everywhere: 0 leaves the limit.
		args = append(args, "--socket-path="+m.socket(i), "--rlimit-nofile=0")
		helper := exec.Command(program, args...)
		helper.Stdout, helper.Stderr = log, log
		helper.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
		if err := helper.Start(); err != nil {
			return fmt.Errorf("%w: start virtiofsd: %w", errGuest, err)
		}
		m.helpers = append(m.helpers, helper)
	}
	for i := range folders {
		if err := m.awaitSocket(i); err != nil {
			return err
		}
	}
	return nil
}

// awaitSocket waits until a helper listens.
func (m *machine) awaitSocket(i int) error {
	for range 500 {
		_, err := os.Stat(m.socket(i))
		if err == nil {
			return nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%w: wait for virtiofsd: %w", errGuest, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	said, err := os.ReadFile(filepath.Join(m.dir, "virtiofsd"))
	return errors.Join(fmt.Errorf("%w: virtiofsd does not listen: %s", errGuest, said), err)
}

// mounts is the beginning of every script: the folders at their places, read-only,
// and the time of day, which a snapshot does not have.
func mounts(folders []string, now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "date -s @%d >/dev/null\n", now.Unix())
	for i, folder := range folders {
		word := shellWord(folder)
		fmt.Fprintf(&b, "mkdir -p %s\nfor _ in {1..400}; do mount -t virtiofs -o ro folder%d %s 2>/dev/null && break; sleep 0.05; done\n", word, i, word)
		fmt.Fprintf(&b, "mountpoint -q %s || { echo cannot mount %s; exit 125; }\n", word, word)
	}
	return b.String()
}

// shellWord quotes a word for sh.
func shellWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
