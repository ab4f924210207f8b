// Package namespaces makes the namespaces that the containers of a pod share and
// keeps them alive as files, without any process inside.
//
// It owns the network, IPC, UTS and user namespaces of a pod and what is set inside
// of them once: the hostname, sysctls, the loopback link; and the pod's /dev/shm.
// It does not own addresses and routes (network), the PID namespace (a pause
// container holds it) or mount namespaces (one per container, the OCI runtime's).
//
// To pin a namespace is to bind-mount its handle on a file: it lives as long as
// the mount, whoever enters or leaves it. To release it is to unmount and remove
// the file; the kernel takes it apart once the last process has left.
//
// Files on disk, both below the state directory, which a reboot empties:
//
//	namespaces/<sandbox id>/{user,net,ipc,uts}   empty files under nsfs mounts
//	sandboxes/<sandbox id>/shm                   a tmpfs
//
// Copies of these mounts in other mount namespaces (made by whoever unshared one
// meanwhile) do not keep a pod's namespaces alive: removing a file detaches
// everything that is mounted on it anywhere. So no propagation has to be set up.
package namespaces

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Sentinels of the package; test with errors.Is.
var (
	// ErrInvalid: a value in the Spec can never work, whatever the machine.
	ErrInvalid = errors.New("invalid namespace settings")
	// ErrBadSysctl: a sysctl was refused, by name or by the kernel. The error is
	// also an ErrInvalid and names the sysctl, its value and the reason.
	ErrBadSysctl = errors.New("refused sysctl")
	// ErrExists: the directory to pin in exists already.
	ErrExists = errors.New("namespaces are pinned already")
)

// The kinds of namespaces; also the names of the files.
const (
	Net  = "net"
	IPC  = "ipc"
	UTS  = "uts"
	User = "user"
)

// kinds in the order in which they are pinned.
var kinds = []struct {
	name string
	flag int
}{{User, unix.CLONE_NEWUSER}, {Net, unix.CLONE_NEWNET}, {IPC, unix.CLONE_NEWIPC}, {UTS, unix.CLONE_NEWUTS}}

// maxHostname is the kernel's limit (__NEW_UTS_LEN), in bytes.
const maxHostname = 64

// Spec says which namespaces a pod has of its own and what is set inside.
type Spec struct {
	Dir           string            // absolute; made by Pin, removed by Release
	Net, IPC, UTS bool              // false: the pod uses the node's
	User          *IDMaps           // nil: the pod uses the node's; else it owns the others
	Hostname      string            // only with UTS; empty keeps the node's name
	Sysctls       map[string]string // name in dot or slash form → value
	// DefaultSysctls lets every user of the pod bind any port and send pings,
	// unless Sysctls says otherwise. Only with Net.
	DefaultSysctls bool
}

// Path returns the file that pins a namespace of the kind (Net, IPC, UTS or User).
func Path(dir, kind string) string { return filepath.Join(dir, kind) }

// Pin makes the namespaces and binds them to files in s.Dir, with hostname and
// sysctls set and loopback up. It makes no process and waits for nobody, but for a
// user namespace, which only a new process can be in: that one is gone again when
// Pin returns. Sysctls of links that do not exist before the network is set up are
// left for ApplyLinkSysctls. On error nothing is left. The caller releases what
// was pinned with Release. Errors: ErrInvalid, ErrBadSysctl, ErrExists.
func Pin(s Spec) error {
	settings, err := checkSpec(s)
	if err != nil {
		return err
	}
	if s.flags() == 0 {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(s.Dir), 0o700); err != nil {
		return fmt.Errorf("pin namespaces: %w", err)
	}
	if err := os.Mkdir(s.Dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("pin namespaces in %s: %w", s.Dir, ErrExists)
		}
		return fmt.Errorf("pin namespaces: %w", err)
	}
	if err := onFreshThread(func() error { return pinFromHere(s, settings) }); err != nil {
		err = fmt.Errorf("pin namespaces in %s: %w", s.Dir, err)
		if undo := Release(s.Dir); undo != nil {
			err = errors.Join(err, undo)
		}
		return err
	}
	return nil
}

