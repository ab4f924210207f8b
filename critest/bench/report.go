package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// against pairs each call with the sum of floors that it cannot go below.
var against = []struct {
	call   string
	floors []string
}{
	{"RunPodSandbox", []string{"CNI ADD"}},
	{"CreateContainer", []string{"runc create"}},
	{"StartContainer", []string{"runc start"}},
	{"ExecSync", []string{"runc exec"}},
	{"StopContainer", nil},
	{"RemoveContainer", nil},
	{"StopPodSandbox", []string{"CNI DEL"}},
	{"RemovePodSandbox", nil},
	{"ListContainers", nil},
}

func median(d []time.Duration) time.Duration {
	s := slices.Sorted(slices.Values(d))
	if len(s) == 0 {
		return 0
	}
	return s[len(s)/2]
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// print writes the table of times.
func (b *bench) print() {
	fmt.Printf("%d pods with bridge, masquerading and portmap; container with default seccomp and a memory limit\n\n", b.rounds)
	fmt.Printf("%-18s %8s %8s   %-20s %8s %8s   %s\n", "call, ms", "min", "median", "floor", "min", "median", "ratio of medians")
	for _, a := range against {
		mine := b.times[a.call]
		fmt.Printf("%-18s %8.1f %8.1f", a.call, ms(slices.Min(mine)), ms(median(mine)))
		if len(a.floors) > 0 {
			floor := b.times[a.floors[0]]
			fmt.Printf("   %-20s %8.1f %8.1f   %.2f", a.floors[0], ms(slices.Min(floor)), ms(median(floor)), float64(median(mine))/float64(median(floor)))
		}
		fmt.Println()
	}
	stop := median(b.times["StopContainer"]) + median(b.times["RemoveContainer"])
	fmt.Printf("%-18s %8s %8.1f   %-20s %8s %8.1f   %.2f\n", "Stop + Remove", "", ms(stop), "runc kill, delete", "",
		ms(median(b.times["runc kill, delete"])), float64(stop)/float64(median(b.times["runc kill, delete"])))
	whole := median(b.times["RunPodSandbox"]) + median(b.times["CreateContainer"]) + median(b.times["StartContainer"])
	fmt.Printf("%-18s %8s %8.1f\n\nRunPodSandbox by step, ms\n", "pod start, 3 calls", "", ms(whole))
	for _, step := range b.order {
		fmt.Printf("%-28s %8.1f %8.1f\n", step, ms(slices.Min(b.steps[step])), ms(median(b.steps[step])))
	}
}

// memory measures idle pods: the daemon's and the monitor's own memory.
func (b *bench) memory(ctx context.Context) error {
	before := b.sizes()
	for i := range b.pods {
		if _, _, err := b.start(ctx, fmt.Sprintf("idle%d", i)); err != nil {
			return fmt.Errorf("start an idle pod: %w", err)
		}
	}
	time.Sleep(time.Second)
	after := b.sizes()
	fmt.Printf("\nwith %d idle pods: daemon %.1f MiB resident, %.0f KiB more per pod; everything else of berth %.2f MiB, %.0f KiB more per pod\n",
		b.pods, after.daemon/1024, (after.daemon-before.daemon)/float64(b.pods), after.others/1024, (after.others-before.others)/float64(b.pods))
	return b.node.RemoveAll(ctx)
}

// sizes in KiB: the daemon's resident set, the others' proportional one.
type sizes struct{ daemon, others float64 }

func (b *bench) sizes() sizes {
	var s sizes
	for _, pid := range b.node.Daemons() {
		if pid == b.node.PID() {
			s.daemon += field(fmt.Sprintf("/proc/%d/status", pid), "VmRSS:")
		} else {
			s.others += field(fmt.Sprintf("/proc/%d/smaps_rollup", pid), "Pss:")
		}
	}
	return s
}

// field reads one number of a file of "name value" lines.
func field(file, name string) float64 {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0 // the process ended; its memory is none
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			var value float64
			if _, err := fmt.Sscan(rest, &value); err == nil {
				return value
			}
		}
	}
	return 0
}
