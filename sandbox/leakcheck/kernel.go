package leakcheck

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// mount is one line of mountinfo.
type mount struct {
	id, point, fstype, source string
}

// unescape undoes mountinfo's octal escapes for the characters that would break
// its columns.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func readMounts(file string) ([]mount, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	var mounts []mount
	for line := range bytes.Lines(data) {
		left, right, ok := strings.Cut(string(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 2 {
			continue
		}
		mounts = append(mounts, mount{id: l[0], point: unescape.Replace(l[4]), fstype: r[0], source: unescape.Replace(r[1])})
	}
	return mounts, nil
}

func (st State) addMounts(mounts []mount, dirs []string) {
	for _, m := range mounts {
		if below(m.point, dirs) {
			st["mount "+m.id+" "+m.point] = fmt.Sprintf("mount %s (%s %s)", m.point, m.fstype, m.source)
		}
	}
}

// below reports whether the path is one of the directories or inside of one.
func below(path string, dirs []string) bool {
	for _, dir := range dirs {
		if dir != "" && (path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")) {
			return true
		}
	}
	return false
}

// addCgroups records the cgroup directories whose own name, or that of a
// directory above them, begins with one of the prefixes.
func (st State) addCgroups(mounts []mount, prefixes []string) {
	if len(prefixes) == 0 {
		return
	}
	for _, m := range mounts {
		if m.fstype != "cgroup" && m.fstype != "cgroup2" {
			continue
		}
		_ = filepath.WalkDir(m.point, func(path string, e fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return nil // removed meanwhile
			case !e.IsDir():
				return nil
			case path != m.point && hasAnyPrefix(e.Name(), prefixes):
				st["cgroup "+path] = "cgroup " + path
				return fs.SkipDir
			}
			return nil
		})
	}
}

// addLinks records the links of the caller's network namespace whose name, or
// whose bridge's name, begins with one of the prefixes.
func (st State) addLinks(prefixes []string) {
	const dir = "/sys/class/net"
	entries, err := os.ReadDir(dir)
	if len(prefixes) == 0 || err != nil {
		return
	}
	for _, e := range entries {
		name, master := e.Name(), ""
		if target, err := os.Readlink(filepath.Join(dir, name, "master")); err == nil {
			master = filepath.Base(target)
		}
		if hasAnyPrefix(name, prefixes) || hasAnyPrefix(master, prefixes) {
			text := "network link " + name
			if master != "" {
				text += " (port of " + master + ")"
			}
			st["link "+name] = text
		}
	}
}

// addTables records the tables of the caller's network namespace that a berth
// daemon has made whose state directory is one of the directories or inside of
// one: such tables are named after it.
func (st State) addTables(dirs []string) error {
	out, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		return fmt.Errorf("list nftables tables: %w", err)
	}
	for line := range bytes.Lines(out) {
		name := string(bytes.TrimSpace(line))
		_, owner, ok := strings.Cut(name, " berth/")
		if ok && below("/"+owner, dirs) {
			st["nftables "+name] = "nftables " + name
		}
	}
	return nil
}

// detachBelow lazily unmounts whatever is mounted below dir, deepest first.
func detachBelow(dir string) {
	mounts, err := readMounts("/proc/self/mountinfo")
	if err != nil {
		return
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if below(mounts[i].point, []string{dir}) {
			_ = syscall.Unmount(mounts[i].point, syscall.MNT_DETACH)
		}
	}
}
