// Package stats measures containers: CPU, memory, swap and pressure from their
// cgroups, of either version, and the size of their writable layers.
//
// It owns the reading of cgroup files and what must be remembered between two
// readings: the sample from which the CPU rate follows, and the last size of
// each writable layer. It does not know which containers exist, speaks no
// gRPC, and changes nothing.
//
// Terms: a cgroup path is relative to a hierarchy, as in an OCI spec. The
// working set is what the kernel could not reclaim at once: usage without
// inactive file pages. A window is the time between the two samples of a rate.
//
// Figures mean what cAdvisor's do, so that a kubelet's do not jump when it
// changes its source: the limit behind "available" is the container's own, not
// its pod's, and page faults count major ones too.
//
// On disk: nothing. Read: <hierarchy>/<cgroup path>/..., and layer directories.
package stats

import "errors"

// Sentinels of the package; test with errors.Is.
var (
	// ErrGone: the cgroup does not exist any more; its container has ended.
	ErrGone = errors.New("cgroup is gone")
	// ErrNoCgroups: no hierarchy is mounted that could tell anything.
	ErrNoCgroups = errors.New("no cgroup hierarchy is mounted")
)
