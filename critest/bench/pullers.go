package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/node"
)

// contender is who pulls.
type contender interface {
	name() string
	// start makes a daemon whose files are all below dir. stop ends it.
	start(ctx context.Context, p *pulls, dir string) (daemon, error)
}

// daemon is a running contender.
type daemon interface {
	pull(ctx context.Context, t target) error
	remove(ctx context.Context, t target) error
	cpu() time.Duration
	peak() float64 // KiB of memory at most
	stop() error
}

// service pulls by CRI.
type service struct {
	images cri.ImageServiceClient
	pid    int
	end    func() error
}

func (s service) pull(ctx context.Context, t target) error {
	_, err := s.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: t.reference}})
	return err
}

func (s service) remove(ctx context.Context, t target) error {
	_, err := s.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: t.reference}})
	return err
}

func (s service) cpu() time.Duration { return processCPU(s.pid) }

func (s service) peak() float64 { return field(fmt.Sprintf("/proc/%d/status", s.pid), "VmHWM:") }

func (s service) stop() error { return s.end() }

type berthPuller struct{}

func (berthPuller) name() string { return "berth" }

func (berthPuller) start(ctx context.Context, p *pulls, dir string) (daemon, error) {
	// The node makes its directory where temporary files go.
	before, had := os.LookupEnv("TMPDIR")
	if err := os.Setenv("TMPDIR", dir); err != nil {
		return nil, err
	}
	n, err := node.Start(ctx, node.Options{Mirror: p.registry.Addr(), LogLevel: "info"})
	if had {
		err = errors.Join(err, os.Setenv("TMPDIR", before))
	} else {
		err = errors.Join(err, os.Unsetenv("TMPDIR"))
	}
	if err != nil {
		return nil, err
	}
	return service{images: n.Images(), pid: n.PID(), end: func() error { return n.Close(context.WithoutCancel(ctx)) }}, nil
}

type containerdPuller struct{}

func (containerdPuller) name() string { return "containerd" }

const containerdConfig = `version = 3
root = %[1]q
state = %[2]q
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.blockfile"]
[grpc]
  address = %[3]q
[plugins."io.containerd.cri.v1.images".registry]
  config_path = %[4]q
`

func (containerdPuller) start(ctx context.Context, p *pulls, dir string) (daemon, error) {
	at := func(name string) string { return filepath.Join(dir, name) }
	certs := filepath.Join(at("certs.d"), "docker.io")
	if err := os.MkdirAll(certs, 0o755); err != nil {
		return nil, err
	}
	mirror := "http://" + p.registry.Addr()
	err := errors.Join(
		os.WriteFile(filepath.Join(certs, "hosts.toml"), []byte(fmt.Sprintf("server = %q\n[host.%q]\n  capabilities = [\"pull\", \"resolve\"]\n", mirror, mirror)), 0o600),
		os.WriteFile(at("config.toml"), []byte(fmt.Sprintf(containerdConfig, at("root"), at("state"), at("sock"), at("certs.d"))), 0o600))
	if err != nil {
		return nil, err
	}
	log, err := os.Create(at("log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(p.deps, "peers", "containerd"), "--config", at("config.toml"))
	// Where igzip or unpigz is installed, containerd uses it; berth has nothing
	// of the kind, and not every node has them.
	cmd.Env = append(os.Environ(), "CONTAINERD_DISABLE_IGZIP=1", "CONTAINERD_DISABLE_PIGZ=1")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	end := func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
		_ = cmd.Wait()
		return nil
	}
	conn, err := grpc.NewClient("unix://"+at("sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, errors.Join(err, end())
	}
	s := service{images: cri.NewImageServiceClient(conn), pid: cmd.Process.Pid, end: func() error { return errors.Join(conn.Close(), end()) }}
	for limit := time.Now().Add(20 * time.Second); ; {
		_, err := s.images.ListImages(ctx, &cri.ListImagesRequest{})
		if err == nil {
			return s, nil
		}
		if time.Now().After(limit) || ctx.Err() != nil {
			text, _ := os.ReadFile(at("log")) // a better text than that of the connection, when there is one
			return nil, errors.Join(fmt.Errorf("wait for containerd: %w: %s", err, text), s.stop())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// floorPuller is what cannot be left out, done by hand: all layers at once are
// fetched, decompressed and unpacked by programs made for it.
type floorPuller struct{}

func (floorPuller) name() string { return "by hand" }

func (floorPuller) start(_ context.Context, _ *pulls, dir string) (daemon, error) {
	return &byHand{dir: filepath.Join(dir, "layers")}, nil
}

type byHand struct {
	dir string

	mu    sync.Mutex
	spent time.Duration // guarded by mu
}

func (h *byHand) pull(ctx context.Context, t target) error {
	errs := make([]error, len(t.layers))
	var all sync.WaitGroup
	for i, address := range t.layers {
		dir := filepath.Join(h.dir, strconv.Itoa(i))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		all.Go(func() {
			cmd := exec.CommandContext(ctx, "bash", "-c", fmt.Sprintf("set -o pipefail; curl -sf %s | %s | tar -x -p --numeric-owner -C %s", address, t.tool, dir))
			out, err := cmd.CombinedOutput()
			if err != nil {
				errs[i] = fmt.Errorf("%w: %s", err, out)
				return
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			h.spent += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (h *byHand) remove(context.Context, target) error { return os.RemoveAll(h.dir) }

func (h *byHand) cpu() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.spent
}

func (h *byHand) peak() float64 { return 0 }

func (h *byHand) stop() error { return nil }

// processCPU is what a process and those of its children that have ended have
// used, in steps of 10 ms.
func processCPU(pid int) time.Duration {
	const tick = 10 * time.Millisecond // USER_HZ is 100 everywhere
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0 // it has ended; the next call says so
	}
	_, rest, _ := strings.Cut(string(text), ") ") // behind the name come state and numbers
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return 0
	}
	sum := 0
	for _, f := range fields[11:15] {
		n, _ := strconv.Atoi(f)
		sum += n
	}
	return time.Duration(sum) * tick
}
