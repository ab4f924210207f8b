package images

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// ErrParts: a part that `make deps` installs is not there.
var ErrParts = errors.New("image parts missing (run `make deps`)")

// Debian's busybox has no pgrep and no ipcs.
const (
	pgrepScript = "#!/bin/sh\n" +
		"for d in /proc/[0-9]*; do\n" +
		"  read -r name 2>/dev/null <$d/comm || continue\n" +
		"  case $name in *\"$1\"*) echo ${d#/proc/}; found=1 ;; esac\n" +
		"done\n" +
		"[ -n \"$found\" ]\n"
	ipcsScript = "#!/bin/sh\n" +
		"printf '\\n------ Shared Memory Segments --------\\n'\n" +
		"printf 'key        shmid      owner      perms      bytes      nattch     status\\n'\n" +
		"{ read -r header; while read -r key id perms size cpid lpid nattch uid rest; do\n" +
		"  printf '0x%08x %-10s %-10s %-10s %-10s %s\\n' $((key & 0xffffffff)) $id $uid $perms $size $nattch\n" +
		"done; } </proc/sysvipc/shm\n"
	passwd = "root:x:0:0:root:/root:/bin/sh\n" +
		"daemon:x:1:1:daemon:/usr/sbin:/bin/false\n" +
		"www-data:x:33:33:www-data:/var/www:/bin/false\n" +
		"nobody:x:65534:65534:nobody:/:/bin/false\n"
	group = "root:x:0:\ndaemon:x:1:\nwww-data:x:33:\nnogroup:x:65534:\n"
)

// baseEntries is the busybox root: Debian's dynamic binary with its libraries,
// every applet a hard link. The static package is no use: its shell runs applets
// without executing a file, which hides masked paths and permissions.
func baseEntries(busybox string) ([]Entry, error) {
	binary, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrParts, err)
	}
	entries := []Entry{
		Dir("bin", 0o755), Dir("dev", 0o755), Dir("etc", 0o755), Dir("home", 0o755),
		Dir("lib", 0o755), Dir("lib64", 0o755), Dir("proc", 0o555), Dir("root", 0o700), Dir("run", 0o755),
		Dir("sbin", 0o755), Dir("sys", 0o555), Dir("tmp", 0o1777), Dir("usr", 0o755),
		Dir("usr/bin", 0o755), Dir("usr/sbin", 0o755), Dir("var", 0o755), Dir("var/run", 0o755), Dir("var/www", 0o755),
		File("etc/passwd", 0o644, passwd), File("etc/group", 0o644, group),
		File("bin/busybox", 0o755, string(binary)),
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of %s: %w", busybox, err)
	}
	for _, name := range strings.Fields(string(applets)) {
		if name != "busybox" {
			entries = append(entries, Hardlink("bin/"+name, "bin/busybox"))
		}
	}
	entries = append(entries, File("bin/pgrep", 0o755, pgrepScript), File("bin/ipcs", 0o755, ipcsScript))
	libs, err := libraries(busybox)
	if err != nil {
		return nil, err
	}
	return append(entries, libs...), nil
}

// libraries reads with ldd which files a binary loads and returns them, each
// at the path where the loader looks.
func libraries(binary string) ([]Entry, error) {
	out, err := exec.Command("ldd", binary).Output()
	if err != nil {
		return nil, fmt.Errorf("ask ldd about %s: %w", binary, err)
	}
	var entries []Entry
	made := map[string]bool{"lib": true, "lib64": true}
	for _, word := range strings.Fields(string(out)) {
		if !strings.HasPrefix(word, "/") {
			continue
		}
		data, err := os.ReadFile(word)
		if err != nil {
			return nil, fmt.Errorf("read a library of %s: %w", binary, err)
		}
		name := strings.TrimPrefix(word, "/")
		if dir := filepath.Dir(name); !made[dir] {
			made[dir] = true
			entries = append(entries, Dir(dir, 0o755))
		}
		entries = append(entries, File(name, 0o755, string(data)))
	}
	if len(entries) == 0 {
		return nil, fmt.Errorf("%w: %s is static; the dynamic busybox is needed", ErrParts, binary)
	}
	return entries, nil
}
