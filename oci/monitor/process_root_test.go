package monitor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/sandbox/leakcheck"
)

func TestCodes(t *testing.T) {
	for status, want := range map[unix.WaitStatus]int32{0: 0, 42 << 8: 42, 255 << 8: 255, 9: 137, 15: 143, 11 | 0x80: 139} {
		if got := Code(status); got != want {
			t.Errorf("code of %#x = %d, want %d", uint32(status), got, want)
		}
	}
}

func TestPidfdIsOfTheRightProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	start, err := StartTime(pid)
	if err != nil || start == 0 {
		t.Fatalf("start time = %d, %v", start, err)
	}
	if _, err := OpenPidfd(pid, start+1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("another start time: %v", err)
	}
	fd, err := OpenPidfd(pid, start)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if readable(fd) {
		t.Error("it ended before it was killed")
	}
	if _, ok := PidfdStatus(fd); ok {
		t.Error("a living process has a status")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !readable(fd) {
		t.Error("its end does not show")
	}
	if status, ok := PidfdStatus(fd); ok && Code(status) != 137 {
		t.Errorf("status = %#x", uint32(status))
	}
	if _, err := OpenPidfd(pid, start); !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pidfd of a process that is gone: %v", err)
	}
}

// The guard is what stands between a bad path and every process of the node.
func TestKillRefusesSharedCgroups(t *testing.T) {
	mounts, err := cgroupMounts()
	if err != nil {
		t.Fatal(err)
	}
	self, err := readCgroupFile("self")
	if err != nil {
		t.Fatal(err)
	}
	bad := []string{"", "/", "relative", "/sys", "/sys/fs/cgroup", "/tmp", "/sys/fs/cgroup/../cgroup/x"}
	for controller, m := range mounts {
		bad = append(bad, m[0], m[0]+"/")
		own := filepath.Join(m[0], self[controller])
		bad = append(bad, own, filepath.Dir(own))
	}
	for _, dir := range bad {
		if err := KillCgroup(context.Background(), dir); !errors.Is(err, ErrSharedCgroup) {
			t.Errorf("kill of %q: %v", dir, err)
		}
		if err := RemoveCgroup(dir); !errors.Is(err, ErrSharedCgroup) {
			t.Errorf("removal of %q: %v", dir, err)
		}
	}
	if _, err := CgroupsOf(os.Getpid()); !errors.Is(err, ErrSharedCgroup) {
		t.Errorf("cgroup of this process: %v", err)
	}
}

