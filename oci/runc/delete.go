package runc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	rspec "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// cleanLimit bounds the removal of what a failed create left.
const cleanLimit = 10 * time.Second

// Update implements oci.Runtime.
func (r *Runtime) Update(ctx context.Context, id string, res *rspec.LinuxResources) error {
	data, err := json.Marshal(res)
	if err != nil {
		return fmt.Errorf("encode resources of %s: %w", id, err)
	}
	_, err = r.run(ctx, strings.NewReader(string(data)), "update", "--resources", "-", id)
	if e := (*oci.ExecError)(nil); errors.As(err, &e) && e.Err == nil && e.ExitCode > 0 {
		e.Err = oci.ErrRefused
	}
	return err
}

// Delete implements oci.Runtime.
func (r *Runtime) Delete(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return nil
	}
	if err := r.leash.Settle(ctx, id, 0); err != nil {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	ct, ok := r.monitor.Container(id)
	if !ok {
		return r.sweep(ctx, id, "")
	}
	if _, ended := r.monitor.Exit(id); !ended {
		if err := r.kill(ctx, id); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
	} else if dir := ct.Cgroups.Kill(); dir != "" {
		// Others of a shared PID namespace outlive the init.
		if err := monitor.KillCgroup(ctx, dir); err != nil {
			return fmt.Errorf("delete %s: %w", id, err)
		}
	}
	if err := r.sweep(ctx, id, ct.Bundle); err != nil {
		return err
	}
	if err := r.monitor.Forget(ctx, id); err != nil {
		return fmt.Errorf("delete %s: %w", id, asOCI(err))
	}
	return nil
}

// kill ends a living init and all of its container, and waits for its exit.
func (r *Runtime) kill(ctx context.Context, id string) error {
	if err := r.KillAll(ctx, id); err != nil {
		return err
	}
	if err := r.monitor.Signal(id, syscall.SIGKILL); err != nil && !errors.Is(err, monitor.ErrEnded) {
		return asOCI(err)
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		if _, ended := r.monitor.Exit(id); ended {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for its end: %w", ctx.Err())
		case <-time.After(wait):
		}
	}
}

// maxState bounds the binary's state.json, in bytes: it repeats the specification.
const maxState = 256 << 20

// runcState is what berth reads of the binary's state.json, only for a
// container whose create was interrupted.
type runcState struct {
	PID         int               `json:"init_process_pid"`
	StartTime   uint64            `json:"init_process_start"`
	CgroupPaths map[string]string `json:"cgroup_paths"`
}

// sweep removes the binary's state and cgroup of a container, killing what is
// in it. Idempotent. dir may be empty; with it, a cgroup that a create made
// before its state is found by the specification.
func (r *Runtime) sweep(ctx context.Context, id, dir string) error {
	state := filepath.Join(r.root, id)
	if _, err := os.Lstat(state); errors.Is(err, os.ErrNotExist) {
		return sweepCgroups(ctx, dir)
	}
	var s runcState
	data, err := regular.Read(filepath.Join(state, "state.json"), maxState)
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	readable := err == nil && s.PID > 0 || errors.Is(err, os.ErrNotExist)
	if err := killState(ctx, s); err != nil {
		return fmt.Errorf("sweep %s: %w", id, err)
	}
	err = oci.ErrNotFound // what the binary cannot read, it cannot delete, nor might it come back
	if readable {
		_, err = r.run(ctx, nil, "delete", id)
	}
	if err != nil && !errors.Is(err, oci.ErrNotFound) {
		return fmt.Errorf("delete %s: %w", id, err)
	}
	if err := os.RemoveAll(state); err != nil {
		return fmt.Errorf("remove state of %s: %w", id, err)
	}
	if err != nil {
		return sweepCgroups(ctx, dir)
	}
	return nil
}

// awaitCreate waits until no create of a container runs any more: one whose
// monitor was killed is killed by the kernel, but not before the daemon knows.
func awaitCreate(ctx context.Context, id string) {
	for createPID(id) != 0 && ctx.Err() == nil {
		time.Sleep(2 * time.Millisecond)
	}
}

// createPID is the process that makes a container; 0 when there is none.
func createPID(id string) int {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		args := strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00")
		if args[len(args)-1] == id && slices.Contains(args, "--pid-file") && (slices.Contains(args, "create") || slices.Contains(args, "restore")) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			if err == nil {
				return pid
			}
		}
	}
	return 0
}

// killState kills the init that state.json names, when it lives, and its cgroup.
func killState(ctx context.Context, s runcState) error {
	if s.PID > 1 {
		if fd, err := monitor.OpenPidfd(s.PID, s.StartTime); err == nil {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			_, _ = unix.Poll(p, 5000)
			_ = unix.Close(fd)
		}
	}
	for _, key := range []string{"", "freezer", "pids"} {
		if dir := s.CgroupPaths[key]; dir != "" {
			return monitor.KillCgroup(ctx, dir)
		}
	}
	return nil
}

// sweepCgroups removes the cgroups of a bundle's specification.
func sweepCgroups(ctx context.Context, dir string) error {
	if dir == "" {
		return nil
	}
	data, err := oci.ReadRaw(dir)
	if err != nil {
		return nil
	}
	var s struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if json.Unmarshal(data, &s) != nil {
		return nil
	}
	path, err := oci.CgroupDir(s.Linux.CgroupsPath)
	if err != nil {
		return nil // no create got far with it
	}
	return monitor.RemoveCgroups(ctx, path) // of systemd's too: it drops a scope whose cgroup is empty or gone
}
