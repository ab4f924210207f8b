package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"berth/oci"
	"berth/oci/monitor"
	"berth/sandbox/regular"
)

// criuLog is the log of a dump in its work directory.
const criuLog = "dump.log"

// CanCheckpoint implements oci.Runtime.
func (r *Runtime) CanCheckpoint(ctx context.Context) error {
	if f, err := r.Features(ctx); err == nil && f.Annotations["org.opencontainers.runc.checkpoint.enabled"] == "false" {
		return fmt.Errorf("%w: %s was built without it", oci.ErrNoCheckpoint, filepath.Base(r.binary))
	}
	path, err := regular.Program("criu", func(path string) error { return r.answer(ctx, path) })
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("%w: criu is not installed", oci.ErrNoCheckpoint)
	}
	if err != nil {
		return fmt.Errorf("find criu in PATH: %w", err)
	}
	var out tail
	cmd := exec.CommandContext(ctx, path, "check")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err = cmd.Run(); err == nil {
		return nil
	}
	said := strings.Split(strings.TrimSpace(out.String()), "\n")
	return fmt.Errorf("%w: criu check: %w: %s", oci.ErrNoCheckpoint, err, bounded(said[0]))
}

// freezer is the cgroup directory by which a container is paused.
func (r *Runtime) freezer(id string) (string, error) {
	ct, ok := r.monitor.Container(id)
	if !ok {
		return "", fmt.Errorf("pause %s: %w", id, oci.ErrNotFound)
	}
	if _, ended := r.monitor.Exit(id); ended {
		return "", fmt.Errorf("pause %s: %w", id, oci.ErrNotRunning)
	}
	for _, dir := range []string{ct.Cgroups.Unified, ct.Cgroups.Freezer} {
		if dir != "" {
			return dir, nil
		}
	}
	return "", fmt.Errorf("pause %s: its cgroup has no freezer", id)
}

// Pause implements oci.Runtime.
func (r *Runtime) Pause(ctx context.Context, id string) error {
	dir, err := r.freezer(id)
	if err != nil {
		return err
	}
	return monitor.FreezeCgroup(ctx, dir)
}

// Resume implements oci.Runtime. Somebody else may have used the other freezer.
func (r *Runtime) Resume(id string) error {
	ct, ok := r.monitor.Container(id)
	if _, ended := r.monitor.Exit(id); !ok || ended {
		return nil
	}
	var errs []error
	for _, dir := range []string{ct.Cgroups.Unified, ct.Cgroups.Freezer} {
		if dir != "" {
			errs = append(errs, monitor.ThawCgroup(dir))
		}
	}
	return errors.Join(errs...)
}

// Checkpoint implements oci.Runtime.
func (r *Runtime) Checkpoint(ctx context.Context, id string, c oci.Checkpoint) error {
	if err := r.answers(ctx); err != nil {
		return fmt.Errorf("checkpoint %s: %w", id, err)
	}
	for _, dir := range []string{c.Images, c.Work} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("checkpoint %s: %w", id, err)
		}
	}
	cmd := exec.CommandContext(ctx, r.binary, "--root", r.root, "checkpoint", "--image-path", c.Images, "--work-path", c.Work,
		"--leave-running", "--tcp-established", "--file-locks", id)
	var stderr tail
	cmd.Stderr = &stderr
	// criu must not outlive its deadline: it holds the processes by ptrace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	end, err := r.hold(ctx, cmd, "checkpoint", id)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", id, err)
	}
	err = cmd.Run()
	end(err != nil)
	if err != nil {
		e := &oci.ExecError{Args: cmd.Args, ExitCode: cmd.ProcessState.ExitCode(), Stderr: bounded(plainLog(stderr.String()))}
		e.Err = sentinelOf(e.Stderr)
		if ctx.Err() != nil {
			e.Err = ctx.Err()
		}
		return fmt.Errorf("checkpoint %s: %w%s", id, e, criuErrors(filepath.Join(c.Work, criuLog)))
	}
	return nil
}

// criuErrors is what criu's log says of a failure, for runc only points to it.
func criuErrors(path string) string {
	data, err := regular.Read(path, regular.Most)
	if err != nil {
		return ""
	}
	var said []string
	for line := range strings.Lines(string(data)) {
		if _, text, ok := strings.Cut(line, "Error "); ok && len(said) < 3 {
			said = append(said, strings.TrimSpace(text))
		}
	}
	if len(said) == 0 {
		return ""
	}
	return ": criu: " + bounded(strings.Join(said, "; "))
}
