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

// Sum adds up the samples of all containers of a pod that has no cgroup for
// itself. What cannot be added, pressure and what limits leave, is nil; so is
// the rate unless all are known. The sum of nothing is zero.
func Sum(at time.Time, parts []Sample) Sample {
	sum := Sample{At: at, CPU: &CPU{Rate: new(uint64)}, Memory: &Memory{}}
	for _, p := range parts {
		if c := p.CPU; c != nil {
			sum.CPU.Usage += c.Usage
			if sum.CPU.Rate != nil && c.Rate != nil {
				*sum.CPU.Rate += *c.Rate
			} else {
				sum.CPU.Rate = nil
			}
		}
		if m := p.Memory; m != nil {
			sum.Memory.Usage += m.Usage
			sum.Memory.WorkingSet += m.WorkingSet
			sum.Memory.RSS += m.RSS
			sum.Memory.Faults += m.Faults
			sum.Memory.Major += m.Major
		}
	}
	return sum
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
