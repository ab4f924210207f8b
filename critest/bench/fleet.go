package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// statsPods is how many pods statistics are measured with: what the kubelet
// allows on a node, nearly.
const statsPods = 100

// fleet measures what the kubelet asks again and again, on a node with many
// pods: statistics, lists and status. Pods are on the host's network and have
// no seccomp profile, so that there are soon enough of them.
func (b *bench) fleet(ctx context.Context) error {
	few := min(b.many, statsPods)
	ids, err := b.enlarge(ctx, 0, few, 1)
	if err != nil {
		return err
	}
	fmt.Printf("\nwith %d pods of one container, ms %26s %8s %8s %8s\n", few, "min", "median", "p99", "daemon's CPU")
	if err := b.repeat(ctx, b.statsCalls()); err != nil {
		return err
	}
	fmt.Printf("while a third of their inits are killed\n")
	if err := b.whileKilled(ctx, ids[:len(ids)/3]); err != nil {
		return err
	}
	seconds, err := b.enlarge(ctx, 0, few, 2)
	if err != nil {
		return err
	}
	for nth := range 2 {
		if _, err := b.enlarge(ctx, few, b.many, nth+1); err != nil {
			return err
		}
	}
	containers, err := b.rt.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return err
	}
	fmt.Printf("with %d pods and %d containers, ms %22s %8s %8s %8s\n", b.many, len(containers.GetContainers()), "min", "median", "p99", "daemon's CPU")
	if err := b.repeat(ctx, b.listCalls(seconds[0])); err != nil {
		return err
	}
	if err := b.restarts(ctx); err != nil {
		return err
	}
	return b.node.RemoveAll(ctx)
}

// restarts measures how long a killed daemon's successor takes until it answers,
// from its exec on, and what CPU time that costs it.
func (b *bench) restarts(ctx context.Context) error {
	var times []time.Duration
	var cpu time.Duration
	const often = 5
	for range often {
		if err := b.node.Kill(); err != nil {
			return err
		}
		began := time.Now()
		if err := b.node.Launch(ctx); err != nil {
			return err
		}
		times = append(times, time.Since(began))
		cpu += b.daemonCPU()
	}
	printTimes("restart of a killed daemon until it answers", times, cpu/often)
	return nil
}

// call is one RPC to measure.
type call struct {
	name string
	do   func(ctx context.Context) error
}

func (b *bench) statsCalls() []call {
	return []call{
		{"ListContainerStats", func(ctx context.Context) error {
			_, err := b.rt.ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
			return err
		}},
		{"ListPodSandboxStats", func(ctx context.Context) error {
			_, err := b.rt.ListPodSandboxStats(ctx, &cri.ListPodSandboxStatsRequest{})
			return err
		}},
		{"ListPodSandboxMetrics", func(ctx context.Context) error {
			_, err := b.rt.ListPodSandboxMetrics(ctx, &cri.ListPodSandboxMetricsRequest{})
			return err
		}},
	}
}

func (b *bench) listCalls(container string) []call {
	return []call{
		{"ListPodSandbox", func(ctx context.Context) error {
			_, err := b.rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
			return err
		}},
		{"ListContainers", func(ctx context.Context) error {
			_, err := b.rt.ListContainers(ctx, &cri.ListContainersRequest{})
			return err
		}},
		{"ContainerStatus", func(ctx context.Context) error {
			_, err := b.rt.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: container})
			return err
		}},
		{"Status", func(ctx context.Context) error {
			_, err := b.rt.Status(ctx, &cri.StatusRequest{})
			return err
		}},
	}
}

// enlarge gives the pods from first to last their container number nth, and
// makes those that are not there. It returns the containers.
func (b *bench) enlarge(ctx context.Context, first, last, nth int) ([]string, error) {
	ids := make([]string, last-first)
	err := inParallel(4, last-first, func(i int) (err error) {
		ids[i], err = b.member(ctx, fmt.Sprintf("fleet%d", first+i), nth)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("start pods of the fleet: %w", err)
	}
	return ids, nil
}

// inParallel calls do for each number below n, some at once, until one fails.
func inParallel(at, n int, do func(i int) error) error {
	var next atomic.Int64
	var mu sync.Mutex
	var failed error // guarded by mu
	var all sync.WaitGroup
	for range at {
		all.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				err := do(i)
				mu.Lock()
				failed = errors.Join(failed, err)
				stop := failed != nil
				mu.Unlock()
				if stop {
					return
				}
			}
		})
	}
	all.Wait()
	return failed
}

// member starts one container more in a pod of the fleet.
func (b *bench) member(ctx context.Context, name string, nth int) (string, error) {
	config := b.pod(name)
	config.Hostname = ""
	config.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	pod, err := b.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config}) // the pod that is there, if it is
	if err != nil {
		return "", err
	}
	c := container()
	c.Metadata.Name = fmt.Sprintf("c%d", nth)
	c.LogPath = c.Metadata.Name + ".log"
	c.Linux.SecurityContext.Seccomp = nil
	res, err := b.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: c, SandboxConfig: config})
	if err != nil {
		return "", err
	}
	_, err = b.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: res.GetContainerId()})
	return res.GetContainerId(), err
}

// repeat makes each call often, after some to warm up, and prints the times.
func (b *bench) repeat(ctx context.Context, calls []call) error {
	const warm, often = 5, 100
	for _, c := range calls {
		var times []time.Duration
		var before time.Duration
		for i := range warm + often {
			if i == warm {
				before = b.daemonCPU()
			}
			began := time.Now()
			if err := c.do(ctx); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			if i >= warm {
				times = append(times, time.Since(began))
			}
		}
		printTimes(c.name, times, (b.daemonCPU()-before)/often)
	}
	return nil
}

func printTimes(name string, times []time.Duration, cpu time.Duration) {
	slices.Sort(times)
	fmt.Printf("  %-50s %8.2f %8.2f %8.2f %8.2f\n", name, ms(times[0]), ms(median(times)), ms(times[len(times)*99/100]), ms(cpu))
}

// daemonCPU is the CPU time that the daemon has used. Unlike times by the clock
// it does not depend on the machine's other work.
func (b *bench) daemonCPU() time.Duration { return processCPU(b.node.PID()) }

// whileKilled repeats ListContainerStats as long as inits are being killed.
func (b *bench) whileKilled(ctx context.Context, ids []string) error {
	var pids []int
	for _, id := range ids {
		res, err := b.rt.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
		if err != nil {
			return err
		}
		var info struct{ PID int }
		if err := json.Unmarshal([]byte(res.GetInfo()["info"]), &info); err != nil || info.PID < 2 {
			return fmt.Errorf("container %s has the init %d: %w", id, info.PID, err)
		}
		pids = append(pids, info.PID)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			time.Sleep(50 * time.Millisecond)
		}
	}()
	var times []time.Duration
	before := b.daemonCPU()
	for {
		began := time.Now()
		if _, err := b.rt.ListContainerStats(ctx, &cri.ListContainerStatsRequest{}); err != nil {
			return fmt.Errorf("ListContainerStats: %w", err)
		}
		times = append(times, time.Since(began))
		select {
		case <-done:
			printTimes("ListContainerStats", times, (b.daemonCPU()-before)/time.Duration(len(times)))
			return nil
		case <-time.After(10 * time.Millisecond):
		}
	}
}
