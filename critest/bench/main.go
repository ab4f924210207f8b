// Command bench measures berth against floors that no runtime can beat: the
// same runc, the same CNI plugins and the same unpacking called by hand, in the
// same run, in turns; and pulls against containerd where that is wanted. It
// prints milliseconds and ratios.
//
// It owns no state beyond its node. Times vary with the machine's neighbours by
// a fifth and more: read ratios and minima.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
	"berth/sandbox"
)

func main() {
	rounds := flag.Int("rounds", 15, "pods per measurement; 0 measures lists and statistics alone")
	pods := flag.Int("pods", 20, "pods for the memory figures")
	many := flag.Int("many", 300, "pods for lists and statistics")
	part := flag.String("part", "all", "what to measure: pods, pulls, density or all (pods and pulls)")
	peers := flag.String("peers", "", "also measure pulls of: containerd")
	pullRounds := flag.Int("pull-rounds", 3, "pulls of each image by each")
	flag.Parse()
	if err := node.Isolate(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var err error
	switch *part {
	case "all", "pods", "pulls", "density":
	default:
		err = fmt.Errorf("no part is called %q", *part)
	}
	b := &bench{rounds: *rounds, pods: *pods, many: *many, times: map[string][]time.Duration{}, steps: map[string][]time.Duration{}}
	if err == nil && *part == "density" {
		err = b.withNode(ctx, b.density)
	}
	if err == nil && (*part == "all" || *part == "pods") {
		err = b.withNode(ctx, b.run)
	}
	if err == nil && (*part == "all" || *part == "pulls") {
		err = (&pulls{peers: *peers, rounds: *pullRounds}).run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is one run about pods.
type bench struct {
	rounds, pods, many int

	node     *node.Node
	registry *registry.Registry
	rt       cri.RuntimeServiceClient
	times    map[string][]time.Duration
	steps    map[string][]time.Duration // of RunPodSandbox, as berth tells them
	order    []string                   // of the steps
}

// withNode runs do on a node that has the containers' image.
func (b *bench) withNode(ctx context.Context, do func(context.Context) error) (err error) {
	stock, err := node.OpenStock()
	if err != nil {
		return err
	}
	b.registry = stock.Registry
	defer func() { err = errors.Join(err, stock.Close()) }()
	if b.node, err = node.Start(ctx, node.Options{Mirror: b.registry.Addr(), LogLevel: "info"}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.node.Close(context.WithoutCancel(ctx))) }()
	b.rt = b.node.Runtime()
	_, err = b.node.Images().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: images.Busybox}})
	if err != nil {
		return fmt.Errorf("pull the container's image: %w", err)
	}
	return do(ctx)
}

func (b *bench) run(ctx context.Context) error {
	for round := range b.rounds {
		if err := b.floor(ctx, round); err != nil {
			return fmt.Errorf("measure the floors: %w", err)
		}
		if err := b.berth(ctx, round); err != nil {
			return fmt.Errorf("measure berth: %w", err)
		}
	}
	if b.rounds > 0 {
		b.print()
		if err := b.memory(ctx); err != nil {
			return err
		}
	}
	return b.fleet(ctx)
}

// timed runs do and keeps how long it took under name.
func (b *bench) timed(name string, do func() error) error {
	begin := time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	b.times[name] = append(b.times[name], time.Since(begin))
	return nil
}

// pod is the configuration of a pod as the kubelet sends it.
func (b *bench) pod(name string) *cri.PodSandboxConfig {
	return &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Hostname:     "bench",
		LogDirectory: filepath.Join(b.node.LogDir(), name),
		DnsConfig:    &cri.DNSConfig{Servers: []string{"10.96.0.10"}},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
		}},
	}
}

// container is an ordinary container's: default seccomp profile, memory limit.
func container() *cri.ContainerConfig {
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "main"},
		Image:    &cri.ImageSpec{Image: images.Busybox},
		Command:  []string{"sleep", "100000"},
		LogPath:  "main.log",
		Linux: &cri.LinuxContainerConfig{
			Resources: &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 102},
			SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER},
				Seccomp:          &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault},
			},
		},
	}
}

// start runs a pod with one container and returns both ids.
func (b *bench) start(ctx context.Context, name string) (pod, id string, err error) {
	config := b.pod(name)
	err = b.timed("RunPodSandbox", func() error {
		res, err := b.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
		pod = res.GetPodSandboxId()
		return err
	})
	if err != nil {
		return "", "", err
	}
	err = b.timed("CreateContainer", func() error {
		res, err := b.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: container(), SandboxConfig: config})
		id = res.GetContainerId()
		return err
	})
	if err != nil {
		return "", "", err
	}
	return pod, id, b.timed("StartContainer", func() error {
		_, err := b.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id})
		return err
	})
}

// noteSteps keeps how long berth says each step of RunPodSandbox took.
func (b *bench) noteSteps(ctx context.Context, pod string) error {
	res, err := b.rt.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	if err != nil {
		return fmt.Errorf("read the steps of a pod: %w", err)
	}
	var info struct{ Steps []sandbox.Step }
	if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil {
		return fmt.Errorf("read the steps of a pod: %w", err)
	}
	for _, st := range info.Steps {
		if _, known := b.steps[st.Name]; !known {
			b.order = append(b.order, st.Name)
		}
		b.steps[st.Name] = append(b.steps[st.Name], time.Duration(st.Nanoseconds))
	}
	return nil
}

// berth is one pod's life, timed call by call.
func (b *bench) berth(ctx context.Context, round int) error {
	pod, id, err := b.start(ctx, fmt.Sprintf("pod%d", round))
	if err != nil {
		return err
	}
	if err := b.noteSteps(ctx, pod); err != nil {
		return err
	}
	calls := []struct {
		name string
		do   func() error
	}{
		{"ExecSync", func() error {
			_, err := b.rt.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}})
			return err
		}},
		{"ListContainers", func() error {
			_, err := b.rt.ListContainers(ctx, &cri.ListContainersRequest{})
			return err
		}},
		{"StopContainer", func() error {
			// sleep as process 1 ignores SIGTERM; the floor kills it too.
			_, err := b.rt.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: id, Timeout: 0})
			return err
		}},
		{"RemoveContainer", func() error {
			_, err := b.rt.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: id})
			return err
		}},
		{"StopPodSandbox", func() error {
			_, err := b.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod})
			return err
		}},
		{"RemovePodSandbox", func() error {
			_, err := b.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
			return err
		}},
	}
	for _, c := range calls {
		if err := b.timed(c.name, c.do); err != nil {
			return err
		}
	}
	return nil
}
