// Package stats measures containers and pods: CPU, memory, swap, pressure, I/O
// and processes from their cgroups, of either version, what went through the
// interfaces of a network namespace, and the size of writable layers.
//
// It owns the reading of cgroup files and what must be remembered between two
// readings: the sample from which the CPU rate follows, and what is measured
// behind the replies because it may take long. It does not know which containers
// exist, enters no namespace, speaks no gRPC, and changes nothing.
//
// Terms: a cgroup path is relative to a hierarchy, as in an OCI spec. The
// working set is what the kernel could not reclaim at once: usage without
// inactive file pages. A window is the time between the two samples of a rate. A
// Sample is what the kubelet asks for every ten seconds; a Detail is everything,
// as a scrape of metrics wants it; a Figure is one number of a Detail.
//
// Figures mean what cAdvisor's do, so that a kubelet's do not jump when it
// changes its source: the limit behind "available" is the container's own, not
// its pod's, page faults count major ones too, loopback is no interface. What a
// kernel or a version of cgroups does not tell is left out, not called zero.
//
// On disk: nothing. Read: <hierarchy>/<cgroup path>/..., layer directories,
// /proc/<pid>/fd, /proc/thread-self/net.
package stats

import "errors"

// Sentinels of the package; test with errors.Is.
var (
	// ErrGone: the cgroup does not exist any more; its container has ended.
	ErrGone = errors.New("cgroup is gone")
	// ErrNoCgroups: no hierarchy is mounted that could tell anything.
	ErrNoCgroups = errors.New("no cgroup hierarchy is mounted")
)
