package namespaces

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctl is one setting: the path below /proc/sys, by elements, and the value.
type sysctl struct {
	name, value string
	path        []string
	optional    bool   // berth's own default: skip it where the kernel has none
	written     string // in place of value, where a user namespace's ids are in it; else empty
}

// sysctlError names the setting and says why it was refused.
type sysctlError struct {
	name, value, reason string
	cause               error
}

func (e *sysctlError) Error() string {
	value := e.value
	if len(value) > 100 {
		value = value[:100] + "…"
	}
	return fmt.Sprintf("%v %q = %q: %s", ErrBadSysctl, e.name, value, e.reason)
}

func (e *sysctlError) Unwrap() []error {
	all := []error{ErrBadSysctl, ErrInvalid}
	if e.cause != nil {
		all = append(all, e.cause)
	}
	return all
}

// defaultSysctls are set where Spec.DefaultSysctls asks for them.
var defaultSysctls = map[string]string{
	"net.ipv4.ip_unprivileged_port_start": "0",
	"net.ipv4.ping_group_range":           "0 2147483647",
}

// parseSysctls checks names and values without touching the machine. The order
// is short paths first, then by name: a global switch such as ip_forward resets
// the settings of single links, so it has to come before them.
func parseSysctls(s Spec) ([]sysctl, error) {
	var settings []sysctl
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(s.Sysctls)) {
		c, err := parseSysctl(name, s.Sysctls[name])
		if err != nil {
			return nil, err
		}
		if err := c.checkNamespace(s); err != nil {
			return nil, err
		}
		file := strings.Join(c.path, "/")
		if other, ok := seen[file]; ok {
			return nil, c.refuse(fmt.Sprintf("given twice, also as %q", other), nil)
		}
		seen[file] = name
		settings = append(settings, c)
	}
	if s.Net && s.DefaultSysctls {
		for name, value := range defaultSysctls {
			if file := strings.ReplaceAll(name, ".", "/"); seen[file] == "" {
				settings = append(settings, sysctl{name: name, value: value, path: strings.Split(file, "/"), optional: true})
			}
		}
	}
	if s.User != nil {
		for i := range settings {
			if err := settings[i].translate(s.User.GIDs); err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(settings, func(a, b sysctl) int {
		return cmp.Or(cmp.Compare(len(a.path), len(b.path)), slices.Compare(a.path, b.path))
	})
	return settings, nil
}

// parseSysctl splits a name at its first kind of separator, as sysctl(8) does: in
// dot form a slash stands for a dot inside an element, in slash form a dot is
// just a dot (net.ipv4.conf.eth0/1.mtu is net/ipv4/conf/eth0.1/mtu).
func parseSysctl(name, value string) (sysctl, error) {
	c := sysctl{name: name, value: value}
	if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '/' {
		c.path = strings.Split(name, "/")
	} else {
		for _, element := range strings.Split(name, ".") {
			c.path = append(c.path, strings.ReplaceAll(element, "/", "."))
		}
	}
	for _, element := range c.path {
		if !validElement(element) {
			return c, c.refuse("not a sysctl name", nil)
		}
	}
	if value == "" {
		return c, c.refuse("the value is empty", nil)
	}
	// The kernel stops reading at such a character and would take the part
	// before it for the whole.
	if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return c, c.refuse("the value has control characters", nil)
	}
	return c, nil
}

// validElement allows what occurs in /proc/sys, with link names such as
// "eth0.1", "br-lan" and "veth0@if5"; nothing that begins or ends with a dot.
func validElement(element string) bool {
	if element == "" || element[0] == '.' || element[len(element)-1] == '.' || strings.Contains(element, "..") {
		return false
	}
	for _, r := range element {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		case strings.ContainsRune("_-.:@", r):
		default:
			return false
		}
	}
	return true
}

// checkNamespace refuses what would change the node: settings that no namespace
// isolates, and those whose namespace the pod shares with the node.
func (c sysctl) checkNamespace(s Spec) error {
	needs, own := "", false
	switch {
	case c.path[0] == "net" && len(c.path) > 1:
		needs, own = "network", s.Net
	case len(c.path) == 2 && c.path[0] == "kernel" && isIPC(c.path[1]),
		len(c.path) == 3 && c.path[0] == "fs" && c.path[1] == "mqueue":
		needs, own = "IPC", s.IPC
	case len(c.path) == 2 && c.path[0] == "kernel" && (c.path[1] == "hostname" || c.path[1] == "domainname"):
		return c.refuse("the pod's hostname field sets it", nil)
	default:
		return c.refuse("it belongs to the node, no namespace isolates it", nil)
	}
	if !own {
		return c.refuse("the pod shares the node's "+needs+" namespace", nil)
	}
	return nil
}

func isIPC(name string) bool {
	return name == "sem" || strings.HasPrefix(name, "shm") || strings.HasPrefix(name, "msg")
}

// ofLink reports whether the setting belongs to one network link that Pin cannot
// see yet: net/<family>/{conf,neigh}/<link>/<setting>.
func (c sysctl) ofLink() bool {
	if len(c.path) != 5 || c.path[0] != "net" || (c.path[2] != "conf" && c.path[2] != "neigh") {
		return false
	}
	return c.path[3] != "all" && c.path[3] != "default" && c.path[3] != "lo"
}

// apply writes the value, as one piece of data, for the namespaces of the
// calling thread.
func (c sysctl) apply() error {
	f, err := c.open(unix.O_WRONLY)
	if err != nil {
		if c.optional && errors.Is(err, unix.ENOENT) {
			return nil
		}
		return c.refuse("open: "+err.Error(), err)
	}
	_, err = f.WriteString(cmp.Or(c.written, c.value))
	f.Close()
	if err != nil {
		var path *os.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return c.refuse("the kernel says: "+err.Error(), err)
	}
	return c.checkTaken()
}

// checkTaken reads the setting back: the kernel takes the first fields of a value
// that has more than the setting does and ignores the rest without an error.
func (c sysctl) checkTaken() error {
	f, err := c.open(unix.O_RDONLY)
	if err != nil {
		return nil // a write-only setting, such as route/flush
	}
	defer f.Close()
	buf := make([]byte, 4096)
	n, err := f.Read(buf)
	if err != nil || n == len(buf) {
		return nil // cannot be compared
	}
	if taken := strings.Fields(string(buf[:n])); len(strings.Fields(c.value)) > len(taken) {
		return c.refuse(fmt.Sprintf("the kernel took only %q", strings.Join(taken, " ")), nil)
	}
	return nil
}

// open opens the file below /proc/sys without following a link out of it.
func (c sysctl) open(flags uint64) (*os.File, error) {
	root, err := unix.Open("/proc/sys", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	file := strings.Join(c.path, "/")
	fd, err := unix.Openat2(root, file, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "/proc/sys/"+file), nil
}

func (c sysctl) refuse(reason string, cause error) error {
	return &sysctlError{name: c.name, value: c.value, reason: reason, cause: cause}
}
