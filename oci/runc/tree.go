package runc

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// killTree kills a process and its descendants where there is no cgroup to go
// by: first all are stopped, so that nothing can fork away, then killed. A
// descendant whose parent had ended before is not found.
func killTree(ctx context.Context, root int) error {
	if root <= 1 {
		return nil
	}
	var dying []int // whose parents may be gone before them
	for {
		for _, pid := range stopTree(ctx, root) {
			_ = unix.Kill(pid, unix.SIGKILL)
			dying = append(dying, pid)
		}
		dying = slices.DeleteFunc(dying, func(pid int) bool {
			state, _, ok := monitor.State(pid)
			return !ok || state == "Z"
		})
		if len(dying) == 0 && len(descendants(root)) == 0 {
			return nil
		}
		if !pause(ctx) {
			return fmt.Errorf("kill pid %d and its descendants: %w", root, ctx.Err())
		}
	}
}

// stopTree lists root and its descendants when all of them stand still: a signal takes
// a moment to arrive, in which one may have forked once more. What hangs in the kernel
// stops before it comes out.
func stopTree(ctx context.Context, root int) []int {
	asked := map[int]bool{}
	for {
		still := true
		pids := descendants(root)
		for _, pid := range pids {
			state, _, ok := monitor.State(pid)
			if !ok || state == "T" || state == "t" || state == "Z" || state == "D" && asked[pid] {
				continue
			}
			still = false
			asked[pid] = unix.Kill(pid, unix.SIGSTOP) == nil
		}
		if still || !pause(ctx) {
			return pids
		}
	}
}

// pause is false when ctx ends.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(2 * time.Millisecond):
		return true
	}
}

// descendants lists root, unless it is a zombie, and what came from it.
func descendants(root int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	children := map[int][]int{}
	zombie := map[int]bool{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		state, parent, ok := monitor.State(pid)
		if !ok {
			continue
		}
		children[parent] = append(children[parent], pid)
		zombie[pid] = state == "Z"
	}
	var found []int
	for queue := []int{root}; len(queue) > 0; queue = queue[1:] {
		if _, ok := zombie[queue[0]]; !ok {
			continue
		}
		if !zombie[queue[0]] {
			found = append(found, queue[0])
		}
		queue = append(queue, children[queue[0]]...)
	}
	return found
}
