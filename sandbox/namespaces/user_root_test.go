package namespaces

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

func idMaps(host, size int) *IDMaps {
	one := []syscall.SysProcIDMap{{ContainerID: 0, HostID: host, Size: size}}
	return &IDMaps{UIDs: one, GIDs: one}
}

// owner is the user namespace that owns the namespace pinned at path.
func owner(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		t.Fatalf("owner of %s: %v", path, err)
	}
	defer unix.Close(fd)
	return inode(t, fd)
}

func inode(t *testing.T, fd int) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(st.Ino)
}

// insideAsRoot runs a command in all the namespaces, as the user namespace's root
// with nothing but the capabilities that gives.
func insideAsRoot(t *testing.T, dir string, command ...string) string {
	t.Helper()
	args := []string{"--user=" + Path(dir, User), "--setuid=0", "--setgid=0"}
	for _, k := range kinds[1:] {
		if Pinned(Path(dir, k.name)) {
			args = append(args, "--"+k.name+"="+Path(dir, k.name))
		}
	}
	out, err := exec.Command("nsenter", append(append(args, "--"), command...)...).CombinedOutput()
	if err != nil {
		t.Errorf("nsenter %s %q: %v: %s", args, command, err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestPinInAUserNamespace(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "ns", "4f1c")
	m := &IDMaps{
		UIDs: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 200000, Size: 65536}},
		GIDs: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 300000, Size: 1000}},
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	pin(t, Spec{Dir: dir, Net: true, IPC: true, UTS: true, User: m, Hostname: "web-0", DefaultSysctls: true, Sysctls: map[string]string{
		"kernel.shm_rmid_forced": "1", "kernel.sem": "250 32000 32 100", "fs.mqueue.msg_max": "20",
		"net.ipv4.ip_local_port_range": "1024 65000", "net/ipv4/conf/all/forwarding": "1",
	}})
	for _, kind := range []string{Net, IPC, UTS} {
		f, err := os.Open(Path(dir, User))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := owner(t, Path(dir, kind)), inode(t, int(f.Fd())); got != want {
			t.Errorf("the %s namespace belongs to user namespace %s, not to the pod's, %s", kind, got, want)
		}
		f.Close()
	}
	for file, want := range map[string]string{
		"/proc/self/uid_map":                            "0 200000 65536",
		"/proc/self/gid_map":                            "0 300000 1000",
		"/proc/self/setgroups":                          "allow",
		"/proc/sys/kernel/hostname":                     "web-0",
		"/proc/sys/kernel/shm_rmid_forced":              "1",
		"/proc/sys/kernel/sem":                          "250 32000 32 100",
		"/proc/sys/fs/mqueue/msg_max":                   "20",
		"/proc/sys/net/ipv4/ip_local_port_range":        "1024 65000",
		"/proc/sys/net/ipv4/conf/default/forwarding":    "1",
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 999",
	} {
		if got := strings.Join(strings.Fields(insideAsRoot(t, dir, "cat", file)), " "); got != want {
			t.Errorf("%s = %q inside, want %q", file, got, want)
		}
	}
	// Root of the pod has the run of its namespaces.
	insideAsRoot(t, dir, "hostname", "other")
	insideAsRoot(t, dir, "ip", "link", "add", "eth0", "type", "bridge")
	if got := insideAsRoot(t, dir, "ip", "-4", "addr", "show", "lo"); !strings.Contains(got, "127.0.0.1") {
		t.Errorf("loopback is not up: %s", got)
	}
	if now, _ := os.Hostname(); now != host {
		t.Errorf("the node's hostname became %q", now)
	}
	if err := Pin(Spec{Dir: dir, User: m}); !errors.Is(err, ErrExists) {
		t.Errorf("second Pin = %v, want ErrExists", err)
	}
}

