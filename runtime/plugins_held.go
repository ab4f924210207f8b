package runtime

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"berth/oci/monitor"
)

// pluginsID is for what the leash holds of the NRI plugins that this daemon launches.
const pluginsID = "nri-plugins"

// pluginsPatience is how long those of an earlier daemon may take to end.
const pluginsPatience = 10 * time.Second

// launchPlugins ends the NRI plugins that an earlier daemon has launched and lets start
// launch this one's, which are held: with what they start they end with the service, or
// before the next one launches its own. NRI's code makes the processes, so they are
// moved a moment after their birth; what a plugin starts in that moment and leaves to
// itself is missed.
func (s *Service) launchPlugins(start func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), pluginsPatience)
	defer cancel()
	if err := s.Leash.Settle(ctx, pluginsID, 0); err != nil {
		s.Log.WithError(err).Warn("NRI plugins of an earlier daemon go on")
	}
	cgroup, end, err := s.Leash.Hold("NRI", pluginsID)
	if err != nil {
		return fmt.Errorf("launch NRI plugins: %w", err)
	}
	s.endPlugins = func() { end(true) }
	if cgroup == nil {
		return start()
	}
	procs := filepath.Join(cgroup.Name(), "cgroup.procs")
	started := make(chan error, 1)
	go func() { started <- start() }()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	held := map[int]bool{}
	for {
		select {
		case err := <-started:
			if holdChildren(procs, held); len(held) == 0 { // most nodes have none
				s.endPlugins()
				s.endPlugins = nil
			}
			return err
		case <-tick.C:
			holdChildren(procs, held)
		}
	}
}

// holdChildren moves new children of this process that are NRI plugins, each with what
// it has started.
func holdChildren(procs string, held map[int]bool) {
	for _, pid := range monitor.Children(os.Getpid()) {
		if held[pid] || !isPlugin(pid) {
			continue
		}
		held[pid] = true
		for tree := []int{pid}; len(tree) > 0; tree = tree[1:] {
			_ = os.WriteFile(procs, fmt.Append(nil, tree[0]), 0) // it may have ended
			tree = append(tree, monitor.Children(tree[0])...)
		}
	}
}

// isPlugin tells a launched plugin by the variable that NRI gives it.
func isPlugin(pid int) bool {
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	return err == nil && slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return bytes.HasPrefix(v, []byte("NRI_PLUGIN_NAME=")) })
}