// ApplyLinkSysctls sets those of s.Sysctls that belong to one network link by
// name (net.ipv4.conf.eth0.…), which Pin has left out because the link comes
// with the network. Call it after the network was set up; without such sysctls
// it costs nothing. Errors: ErrBadSysctl.
func ApplyLinkSysctls(s Spec) error {
	settings, err := checkSpec(s)
	if err != nil {
		return err
	}
	var late []sysctl
	for _, c := range settings {
		if c.ofLink() {
			late = append(late, c)
		}
	}
	if len(late) == 0 {
		return nil
	}
	return Enter(Path(s.Dir, Net), func() error {
		for _, c := range late {
			if err := c.apply(); err != nil {
				return err
			}
		}
		return nil
	})
}

// Release unmounts and removes the files in dir and dir itself. It is
// idempotent, also on a dir that was half made, was emptied, or never existed.
// It does not wait for the kernel to take the namespaces apart. What stands in the
// place of dir and is no directory is removed itself; no link is followed.
func Release(dir string) error {
	if info, err := os.Lstat(dir); err == nil && !info.IsDir() {
		if err := os.Remove(dir); err != nil {
			return fmt.Errorf("release namespaces: %w", err)
		}
		return nil
	}
	for _, k := range kinds {
		if err := unmountAll(Path(dir, k.name)); err != nil {
			return fmt.Errorf("release namespaces: %w", err)
		}
		if err := os.Remove(Path(dir, k.name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("release namespaces: %w", err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release namespaces: %w", err)
	}
	return nil
}

// Pinned reports whether path is a pinned namespace: after a reboot, or when
// somebody has unmounted it, the file may exist without being one.
func Pinned(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && int64(st.Type) == unix.NSFS_MAGIC
}

func (s Spec) own(kind string) bool {
	return kind == Net && s.Net || kind == IPC && s.IPC || kind == UTS && s.UTS || kind == User && s.User != nil
}

func (s Spec) flags() int {
	flags := 0
	for _, k := range kinds {
		if s.own(k.name) {
			flags |= k.flag
		}
	}
	return flags
}

// checkSpec refuses what is wrong in itself and returns the sysctls to set, in
// the order in which they must be set.
func checkSpec(s Spec) ([]sysctl, error) {
	switch {
	case !filepath.IsAbs(s.Dir) && s.flags() != 0:
		return nil, fmt.Errorf("%w: directory %q is not absolute", ErrInvalid, s.Dir)
	case s.Hostname != "" && !s.UTS:
		return nil, fmt.Errorf("%w: hostname %q needs a UTS namespace of the pod's own", ErrInvalid, s.Hostname)
	case len(s.Hostname) > maxHostname:
		return nil, fmt.Errorf("%w: hostname %q is longer than %d bytes", ErrInvalid, s.Hostname, maxHostname)
	}
	if s.User != nil {
		if err := s.User.check(); err != nil {
			return nil, err
		}
	}
	return parseSysctls(s)
}

// pinFromHere runs on a thread that nobody uses afterwards: it moves the thread
// into new namespaces and binds them.
func pinFromHere(s Spec, settings []sysctl) error {
	if s.User != nil {
		if err := pinInUserNamespace(s); err != nil {
			return err
		}
		return setUp(s, settings)
	}
	if err := unix.Unshare(s.flags()); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := s.bind("/proc/thread-self"); err != nil {
		return err
	}
	return setUp(s, settings)
}

// bind pins those namespaces of the task with that directory in /proc which the
// pod has of its own.
func (s Spec) bind(task string) error {
	for _, k := range kinds {
		if !s.own(k.name) {
			continue
		}
		if err := bindHandle(task+"/ns/"+k.name, Path(s.Dir, k.name)); err != nil {
			return err
		}
	}
	return nil
}

// setUp sets what the Spec asks for in the calling thread's namespaces.
func setUp(s Spec, settings []sysctl) error {
	if s.Hostname != "" {
		if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
			return fmt.Errorf("set hostname %q: %w", s.Hostname, err)
		}
	}
	for _, c := range settings {
		if c.ofLink() {
			continue
		}
		if err := applyAsOwner(c, s.User); err != nil {
			return err
		}
	}
	if s.Net {
		return loopbackUp()
	}
	return nil
}

// bindHandle binds the namespace behind a handle in /proc to a new file.
func bindHandle(handle, target string) error {
	f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("pin namespace: %w", err)
	}
	f.Close()
	if err := unix.Mount(handle, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin namespace on %s: %w", target, err)
	}
	return nil
}

// loopbackUp sets the loopback link of the calling thread's namespace up; the
// kernel then gives it its addresses.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set loopback up: open socket: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	return nil
}
