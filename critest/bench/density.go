package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	crowdPods  = 200 // at once, each with a network of its own
	starters   = 10  // of them
	smallNode  = 100 // pods
	largeNode  = 500 // pods
	listLimit  = 20 * time.Millisecond
	restartRun = 5
)

// errHalf: a list was neither complete nor refused.
var errHalf = errors.New("half a truth")

// density measures a node with as many pods as it can have: how soon they are
// there, what lists take meanwhile, what memory a pod costs, and how long a
// killed daemon's successor takes until it answers.
func (b *bench) density(ctx context.Context) error {
	before := b.sizes()
	pods := make([]string, crowdPods)
	began := time.Now()
	err := b.meanwhile(ctx, fmt.Sprintf("while %d pods start, %d at once", crowdPods, starters), func() error {
		return inParallel(starters, crowdPods, func(i int) (err error) {
			pods[i], err = b.dense(ctx, i)
			return err
		})
	})
	if err != nil {
		return err
	}
	took := time.Since(began)
	if err := b.allRun(ctx, crowdPods); err != nil {
		return err
	}
	fmt.Printf("  all run after %.1f s, %.1f a second\n", took.Seconds(), crowdPods/took.Seconds())
	if err := b.meanwhile(ctx, "when they run", func() error { time.Sleep(5 * time.Second); return nil }); err != nil {
		return err
	}
	after := b.sizes()
	fmt.Printf("  daemon %.1f MiB resident, %.0f KiB more per pod; %d processes of berth, with %.2f MiB beside the daemon, %.0f KiB more per pod\n",
		after.daemon/1024, (after.daemon-before.daemon)/crowdPods, len(b.node.Daemons()), after.others/1024, (after.others-before.others)/crowdPods)
	err = b.meanwhile(ctx, "while half of them are removed", func() error {
		return inParallel(starters, crowdPods-smallNode, func(i int) error { return b.drop(ctx, pods[smallNode+i]) })
	})
	if err != nil {
		return err
	}
	if err := b.comebacks(ctx, smallNode); err != nil {
		return err
	}
	if _, err := b.enlarge(ctx, 0, largeNode-smallNode, 1); err != nil {
		return err
	}
	if err := b.comebacks(ctx, largeNode); err != nil {
		return err
	}
	return b.node.RemoveAll(ctx)
}

// dense starts a pod with a network, as a kubelet would.
func (b *bench) dense(ctx context.Context, i int) (string, error) {
	config := b.pod(fmt.Sprintf("dense%d", i))
	pod, err := b.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		return "", err
	}
	res, err := b.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: container(), SandboxConfig: config})
	if err != nil {
		return "", err
	}
	_, err = b.rt.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: res.GetContainerId()})
	return pod.GetPodSandboxId(), err
}

func (b *bench) drop(ctx context.Context, pod string) error {
	if _, err := b.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
		return err
	}
	_, err := b.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
	return err
}

// allRun checks that so many pods are ready and so many containers run.
func (b *bench) allRun(ctx context.Context, want int) error {
	pods, err := b.rt.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}})
	if err != nil {
		return err
	}
	list, err := b.rt.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}})
	if err != nil {
		return err
	}
	if len(pods.GetItems()) != want || len(list.GetContainers()) != want {
		return fmt.Errorf("%w: %d pods are ready and %d containers run, want %d of each", errHalf, len(pods.GetItems()), len(list.GetContainers()), want)
	}
	return nil
}

// meanwhile calls the lists, and a call that does nothing, in turns while do
// runs, and prints what they took. The call that does nothing tells how much of
// that is the machine's, not the daemon's.
func (b *bench) meanwhile(ctx context.Context, title string, do func() error) error {
	calls := []call{
		{"Version, which does nothing", func(ctx context.Context) error {
			_, err := b.rt.Version(ctx, &cri.VersionRequest{})
			return err
		}},
	}
	calls = append(calls, b.listCalls("")[:2]...)
	times := make([][]time.Duration, len(calls))
	done := make(chan error, 1)
	go func() { done <- do() }()
	for {
		for i, c := range calls {
			began := time.Now()
			if err := c.do(ctx); err != nil {
				return errors.Join(fmt.Errorf("%s: %w", c.name, err), <-done)
			}
			times[i] = append(times[i], time.Since(began))
		}
		select {
		case err := <-done:
			if err != nil {
				return err
			}
			fmt.Printf("\n%-53s %8s %8s %8s   %s\n", title+", ms", "median", "p99", "max", "over 20 ms")
			for i, c := range calls {
				printTail(c.name, times[i])
			}
			return nil
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func printTail(name string, times []time.Duration) {
	slices.Sort(times)
	over := 0
	for _, t := range times {
		if t > listLimit {
			over++
		}
	}
	fmt.Printf("  %-50s %9.2f %8.2f %8.2f   %d of %d\n", name, ms(median(times)), ms(times[len(times)*99/100]), ms(times[len(times)-1]), over, len(times))
}

// comebacks kills the daemon and starts it again, some times, while its lists
// are asked without a pause: each answer is complete or Unavailable.
func (b *bench) comebacks(ctx context.Context, pods int) error {
	var first, ready, cpu []time.Duration
	refused, answered := 0, 0
	for range restartRun {
		if err := b.node.Kill(); err != nil {
			return err
		}
		began := time.Now()
		up := make(chan error, 1)
		go func() { up <- b.node.Launch(ctx) }()
		answer, counts, err := b.untilComplete(ctx, pods, up)
		if err != nil {
			return err
		}
		first, ready = append(first, answer.Sub(began)), append(ready, time.Since(began))
		cpu = append(cpu, b.daemonCPU())
		refused, answered = refused+counts[0], answered+counts[1]
	}
	fmt.Printf("\n%-53s %8s %8s %8s\n", fmt.Sprintf("a killed daemon's successor with %d pods, ms", pods), "min", "median", "max")
	for i, times := range [][]time.Duration{first, ready, cpu} {
		slices.Sort(times)
		name := []string{"until lists are answered", "until Status says ready", "the daemon's CPU time until then"}[i]
		fmt.Printf("  %-50s %9.0f %8.0f %8.0f\n", name, ms(times[0]), ms(median(times)), ms(times[len(times)-1]))
	}
	fmt.Printf("  lists meanwhile: %d complete, %d Unavailable, none else\n", answered, refused)
	return nil
}

// untilComplete asks for lists until the daemon is up. It returns when the first
// complete answer came, and how many were refused and complete.
func (b *bench) untilComplete(ctx context.Context, pods int, up <-chan error) (first time.Time, counts [2]int, err error) {
	for {
		err := b.allRun(ctx, pods)
		switch {
		case err == nil:
			if counts[1]++; counts[1] == 1 {
				first = time.Now()
			}
		case status.Code(err) == codes.Unavailable:
			counts[0]++
		default:
			return first, counts, errors.Join(err, <-up)
		}
		select {
		case err := <-up:
			if err == nil && counts[1] == 0 {
				err = b.allRun(ctx, pods)
				first = time.Now()
			}
			return first, counts, err
		case <-time.After(time.Millisecond):
		}
	}
}
