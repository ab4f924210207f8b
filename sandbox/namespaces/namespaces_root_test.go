package namespaces

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/sandbox/leakcheck"

	"golang.org/x/sys/unix"
)

// inside runs a command in all the namespaces pinned in dir.
func inside(t *testing.T, dir string, command ...string) string {
	t.Helper()
	var args []string
	for _, k := range kinds {
		if Pinned(Path(dir, k.name)) {
			args = append(args, "--"+k.name+"="+Path(dir, k.name))
		}
	}
	out, err := exec.Command("nsenter", append(append(args, "--"), command...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("nsenter %s %q: %v: %s", args, command, err, out)
	}
	return strings.TrimSpace(string(out))
}

func pin(t *testing.T, s Spec) {
	t.Helper()
	t.Cleanup(func() {
		if err := Release(s.Dir); err != nil {
			t.Error(err)
		}
	})
	if err := Pin(s); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

func TestPinAndRelease(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "ns", "4f1c")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	hostPorts := read(t, "/proc/sys/net/ipv4/ip_unprivileged_port_start")
	pin(t, Spec{Dir: dir, Net: true, IPC: true, UTS: true, Hostname: "web-0", DefaultSysctls: true, Sysctls: map[string]string{
		"kernel.shm_rmid_forced": "1", "kernel.sem": "250 32000 32 100", "fs.mqueue.msg_max": "20",
		"net.ipv4.ip_local_port_range": "1024 65000", "net/ipv4/conf/all/forwarding": "1",
	}})
	for name, want := range map[string]string{
		"kernel/hostname":                     "web-0",
		"kernel/shm_rmid_forced":              "1",
		"kernel/sem":                          "250\t32000\t32\t100",
		"fs/mqueue/msg_max":                   "20",
		"net/ipv4/ip_local_port_range":        "1024\t65000",
		"net/ipv4/conf/default/forwarding":    "1",
		"net/ipv4/ip_unprivileged_port_start": "0",
		"net/ipv4/ping_group_range":           "0\t2147483647",
	} {
		if got := inside(t, dir, "cat", "/proc/sys/"+name); got != want {
			t.Errorf("%s = %q inside, want %q", name, got, want)
		}
	}
	if got := inside(t, dir, "cat", "/sys/class/net/lo/operstate", "/proc/net/fib_trie"); !strings.Contains(got, "127.0.0.1") {
		t.Errorf("loopback is not up: %s", got)
	}
	if now, _ := os.Hostname(); now != host {
		t.Errorf("the node's hostname became %q", now)
	}
	if now := read(t, "/proc/sys/net/ipv4/ip_unprivileged_port_start"); now != hostPorts {
		t.Errorf("the node's ip_unprivileged_port_start became %s", now)
	}
	if err := Pin(Spec{Dir: dir, Net: true}); !errors.Is(err, ErrExists) {
		t.Errorf("second Pin = %v, want ErrExists", err)
	}
	if !Pinned(Path(dir, Net)) {
		t.Error("the refused second Pin took the first away")
	}
	for range 2 {
		if err := Release(dir); err != nil {
			t.Errorf("Release: %v", err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", dir, err)
	}
}

func TestPinOnlyWhatIsAsked(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	pin(t, Spec{Dir: dir, IPC: true})
	for kind, want := range map[string]bool{Net: false, IPC: true, UTS: false} {
		if got := Pinned(Path(dir, kind)); got != want {
			t.Errorf("%s pinned: %v, want %v", kind, got, want)
		}
	}
}

// TestB61 asks for sysctls that reach for the node: none is set, each is named.
func TestB61(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	files := []string{"/proc/sys/kernel/core_pattern", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/shm_rmid_forced", "/proc/sys/kernel/hostname"}
	var before []string
	for _, f := range files {
		before = append(before, read(t, f))
	}
	for _, c := range []struct {
		hostNet     bool
		name, value string
		errno       error
	}{
		{name: "kernel.shm_rmid_forced", value: "1+kernel.core_pattern=|/x", errno: unix.EINVAL},
		{name: "kernel.shm_rmid_forced", value: "1 kernel.core_pattern=|/x"},
		{name: "kernel.shm_rmid_forced", value: "1\nkernel.core_pattern=|/x"},
		{name: "kernel.shm_rmid_forced", value: "yes", errno: unix.EINVAL},
		{name: "kernel.shm_nonesuch", value: "1", errno: unix.ENOENT},
		{name: "net.ipv4.nonesuch", value: "1", errno: unix.ENOENT},
		{name: "net.ipv4.ip_local_port_range", value: "9 1", errno: unix.EINVAL},
		{name: "net/../kernel/core_pattern", value: "|/x"},
		{name: "kernel/../kernel/core_pattern", value: "|/x"},
		{name: "kernel.core_pattern", value: "|/x"},
		{name: "kernel.hostname", value: "x"},
		{hostNet: true, name: "net.ipv4.ip_forward", value: "1"},
	} {
		err := Pin(Spec{Dir: dir, Net: !c.hostNet, IPC: true, UTS: true, Sysctls: map[string]string{c.name: c.value}})
		if !errors.Is(err, ErrBadSysctl) || !strings.Contains(err.Error(), fmt.Sprintf("%q", c.name)) {
			t.Errorf("%q = %q: error %v, want ErrBadSysctl with the name", c.name, c.value, err)
		}
		if c.errno != nil && (!errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.errno.Error())) {
			t.Errorf("%q = %q: error %v, want the kernel's %v", c.name, c.value, err, c.errno)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("%q = %q left %s", c.name, c.value, dir)
		}
	}
	for i, f := range files {
		if now := read(t, f); now != before[i] {
			t.Errorf("%s was %q and became %q", f, before[i], now)
		}
	}
}

func TestApplyLinkSysctls(t *testing.T) {
	leakcheck.Start(t)
	s := Spec{Dir: filepath.Join(t.TempDir(), "x"), Net: true, Sysctls: map[string]string{"net.ipv4.conf.eth0.rp_filter": "2"}}
	pin(t, s)
	if err := ApplyLinkSysctls(s); !errors.Is(err, ErrBadSysctl) || !errors.Is(err, unix.ENOENT) {
		t.Errorf("without the link: %v, want ErrBadSysctl and ENOENT", err)
	}
	inside(t, s.Dir, "ip", "link", "add", "eth0", "type", "bridge")
	if err := ApplyLinkSysctls(s); err != nil {
		t.Fatal(err)
	}
	if got := inside(t, s.Dir, "cat", "/proc/sys/net/ipv4/conf/eth0/rp_filter"); got != "2" {
		t.Errorf("rp_filter of eth0 = %s", got)
	}
}

// TestReleaseWhateverIsLeft releases what a crash or a stranger left in odd states.
func TestReleaseWhateverIsLeft(t *testing.T) {
	leakcheck.Start(t)
	for name, damage := range map[string]func(dir string) error{
		"unmounted":    func(dir string) error { return unix.Unmount(Path(dir, Net), 0) },
		"file removed": func(dir string) error { unix.Unmount(Path(dir, IPC), 0); return os.Remove(Path(dir, IPC)) },
		"bound twice":  func(dir string) error { return unix.Mount(Path(dir, UTS), Path(dir, UTS), "", unix.MS_BIND, "") },
		"never made":   func(dir string) error { return Release(dir) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "x")
			pin(t, Spec{Dir: dir, Net: true, IPC: true, UTS: true})
			if err := damage(dir); err != nil {
				t.Fatal(err)
			}
			if err := Release(dir); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is still there", dir)
			}
		})
	}
}

