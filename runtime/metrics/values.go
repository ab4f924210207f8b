package metrics

import (
	"strconv"
	"time"

	"berth/runtime/stats"
)

// metric describes one name and says where its values come from.
type metric struct {
	name, help string
	labels     []string // beside baseLabels
	gauge      bool
	values     func(c *Container, add adder)
}

// networkMetric describes a metric of a pod's interfaces.
type networkMetric struct {
	name, help string
	value      func(*stats.Interface) uint64
}

// adder takes one value, when it was measured if that is not now, and the
// values of the metric's own labels.
type adder func(value uint64, at time.Time, labels ...string)

var now time.Time // zero

// figure is a metric of one figure, divided by unit.
func figure(k stats.Figure, unit uint64) func(*Container, adder) {
	return func(c *Container, add adder) {
		if n, ok := c.Detail.Get(k); ok {
			add(n/unit, now)
		}
	}
}

// memory is a metric of the container's memory.
func memory(value func(*stats.Memory) uint64) func(*Container, adder) {
	return func(c *Container, add adder) {
		if c.Detail.Memory != nil {
			add(value(c.Detail.Memory), now)
		}
	}
}

// device is a metric of each device: one operation's bytes or how many there were.
func device(operation string, of func(*stats.Device) map[string]uint64) func(*Container, adder) {
	return func(c *Container, add adder) {
		for i := range c.Detail.Devices {
			d := &c.Detail.Devices[i]
			if n, ok := of(d)[operation]; ok {
				add(n, now, d.Name())
			}
		}
	}
}

func ioBytes(d *stats.Device) map[string]uint64 { return d.Bytes }
func ioCount(d *stats.Device) map[string]uint64 { return d.Count }

// disk is a metric of the filesystem that writable layers are on.
func disk(value func(stats.Filesystem) uint64) func(*Container, adder) {
	return func(c *Container, add adder) { add(value(c.Disk), now, c.Disk.Device) }
}

// seconds of a pressure's stall; cAdvisor's "waiting" is some, "stalled" full.
func pressure(of func(*stats.Detail) *stats.Pressure, stall func(*stats.Pressure) stats.Stall) func(*Container, adder) {
	return func(c *Container, add adder) {
		if p := of(c.Detail); p != nil {
			add(stall(p).Total/second, now)
		}
	}
}

func some(p *stats.Pressure) stats.Stall { return p.Some }
func full(p *stats.Pressure) stats.Stall { return p.Full }

func cpuPressure(d *stats.Detail) *stats.Pressure {
	if d.CPU == nil {
		return nil
	}
	return d.CPU.Pressure
}

func memoryPressure(d *stats.Detail) *stats.Pressure {
	if d.Memory == nil {
		return nil
	}
	return d.Memory.Pressure
}

func ioPressure(d *stats.Detail) *stats.Pressure { return d.IO }

const (
	second      = uint64(time.Second)
	microsecond = uint64(time.Microsecond)
)

func cpuUsage(c *Container, add adder) {
	if c.Detail.CPU != nil {
		add(c.Detail.CPU.Usage/second, now, "total")
	}
}

// cpuShares are the kernel's, or, where that has another scale, as asked for.
func cpuShares(c *Container, add adder) {
	const kernelDefault = 1024
	n, ok := c.Detail.Get(stats.CPUShares)
	if !ok {
		if n = c.Shares; n == 0 {
			n = kernelDefault
		}
	}
	add(n, now)
}

// swapUsage is 0 where swap is not accounted, as cAdvisor has it.
func swapUsage(c *Container, add adder) {
	if c.Detail.Swap == nil {
		add(0, now)
		return
	}
	add(c.Detail.Swap.Usage, now)
}

// faults of a container alone and with the cgroups below it.
func faults(c *Container, add adder) {
	all := c.Detail.Memory
	if all == nil {
		return
	}
	for _, f := range []struct {
		kind string
		own  stats.Figure
		all  uint64
	}{{"pgfault", stats.MemoryOwnFaults, all.Faults}, {"pgmajfault", stats.MemoryOwnMajor, all.Major}} {
		if n, ok := c.Detail.Get(f.own); ok {
			add(n, now, f.kind, "container")
		}
		add(f.all, now, f.kind, "hierarchy")
	}
}

func layerBytes(c *Container, add adder) {
	if l := c.Detail.Layer; l != nil {
		add(l.Bytes, l.At, c.Disk.Device)
	}
}

func blockDevices(c *Container, add adder) {
	for i := range c.Detail.Devices {
		d := &c.Detail.Devices[i]
		major, minor := strconv.FormatUint(uint64(d.Major), 10), strconv.FormatUint(uint64(d.Minor), 10)
		for operation, n := range d.Bytes {
			add(n, now, d.Name(), major, minor, operation)
		}
	}
}

func hugeUsage(c *Container, add adder) {
	for _, h := range c.Detail.Huge {
		add(h.Usage, now, h.Size)
	}
}

func hugePeak(c *Container, add adder) {
	for _, h := range c.Detail.Huge {
		if h.Peak != nil {
			add(*h.Peak, now, h.Size)
		}
	}
}

func descriptors(c *Container, add adder) {
	if f := c.Detail.Files; f != nil {
		add(f.Descriptors, f.At)
	}
}

func sockets(c *Container, add adder) {
	if f := c.Detail.Files; f != nil {
		add(f.Sockets, f.At)
	}
}

func processes(c *Container, add adder) {
	if p := c.Detail.Processes; p != nil {
		add(p.Count, now)
	}
}

// openFileLimit has no value for "unlimited": the protocol's numbers have no -1.
func openFileLimit(c *Container, add adder) {
	if p := c.Detail.Processes; p != nil && p.OpenFiles != nil && !p.OpenFiles.Infinite {
		add(p.OpenFiles.Soft, now, "max_open_files")
	}
}

func startTime(c *Container, add adder) { add(uint64(c.Started.Unix()), now) }
func lastSeen(c *Container, add adder)  { add(uint64(c.Seen.Unix()), now) }