// TestPingGroupsAreThePods: the one sysctl whose value is made of ids.
func TestPingGroupsAreThePods(t *testing.T) {
	leakcheck.Start(t)
	const name = "net.ipv4.ping_group_range"
	for value, want := range map[string]string{
		"0 2147483647": "0 65535", "5\t9": "5 9", "1 0": "65534 65534", "70000 80000": "", "0": "", "0 9 9": "", "-1 5": "", "a b": "",
	} {
		dir := filepath.Join(t.TempDir(), "x")
		err := Pin(Spec{Dir: dir, Net: true, User: idMaps(200000, 65536), Sysctls: map[string]string{name: value}})
		if want == "" {
			if !errors.Is(err, ErrBadSysctl) || !strings.Contains(err.Error(), name) {
				t.Errorf("%q: %v, want ErrBadSysctl with the name", value, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", value, err)
			continue
		}
		if got := strings.Join(strings.Fields(insideAsRoot(t, dir, "cat", "/proc/sys/net/ipv4/ping_group_range")), " "); got != want {
			t.Errorf("%q became %q, want %q", value, got, want)
		}
		if err := Release(dir); err != nil {
			t.Error(err)
		}
	}
}

// TestUserNamespaceOfAHostNetworkPod pins no network or UTS namespace.
func TestUserNamespaceOfAHostNetworkPod(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	pin(t, Spec{Dir: dir, IPC: true, User: idMaps(200000, 65536)})
	for kind, want := range map[string]bool{Net: false, IPC: true, UTS: false, User: true} {
		if got := Pinned(Path(dir, kind)); got != want {
			t.Errorf("%s pinned: %v, want %v", kind, got, want)
		}
	}
}

func TestRefusedUserNamespaces(t *testing.T) {
	leakcheck.Start(t)
	dir := filepath.Join(t.TempDir(), "x")
	for name, m := range map[string]*IDMaps{
		"none":           {},
		"no gids":        {UIDs: idMaps(1, 1).UIDs},
		"no length":      idMaps(1, 0),
		"beyond 32 bits": idMaps(1, 1<<32),
		"the last id":    idMaps(1<<32-2, 2),
		"negative":       idMaps(-1, 5),
	} {
		if err := Pin(Spec{Dir: dir, User: m}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	// What only the kernel knows to be wrong leaves nothing either.
	twice := &IDMaps{UIDs: append(idMaps(5, 10).UIDs, idMaps(100, 10).UIDs...), GIDs: idMaps(5, 10).GIDs}
	if err := Pin(Spec{Dir: dir, User: twice}); err == nil || !strings.Contains(err.Error(), "user namespace") {
		t.Errorf("id 0 mapped twice: %v", err)
	}
	if err := Pin(Spec{Dir: dir, IPC: true, User: idMaps(5, 10), Sysctls: map[string]string{"kernel.sem": "x"}}); !errors.Is(err, ErrBadSysctl) || !errors.Is(err, unix.EINVAL) {
		t.Errorf("sysctl with a bad value: %v, want ErrBadSysctl with EINVAL", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is there: %v", dir, err)
	}
}

// TestNoProgramRunsInTheNamespace: the process that makes a user namespace is this
// test's binary, and must be stopped before its first instruction.
func TestNoProgramRunsInTheNamespace(t *testing.T) {
	leakcheck.Start(t)
	err := onFreshThread(func() error {
		return withProcess(unix.CLONE_NEWUSER, *idMaps(200000, 10), func(task string) error {
			waitFor(t, "the tracing stop", func() bool { return strings.Contains(read(t, task+"/status"), "State:\tt ") })
			// utime, the 14th field: what it ran in user mode, in clock ticks.
			if f := strings.Fields(read(t, task+"/stat")); f[13] != "0" {
				return fmt.Errorf("it ran %s clock ticks", f[13])
			}
			return nil
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// TestKilledDaemonLeavesNoProcess kills a process, itself this test's binary, while
// it holds a new user namespace: the one that it had started must go with it.
func TestKilledDaemonLeavesNoProcess(t *testing.T) {
	const inside = "BERTH_TEST_HOLD_USER_NAMESPACE"
	if os.Getenv(inside) != "" {
		err := onFreshThread(func() error {
			return withProcess(unix.CLONE_NEWUSER, *idMaps(200000, 10), func(task string) error {
				fmt.Println(task)
				select {}
			})
		})
		t.Fatal(err)
	}
	leakcheck.Start(t)
	daemon := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	daemon.Env = append(os.Environ(), inside+"=1")
	out, err := daemon.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	task, err := bufio.NewReader(out).ReadString('\n')
	task = strings.TrimSpace(task)
	if _, serr := os.Stat(task); err != nil || serr != nil || !strings.HasPrefix(task, "/proc/") {
		t.Errorf("no process: %q, %v, %v", task, err, serr)
	}
	if err := daemon.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = daemon.Wait()
	waitFor(t, "the end of "+task, func() bool {
		state, err := os.ReadFile(task + "/stat")
		return err != nil || strings.Contains(string(state), ") Z ")
	})
}

func TestErrorsNameTheSetting(t *testing.T) {
	for err, word := range map[error]string{unix.ENOSPC: "user.max_user_namespaces", unix.EPERM: "ptrace_scope", unix.EINVAL: ""} {
		got := hint(fmt.Errorf("fork: %w", err))
		if !strings.Contains(got, word) || word == "" && got != "" {
			t.Errorf("%v: %q, want %q in it", err, got, word)
		}
	}
}

func TestOpenUser(t *testing.T) {
	leakcheck.Start(t)
	f, err := OpenUser(*idMaps(200000, 10))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var uid uint32
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.NS_GET_OWNER_UID, uintptr(unsafe.Pointer(&uid))); e != 0 || uid != 0 {
		t.Errorf("owner of the namespace: %d (%v), want the node's root", uid, e)
	}
	if out, err := exec.Command("nsenter", fmt.Sprintf("--user=/proc/%d/fd/%d", os.Getpid(), f.Fd()), "cat", "/proc/self/uid_map").CombinedOutput(); err != nil ||
		strings.Join(strings.Fields(string(out)), " ") != "0 200000 10" {
		t.Errorf("mapping: %s (%v)", out, err)
	}
}

func TestShmOfAUserNamespace(t *testing.T) {
	leakcheck.Start(t)
	target := filepath.Join(t.TempDir(), "shm")
	if err := MountShm(target, Shm{UID: 200000, GID: 300000}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := UnmountShm(target); err != nil {
			t.Error(err)
		}
	}()
	var st unix.Stat_t
	if err := unix.Stat(target, &st); err != nil || st.Uid != 200000 || st.Gid != 300000 {
		t.Errorf("owner %d:%d (%v), want 200000:300000", st.Uid, st.Gid, err)
	}
}

func BenchmarkPinInAUserNamespace(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root")
	}
	dir := filepath.Join(b.TempDir(), "x")
	for b.Loop() {
		if err := Pin(Spec{Dir: dir, Net: true, IPC: true, UTS: true, User: idMaps(200000, 65536), Hostname: "web-0", DefaultSysctls: true}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := Release(dir); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