func TestReleaseWhileBusy(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	pin(t, Spec{Dir: dir, Net: true})
	f, err := os.Open(Path(dir, Net))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Release(dir); err != nil {
		t.Errorf("Release with an open handle: %v", err)
	}
}

// TestReleaseReachesCopies releases while another mount namespace holds copies of
// the mounts: they must go as well, or the namespaces would live on in them.
func TestReleaseReachesCopies(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	pin(t, Spec{Dir: dir, Net: true, IPC: true})
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	table := fmt.Sprintf("/proc/%d/mountinfo", cmd.Process.Pid)
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the copy", func() bool {
		ns, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", cmd.Process.Pid))
		name := read(t, fmt.Sprintf("/proc/%d/comm", cmd.Process.Pid))
		return ns != own && name == "sleep"
	})
	if !strings.Contains(read(t, table), dir) {
		t.Fatal("the other mount namespace has no copies: the test shows nothing")
	}
	if err := Release(dir); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(read(t, table), dir) {
		t.Error("copies in another mount namespace outlive Release")
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(leakcheck.Patience(5 * time.Second)); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// TestNoThreadStaysInside pins many at once, from every thread of the process,
// the first one among them, and finds none in another namespace afterwards.
func TestNoThreadStaysInside(t *testing.T) {
	leakcheck.Start(t)
	top := t.TempDir()
	own := map[string]string{}
	for _, k := range kinds {
		own[k.name], _ = os.Readlink("/proc/self/ns/" + k.name)
	}
	var group sync.WaitGroup
	for i := range 40 {
		group.Go(func() {
			dir := filepath.Join(top, fmt.Sprint(i))
			if err := Pin(Spec{Dir: dir, Net: true, IPC: true, UTS: true, Hostname: fmt.Sprint("h", i)}); err != nil {
				t.Error(err)
			}
			if err := Release(dir); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	waitFor(t, "the end of the threads", func() bool {
		for kind, want := range own {
			links, _ := filepath.Glob("/proc/self/task/*/ns/" + kind)
			for _, link := range links {
				if got, err := os.Readlink(link); err == nil && got != want {
					return false
				}
			}
		}
		return true
	})
}

func TestEnter(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	pin(t, Spec{Dir: dir, Net: true})
	want := errors.New("from inside")
	var links []net.Interface
	err := Enter(Path(dir, Net), func() (err error) {
		if links, err = net.Interfaces(); err != nil {
			return err
		}
		return want
	})
	if err != want {
		t.Fatalf("Enter = %v, want the function's own error", err)
	}
	if len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp == 0 {
		t.Errorf("links inside: %+v, want lo alone, up", links)
	}
	if err := Enter(filepath.Join(dir, "nothing"), func() error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Enter on nothing = %v", err)
	}
}

func TestEnterEach(t *testing.T) {
	leakcheck.Start(t)
	top := t.TempDir()
	var paths []string
	want := map[string]bool{}
	for i := range 3 {
		dir := filepath.Join(top, fmt.Sprint(i))
		pin(t, Spec{Dir: dir, Net: true})
		paths = append(paths, Path(dir, Net))
	}
	paths = slices.Insert(paths, 1, filepath.Join(top, "nothing"))
	seen := map[string]int{}
	EnterEach(paths, func(i int, err error) {
		if i == 1 {
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("entering nothing: %v", err)
			}
			return
		}
		own, lerr := os.Readlink("/proc/thread-self/ns/net")
		if err != nil || lerr != nil {
			t.Errorf("path %d: %v, %v", i, err, lerr)
		}
		var st unix.Stat_t
		if err := unix.Stat(paths[i], &st); err != nil {
			t.Error(err)
		}
		want[fmt.Sprintf("net:[%d]", st.Ino)] = true
		seen[own]++
	})
	for link := range want {
		if seen[link] != 1 {
			t.Errorf("ran %d times inside of %s; all: %v", seen[link], link, seen)
		}
	}
	if len(want) != 3 {
		t.Errorf("entered %v", want)
	}
	EnterEach(nil, func(int, error) { t.Error("called for nothing") })
}

func TestShm(t *testing.T) {
	leakcheck.Start(t)
	target := filepath.Join(t.TempDir(), "sb", "shm")
	for range 2 {
		if err := MountShm(target, Shm{Size: 1 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		t.Fatal(err)
	}
	if int64(st.Type) != unix.TMPFS_MAGIC || int64(st.Blocks)*st.Bsize != 1<<20 {
		t.Errorf("file system type %x of %d bytes, want a tmpfs of 1 MiB", st.Type, int64(st.Blocks)*st.Bsize)
	}
	const flags = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC
	if st.Flags&flags != flags {
		t.Errorf("flags %x lack nosuid, nodev or noexec", st.Flags)
	}
	if info, err := os.Stat(target); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("mode %v, %v; want 1777", info.Mode(), err)
	}
	if mounts := strings.Count(read(t, "/proc/self/mountinfo"), target); mounts != 1 {
		t.Errorf("mounted %d times", mounts)
	}
	for range 2 {
		if err := UnmountShm(target); err != nil {
			t.Error(err)
		}
	}
	if err := MountShm(target, Shm{Size: -1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("negative size: %v", err)
	}
	// The SELinux context reaches the kernel: one without SELinux refuses it.
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err != nil {
		if err := MountShm(target, Shm{Context: "a:b:c:s0:c1,c2"}); !errors.Is(err, unix.EINVAL) {
			t.Errorf("with a context: %v", err)
		}
		if err := UnmountShm(target); err != nil {
			t.Error(err)
		}
	}
}

func TestUnmountShmKeepsForeignFiles(t *testing.T) {
	leakcheck.Start(t)
	target := t.TempDir()
	if err := os.WriteFile(target+"/f", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := UnmountShm(target); err == nil {
		t.Error("a directory with files that were never on a tmpfs was removed")
	}
}

func BenchmarkPinRelease(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	dir := filepath.Join(b.TempDir(), "x")
	for b.Loop() {
		if err := Pin(Spec{Dir: dir, Net: true, IPC: true, UTS: true, Hostname: "web-0", DefaultSysctls: true}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := Release(dir); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