// testCgroup makes a cgroup where containers would be killed.
func testCgroup(t *testing.T) string {
	t.Helper()
	mounts, err := cgroupMounts()
	if err != nil {
		t.Fatal(err)
	}
	m, ok := mounts["freezer"]
	if !ok {
		m = mounts[""]
	}
	dir := filepath.Join(m[0], leakcheck.Name(t))
	if err := os.MkdirAll(filepath.Join(dir, "below"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := RemoveCgroup(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func join(t *testing.T, dir string, pid int) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, pid), 0); err != nil {
		t.Fatal(err)
	}
}

func TestKillCgroupKillsBelowAndForks(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	var cmds []*exec.Cmd
	for _, d := range []string{dir, filepath.Join(dir, "below")} {
		// Forks faster than a walk can follow.
		cmd := exec.Command("sh", "-c", "sleep 0.2; while :; do (sleep 0.01 &) ; done")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		join(t, d, cmd.Process.Pid)
		cmds = append(cmds, cmd)
	}
	for _, cmd := range cmds {
		go func() { _ = cmd.Wait() }()
	}
	time.Sleep(400 * time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := KillCgroup(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if pids, err := living(dir); err != nil || len(pids) > 0 {
		t.Errorf("%v live, %v", pids, err)
	}
	if err := KillCgroup(ctx, dir); err != nil {
		t.Errorf("again: %v", err)
	}
	if err := KillCgroup(ctx, dir+"/never-made"); err != nil {
		t.Errorf("of none: %v", err)
	}
	// The forks were reparented; they are zombies until their reaper has come.
	time.Sleep(100 * time.Millisecond)
}

// What somebody froze is killed all the same, and nothing beside it is thawed.
func TestKillCgroupOfTheFrozen(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	var kids []*exec.Cmd
	for _, d := range []string{filepath.Join(dir, "below"), dir} {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		join(t, d, cmd.Process.Pid)
		kids = append(kids, cmd)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := FreezeCgroup(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if err := FreezeCgroup(ctx, filepath.Join(dir, "below")); err != nil { // by itself, too
		t.Fatal(err)
	}
	if err := KillCgroup(ctx, filepath.Join(dir, "below")); err != nil {
		t.Error(err)
	}
	if err := kids[0].Wait(); err == nil {
		t.Error("the process was not killed")
	}
	if pids, err := living(dir); err != nil || len(pids) != 1 || !frozen(dir) {
		t.Errorf("beside it: processes %v, %v, frozen: %v; want one that is frozen", pids, err, frozen(dir))
	}
	if err := KillCgroup(ctx, dir); err != nil {
		t.Error(err)
	}
	if err := kids[1].Wait(); err == nil {
		t.Error("the other process was not killed")
	}
}

// Whoever was killed while it killed may have left a frozen cgroup without processes.
func TestKillCgroupThawsWhatIsEmpty(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := FreezeCgroup(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if err := KillCgroup(ctx, dir); err != nil {
		t.Error(err)
	}
	if frozen(dir) {
		t.Error("it is still frozen")
	}
}

// A container has frozen a part of itself, such as a container of its own, and
// nobody is left who would let it go.
func TestKillCgroupWithAFrozenPart(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	part := filepath.Join(dir, "below", "part")
	if err := os.Mkdir(part, 0o755); err != nil {
		t.Fatal(err)
	}
	join(t, part, cmd.Process.Pid)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := FreezeCgroup(ctx, part); err != nil {
		t.Fatal(err)
	}
	if err := KillCgroup(ctx, dir); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
}

// What is in a pod that is frozen as a whole dies by way of the freezer, whatever
// other hierarchies it is in.
func TestRemoveCgroupsInAFrozenPod(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	path := filepath.Join("/", filepath.Base(dir), "below")
	mounts, err := cgroupMounts()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	join(t, filepath.Join(dir, "below"), cmd.Process.Pid)
	for _, controller := range []string{"memory", "pids", "devices"} {
		m, v1 := mounts[controller]
		if !v1 {
			continue // version 2 alone: one hierarchy is all
		}
		pod := filepath.Join(m[0], filepath.Base(dir))
		if err := os.MkdirAll(m[0]+path, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(pod) })
		join(t, m[0]+path, cmd.Process.Pid)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := FreezeCgroup(ctx, dir); err != nil {
		t.Fatal(err)
	}
	if err := RemoveCgroups(ctx, path); err != nil {
		t.Error(err)
		freeze(dir, "THAWED", "0")
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
}

// A cgroup goes although processes come into it while it is being removed.
func TestRemoveCgroupsWhileProcessesCome(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var cmds []*exec.Cmd
	for range 8 {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	var all sync.WaitGroup
	for i, cmd := range cmds {
		all.Go(func() {
			time.Sleep(time.Duration(i) * 150 * time.Microsecond)
			_ = os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, cmd.Process.Pid), 0) // it may be too late
		})
	}
	if err := RemoveCgroups(ctx, "/"+filepath.Base(dir)); err != nil {
		t.Error(err)
	}
	all.Wait()
	for _, cmd := range cmds {
		_ = cmd.Process.Kill() // who came too late
		_ = cmd.Wait()
	}
	if err := RemoveCgroups(ctx, "/"+filepath.Base(dir)); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); err == nil {
		t.Error("the cgroup is left")
	}
}

func TestDissolveMovesWhatIsLeft(t *testing.T) {
	leakcheck.Start(t)
	dir := testCgroup(t)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	below := filepath.Join(dir, "below")
	join(t, below, cmd.Process.Pid)
	if err := DissolveCgroup(below, dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(below); err == nil {
		t.Error("the cgroup is left")
	}
	pids, err := Processes(dir)
	if err != nil || len(pids) != 1 || pids[0] != cmd.Process.Pid {
		t.Errorf("processes = %v, %v", pids, err)
	}
}
