package metrics

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/stats"
)

// named are the metrics that a kubelet with cAdvisor exports of containers and
// pods and that dashboards know.
const named = `container_blkio_device_usage_total container_cpu_cfs_periods_total container_cpu_cfs_throttled_periods_total
container_cpu_cfs_throttled_seconds_total container_cpu_system_seconds_total container_cpu_usage_seconds_total
container_cpu_user_seconds_total container_file_descriptors container_fs_inodes_free container_fs_inodes_total
container_fs_limit_bytes container_fs_reads_bytes_total container_fs_reads_total container_fs_usage_bytes
container_fs_writes_bytes_total container_fs_writes_total container_hugetlb_max_usage_bytes container_hugetlb_usage_bytes
container_last_seen container_memory_cache container_memory_failcnt container_memory_failures_total
container_memory_kernel_usage container_memory_mapped_file container_memory_max_usage_bytes container_memory_rss
container_memory_swap container_memory_usage_bytes container_memory_working_set_bytes
container_network_receive_bytes_total container_network_receive_errors_total
container_network_receive_packets_dropped_total container_network_receive_packets_total
container_network_transmit_bytes_total container_network_transmit_errors_total
container_network_transmit_packets_dropped_total container_network_transmit_packets_total container_oom_events_total
container_pressure_cpu_stalled_seconds_total container_pressure_cpu_waiting_seconds_total
container_pressure_io_stalled_seconds_total container_pressure_io_waiting_seconds_total
container_pressure_memory_stalled_seconds_total container_pressure_memory_waiting_seconds_total container_processes
container_sockets container_spec_cpu_period container_spec_cpu_quota container_spec_cpu_shares
container_spec_memory_limit_bytes container_spec_memory_reservation_limit_bytes
container_spec_memory_swap_limit_bytes container_start_time_seconds container_threads container_threads_max
container_ulimits_soft container_memory_total_active_file_bytes container_memory_total_inactive_file_bytes`

func TestDescriptors(t *testing.T) {
	known := map[string]bool{}
	for _, d := range Descriptors() {
		if known[d.Name] {
			t.Errorf("%s is described twice", d.Name)
		}
		known[d.Name] = true
		if d.Help == "" || !regexp.MustCompile(`^container_[a-z_]+$`).MatchString(d.Name) {
			t.Errorf("descriptor %v", d)
		}
		if !slices.Equal(d.LabelKeys[:5], []string{"id", "image", "namespace", "pod", "container"}) {
			t.Errorf("%s has labels %v", d.Name, d.LabelKeys)
		}
		sorted := slices.Sorted(slices.Values(d.LabelKeys))
		if len(slices.Compact(sorted)) != len(d.LabelKeys) {
			t.Errorf("%s has a label twice: %v", d.Name, d.LabelKeys)
		}
	}
	for _, name := range strings.Fields(named) {
		if !known[name] {
			t.Errorf("%s is not described", name)
		}
	}
	for range 2 { // appending to shared labels would show here
		if !reflect.DeepEqual(keysOf(Descriptors()), keysOf(Descriptors())) {
			t.Error("descriptors change")
		}
	}
}

func keysOf(all []*cri.MetricDescriptor) map[string][]string {
	keys := map[string][]string{}
	for _, d := range all {
		keys[d.Name] = d.LabelKeys
	}
	return keys
}

var (
	pod     = Pod{ID: "p1", Namespace: "ns", Name: "web"}
	started = time.Unix(1000, 5)
	before  = time.Unix(1990, 0)
)

