package runc

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/oci/monitor"
)

// killTree kills a process and its descendants where there is no cgroup to go
// by: stopped from the top, so that nothing can fork away, then killed. A
// descendant whose parent had ended before is not found.
func killTree(ctx context.Context, root int) error {
	if root <= 1 {
		return nil
	}
	for {
		pids := descendants(root)
		for _, sig := range []unix.Signal{unix.SIGSTOP, unix.SIGKILL} {
			for _, pid := range pids {
				_ = unix.Kill(pid, sig)
			}
		}
		if left := descendants(root); len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kill pid %d and its descendants: %w", root, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
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
