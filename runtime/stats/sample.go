package stats

import "time"

// Sample is what a cgroup said at one time. Parts that the kernel does not
// tell (no such controller, no pressure figures) are nil.
type Sample struct {
	At     time.Time
	CPU    *CPU
	Memory *Memory
	Swap   *Swap
	IO     *Pressure
}

// CPU is processor time since the cgroup was made.
type CPU struct {
	Usage    uint64  // nanoseconds, summed over all cores
	Rate     *uint64 // nanoseconds per second over the last window; nil while unknown
	Pressure *Pressure
}

// Memory is in bytes, faults in numbers.
type Memory struct {
	Usage      uint64
	WorkingSet uint64
	RSS        uint64  // anonymous memory
	Available  *uint64 // limit less working set; nil without a limit
	Faults     uint64  // all page faults
	Major      uint64  // those that waited for the disk
	Pressure   *Pressure
}

// Swap is in bytes.
type Swap struct {
	Usage     uint64
	Available *uint64 // limit less usage; nil without a limit
}

// Pressure is the time that tasks stood still for want of something.
type Pressure struct{ Some, Full Stall }

// Stall is the time in which some, or all, tasks stood still.
type Stall struct {
	Total                uint64 // nanoseconds
	Avg10, Avg60, Avg300 float64
}

// left is what remains of limit after used; nil when there is no limit.
func left(limit *uint64, used uint64) *uint64 {
	if limit == nil {
		return nil
	}
	rest := uint64(0)
	if *limit > used {
		rest = *limit - used
	}
	return &rest
}

// less is a - b, but not below 0: two files are not read at one instant.
func less(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}