func full1() *Container {
	stall := func(n uint64) *stats.Pressure {
		return &stats.Pressure{Some: stats.Stall{Total: n * 1e9}, Full: stats.Stall{Total: (n + 1) * 1e9}}
	}
	n := func(v uint64) *uint64 { return &v }
	d := &stats.Detail{
		Sample: stats.Sample{CPU: &stats.CPU{Usage: 3_900_000_000, Pressure: stall(10)}, Memory: &stats.Memory{Usage: 100, WorkingSet: 90, RSS: 80, Faults: 7, Major: 6, Pressure: stall(20)},
			Swap: &stats.Swap{Usage: 5}, IO: stall(30)},
		Layer: &stats.Layer{At: before, Bytes: 4096, Inodes: 2},
		Devices: []stats.Device{
			{Major: 4095, Minor: 4, Bytes: map[string]uint64{"Read": 1, "Write": 1, "Total": 1}, Count: map[string]uint64{"Read": 1, "Write": 1}},
			{Major: 4095, Minor: 3, Bytes: map[string]uint64{"Read": 11, "Write": 12, "Total": 23}, Count: map[string]uint64{"Read": 1, "Write": 2}},
		},
		Huge:      []stats.HugePages{{Size: "2MB", Usage: 1, Peak: n(2)}, {Size: "1GB", Usage: 3}},
		Processes: &stats.Processes{Count: 4, OpenFiles: &stats.Limit{Soft: 1024}},
		Files:     &stats.Files{At: before, Descriptors: 9, Sockets: 8},
	}
	for k := stats.CPUUser; k <= stats.ThreadsMax; k++ {
		d.Set(k, 1_000_000_000*uint64(k+1))
	}
	return &Container{ID: "c1", Image: "busybox:1", Name: "main", Started: started, Shares: 77, Detail: d,
		Disk: stats.Filesystem{Device: "/dev/x", Bytes: 1000, Inodes: 500, InodeFree: 400}, Seen: time.Unix(2000, 0)}
}

// text writes metrics as Prometheus would, without what is common to all.
func text(all []*cri.Metric) map[string]uint64 {
	out := map[string]uint64{}
	for _, m := range all {
		out[strings.TrimSpace(m.Name+" "+strings.Join(m.LabelValues[5:], ","))] = m.GetValue().GetValue()
	}
	return out
}

func TestEveryMetricFitsItsDescriptor(t *testing.T) {
	keys := keysOf(Descriptors())
	all := append(OfContainer(pod, full1()), OfNetwork(pod, &stats.Network{Interfaces: []stats.Interface{{Name: "eth0"}, {Name: "net1"}}})...)
	seen := map[string]bool{}
	series := map[string]bool{}
	for _, m := range all {
		seen[m.Name] = true
		if len(m.LabelValues) != len(keys[m.Name]) {
			t.Errorf("%s has labels %v for %v", m.Name, m.LabelValues, keys[m.Name])
		}
		id := m.Name + fmt.Sprint(m.LabelValues)
		if series[id] {
			t.Errorf("%s is there twice, which a scrape refuses", id)
		}
		series[id] = true
		if gauge := m.MetricType == cri.MetricType_GAUGE; gauge == (strings.HasSuffix(m.Name, "_total") && m.Name != "container_fs_inodes_total" || m.Name == "container_memory_failcnt") {
			t.Errorf("%s is a gauge: %v", m.Name, gauge)
		}
	}
	for name := range keys {
		if !seen[name] {
			t.Errorf("%s never has a value", name)
		}
	}
}

