package stats

import "bytes"

// Figure names one number that a cgroup tells beyond a Sample.
type Figure int

// The figures. Times are nanoseconds, memory and limits are bytes, limits are
// 0 for "none"; the rest are counts. What a version of cgroups counts under
// another name is here under one.
const (
	CPUUser          Figure = iota
	CPUSystem               // time in the kernel
	CPUPeriods              // periods in which a quota was enforced
	CPUThrottled            // periods in which it was used up
	CPUThrottledTime        // time spent waiting for the next period
	CPUPeriod               // length of a period
	CPUQuota                // CPU time in each period; unknown without a limit
	CPUShares               // relative weight; version 2 has another scale: unknown there

	MemoryCache        // page cache
	MemoryMapped       // files in address spaces
	MemoryKernel       // the kernel's own memory for the cgroup
	MemoryPeak         // highest usage so far
	MemoryLimitHits    // how often the limit was met
	MemoryActiveFile   // page cache in use
	MemoryInactiveFile // page cache that goes first
	MemoryActiveAnon
	MemoryInactiveAnon
	MemoryAnonHuge   // anonymous memory in huge pages
	MemorySharedHuge // shared memory in huge pages; version 1 does not count it: 0
	MemoryFileHuge   // files in huge pages; version 1 does not count it: 0
	MemoryOwnFaults  // page faults, without those of cgroups below
	MemoryOwnMajor   // major ones
	MemoryLimit
	MemoryReservation // what is left to the cgroup longest
	MemorySwapLimit   // of swap on version 2, of memory and swap together on version 1
	MemoryKilled      // processes ended for want of memory

	Threads
	ThreadsMax

	figures // how many there are: at most the bits of Figures.known
)

// Figures is a set of them. The zero value knows none.
type Figures struct {
	values [figures]uint64
	known  uint64 // bit per figure
}

// Get tells a figure, and false when the kernel did not.
func (f *Figures) Get(k Figure) (uint64, bool) { return f.values[k], f.known&(1<<k) != 0 }

// Set makes a figure known.
func (f *Figures) Set(k Figure, v uint64) {
	f.values[k] = v
	f.known |= 1 << k
}

// line is what to do with the number behind a key; nil when lines does not name
// the key, or nobody wants figures. Microseconds become nanoseconds.
func (f *Figures) line(key []byte, lines map[string]Figure) func(n uint64) {
	k, ok := lines[string(key)]
	if !ok || f == nil {
		return nil
	}
	scale := uint64(1)
	if bytes.HasSuffix(key, []byte("_usec")) {
		scale = 1000
	}
	return func(n uint64) { f.Set(k, n*scale) }
}

// rule is one way to read figures from a file: the lines "key number" of a
// table, or one figure for a file of one number.
type rule struct {
	file  string
	lines map[string]Figure // nil: the file is one number
	only  Figure
	scale uint64 // what that number is multiplied with; 0 is 1
}

// read adds what the rules find in a directory. A file that is not there, or
// is not as expected, tells nothing: which files there are depends on the
// kernel and on the controllers that were handed down, and the cgroup itself
// was there for the Sample.
func (f *Figures) read(rules []rule, path func(file string) string) {
	for _, r := range rules {
		if r.lines != nil {
			_ = table(path(r.file), func(key []byte) func(uint64) { return f.line(key, r.lines) })
			continue
		}
		if n, err := number(path(r.file)); err == nil && n != nil {
			f.Set(r.only, *n*max(r.scale, 1))
		} else if err == nil {
			f.Set(r.only, 0) // no limit
		}
	}
}
