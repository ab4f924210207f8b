package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/leakcheck"
)

// settle is how long the kernel may take to drop what was removed.
const settle = 10 * time.Second

// Crictl runs the real crictl against the node and returns its standard output.
// The error holds what it said on standard error.
func (n *Node) Crictl(ctx context.Context, args ...string) (string, error) {
	endpoint := "unix://" + n.Socket
	all := append([]string{"--runtime-endpoint", endpoint, "--image-endpoint", endpoint, "--timeout", "60s",
		"--config", filepath.Join(n.Dir, "crictl.yaml")}, args...)
	cmd := exec.CommandContext(ctx, filepath.Join(n.Deps, "bin", "crictl"), all...)
	// Away from the terminal's signals, like the daemon.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("crictl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Tidied waits until the daemon has undone what the one before it left: no list
// shows that.
func (n *Node) Tidied(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leakcheck.Patience(time.Minute))
	defer cancel()
	for {
		res, err := n.Runtime().Status(ctx, &cri.StatusRequest{Verbose: true})
		if err != nil {
			return fmt.Errorf("wait for the daemon's tidying: %w", err)
		}
		var begin struct {
			Tidied bool
		}
		if err := json.Unmarshal([]byte(res.GetInfo()["restore"]), &begin); err != nil {
			return fmt.Errorf("read what status tells of the daemon's start: %w", err)
		}
		if begin.Tidied {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// RemoveAll stops and removes every pod. It goes on after errors.
func (n *Node) RemoveAll(ctx context.Context) error {
	if err := n.Tidied(ctx); err != nil {
		return err
	}
	pods, err := n.listPods(ctx)
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	var all error
	for _, p := range pods {
		_, err := n.Runtime().StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.GetId()})
		all = errors.Join(all, err)
		_, err = n.Runtime().RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.GetId()})
		all = errors.Join(all, err)
	}
	return all
}

// listPods lists in parts: a test may have made more pods than one message holds.
func (n *Node) listPods(ctx context.Context) ([]*cri.PodSandbox, error) {
	stream, err := n.Runtime().StreamPodSandboxes(ctx, &cri.StreamPodSandboxesRequest{})
	if err != nil {
		return nil, err
	}
	var all []*cri.PodSandbox
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, part.GetPodSandboxes()...)
	}
}

// Daemons are the processes of the daemon and its monitors: what was started
// from the node's binaries and names the node's directory.
func (n *Node) Daemons() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err != nil || filepath.Dir(strings.TrimSuffix(exe, " (deleted)")) != n.Bin {
			continue
		}
		if args, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && strings.Contains(string(args), n.Dir) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Monitors are the pids of the node's monitors, of which there should be one. What
// they and the daemon are just about to execute looks like them, but is never the
// leader of a session.
func (n *Node) Monitors() []int {
	var pids []int
	for _, pid := range n.Daemons() {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil || !strings.HasPrefix(filepath.Base(exe), "berth-monitor") {
			continue
		}
		if session, err := unix.Getsid(pid); err == nil && session == pid {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Close removes every pod, ends the daemon and its monitor, checks that nothing
// else is left (ErrLeak) and removes the directories. The error is everything
// that went wrong on the way. Calling it again does no harm.
func (n *Node) Close(ctx context.Context) error {
	var all error
	switch {
	case n.ready && n.running():
		answers := func(*cri.RuntimeStatus) error { return nil }
		all = errors.Join(all, n.wait(ctx, answers)) // it may have been started a moment ago
	case n.ready:
		all = errors.Join(all, n.Launch(ctx)) // a test killed it; its pods are to be removed
	}
	n.ready = false
	if n.running() {
		remove, cancel := context.WithTimeout(ctx, 2*time.Minute)
		all = errors.Join(all, n.RemoveAll(remove))
		cancel()
		all = errors.Join(all, n.Terminate())
	}
	leaks, err := n.Leaks()
	all = errors.Join(all, err)
	for _, l := range leaks {
		all = errors.Join(all, fmt.Errorf("%w: %s", ErrLeak, l))
	}
	n.sweep(n.Dir)
	_ = exec.Command("ip", "link", "del", n.Bridge).Run() // absent when no pod had a network
	if n.watch != nil {
		all = errors.Join(all, n.watch.Close())
		n.watch = nil
	}
	if n.conn != nil {
		all = errors.Join(all, n.conn.Close())
		n.conn = nil
	}
	if err := os.RemoveAll(n.Dir); err != nil {
		all = errors.Join(all, fmt.Errorf("remove the node's directory: %w", err))
	}
	return all
}

// LoseState does to the node what a reboot does: every process of daemon, monitor
// and pods ends without warning, and what was below State is gone.
func (n *Node) LoseState() error {
	err := n.Kill()
	n.sweep(n.State(), filepath.Join(n.Root(), "containers"))
	if n.options.StateSize == "" {
		return errors.Join(err, os.RemoveAll(n.State()))
	}
	err = errors.Join(err, syscall.Unmount(n.State(), syscall.MNT_DETACH), os.RemoveAll(n.State()))
	return errors.Join(err, mountMemory(n.State(), n.options.StateSize))
}

// sweep ends the daemon, its monitors and the pods' processes, and detaches the
// mounts below dirs.
func (n *Node) sweep(dirs ...string) {
	for range 100 {
		left := n.Daemons()
		for _, text := range n.Processes() {
			var pid int
			if _, err := fmt.Sscanf(text, "process %d", &pid); err == nil {
				left = append(left, pid)
			}
		}
		if len(left) == 0 {
			break
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended meanwhile
		}
		time.Sleep(20 * time.Millisecond)
	}
	for _, dir := range dirs {
		n.detach(dir)
	}
}

// detach takes off every mount below dir, the newest first.
func (n *Node) detach(dir string) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return
	}
	lines := strings.Split(string(mounts), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			_ = syscall.Unmount(f[4], syscall.MNT_DETACH) // it may have gone with another
		}
	}
}

// Processes are the living processes of the node's pods, by command line: what
// has the node's directory as its root filesystem's source.
func (n *Node) Processes() []string {
	state, err := leakcheck.Snapshot(leakcheck.Scope{Paths: []string{n.Dir}})
	if err != nil {
		return []string{err.Error()}
	}
	own := map[string]bool{}
	for _, pid := range n.Daemons() {
		own[fmt.Sprintf("process %d", pid)] = true
	}
	var found []string
	for _, text := range state {
		name, _, _ := strings.Cut(text, " (")
		if strings.HasPrefix(text, "process ") && !own[name] {
			found = append(found, text)
		}
	}
	return found
}