func TestValues(t *testing.T) {
	all := OfContainer(pod, full1())
	if want := []string{"c1", "busybox:1", "ns", "web", "main"}; !slices.Equal(all[1].LabelValues, want) {
		t.Errorf("labels %v, want %v", all[1].LabelValues, want)
	}
	got := text(all)
	for name, want := range map[string]uint64{
		"container_cpu_usage_seconds_total total":                3,
		"container_cpu_user_seconds_total":                       1,
		"container_spec_cpu_period":                              1_000_000 * uint64(stats.CPUPeriod+1),
		"container_spec_cpu_shares":                              1_000_000_000 * uint64(stats.CPUShares+1),
		"container_memory_working_set_bytes":                     90,
		"container_memory_swap":                                  5,
		"container_memory_failures_total pgfault,hierarchy":      7,
		"container_memory_failures_total pgmajfault,hierarchy":   6,
		"container_memory_failures_total pgfault,container":      1_000_000_000 * uint64(stats.MemoryOwnFaults+1),
		"container_pressure_cpu_waiting_seconds_total":           10,
		"container_pressure_cpu_stalled_seconds_total":           11,
		"container_pressure_memory_waiting_seconds_total":        20,
		"container_pressure_io_stalled_seconds_total":            31,
		"container_fs_usage_bytes /dev/x":                        4096,
		"container_fs_inodes_free /dev/x":                        400,
		"container_fs_inodes_total /dev/x":                       500,
		"container_fs_limit_bytes /dev/x":                        1000,
		"container_fs_reads_bytes_total 4095:3":                  11,
		"container_fs_writes_total 4095:3":                       2,
		"container_blkio_device_usage_total 4095:3,4095,3,Total": 23,
		"container_hugetlb_usage_bytes 1GB":                      3,
		"container_hugetlb_max_usage_bytes 2MB":                  2,
		"container_processes":                                    4,
		"container_file_descriptors":                             9,
		"container_sockets":                                      8,
		"container_ulimits_soft max_open_files":                  1024,
		"container_start_time_seconds":                           1000,
		"container_last_seen":                                    2000,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %d, there: %v; want %d", name, v, ok, want)
		}
	}
	if _, ok := got["container_hugetlb_max_usage_bytes 1GB"]; ok {
		t.Error("a peak that nobody counted")
	}
	for _, m := range all {
		behind := m.Name == "container_fs_usage_bytes" || m.Name == "container_file_descriptors" || m.Name == "container_sockets"
		if want := before.UnixNano(); behind && m.Timestamp != want || !behind && m.Timestamp != 0 {
			t.Errorf("%s has the time %d", m.Name, m.Timestamp)
		}
	}
}

// What is not known is missing; what cAdvisor calls zero or its default is that.
func TestValuesOfAPoorKernel(t *testing.T) {
	c := full1()
	c.Detail = &stats.Detail{Processes: &stats.Processes{Count: 1, OpenFiles: &stats.Limit{Infinite: true, Soft: 1<<64 - 1}}}
	got := text(OfContainer(pod, c))
	want := map[string]uint64{
		"container_memory_swap": 0, "container_spec_cpu_shares": 77, "container_processes": 1, "container_start_time_seconds": 1000, "container_last_seen": 2000,
		"container_fs_limit_bytes /dev/x": 1000, "container_fs_inodes_total /dev/x": 500, "container_fs_inodes_free /dev/x": 400,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("metrics %v, want %v", got, want)
	}
	c.Shares = 0
	if got := text(OfContainer(pod, c))["container_spec_cpu_shares"]; got != 1024 {
		t.Errorf("shares that nobody asked for: %d, want the kernel's 1024", got)
	}
}

func TestNetwork(t *testing.T) {
	all := OfNetwork(pod, &stats.Network{Interfaces: []stats.Interface{
		{Name: "eth0", Received: stats.Traffic{Bytes: 1, Packets: 2, Errors: 3, Dropped: 4}, Sent: stats.Traffic{Bytes: 5, Packets: 6, Errors: 7, Dropped: 8}}}})
	want := map[string]uint64{
		"container_network_receive_bytes_total eth0": 1, "container_network_receive_packets_total eth0": 2,
		"container_network_receive_errors_total eth0": 3, "container_network_receive_packets_dropped_total eth0": 4,
		"container_network_transmit_bytes_total eth0": 5, "container_network_transmit_packets_total eth0": 6,
		"container_network_transmit_errors_total eth0": 7, "container_network_transmit_packets_dropped_total eth0": 8,
	}
	if got := text(all); !reflect.DeepEqual(got, want) {
		t.Errorf("metrics %v", got)
	}
	if labels := all[0].LabelValues; !slices.Equal(labels, []string{"p1", "", "ns", "web", "POD", "eth0"}) {
		t.Errorf("labels %v", labels)
	}
	if got := OfNetwork(pod, nil); got != nil {
		t.Errorf("of no network: %v", got)
	}
}
