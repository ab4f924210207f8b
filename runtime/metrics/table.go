package metrics

import "berth/runtime/stats"

// ofContainers are all metrics of containers, in the order of the replies.
var ofContainers = []metric{
	{name: "container_cpu_usage_seconds_total", help: "CPU time used, in seconds.", labels: []string{"cpu"}, values: cpuUsage},
	{name: "container_cpu_user_seconds_total", help: "CPU time used outside of the kernel, in seconds.", values: figure(stats.CPUUser, second)},
	{name: "container_cpu_system_seconds_total", help: "CPU time used in the kernel, in seconds.", values: figure(stats.CPUSystem, second)},
	{name: "container_cpu_cfs_periods_total", help: "Periods in which a CPU quota was enforced.", values: figure(stats.CPUPeriods, 1)},
	{name: "container_cpu_cfs_throttled_periods_total", help: "Periods in which the CPU quota was used up.", values: figure(stats.CPUThrottled, 1)},
	{name: "container_cpu_cfs_throttled_seconds_total", help: "Time spent waiting for the next CPU period, in seconds.", values: figure(stats.CPUThrottledTime, second)},
	{name: "container_pressure_cpu_waiting_seconds_total", help: "Time in which some task waited for a CPU, in seconds.", values: pressure(cpuPressure, some)},
	{name: "container_pressure_cpu_stalled_seconds_total", help: "Time in which all tasks waited for a CPU, in seconds.", values: pressure(cpuPressure, full)},

	{name: "container_memory_usage_bytes", help: "Memory in use, of any kind.", gauge: true, values: memory(func(m *stats.Memory) uint64 { return m.Usage })},
	{name: "container_memory_working_set_bytes", help: "Memory in use without page cache that can go at once.", gauge: true, values: memory(func(m *stats.Memory) uint64 { return m.WorkingSet })},
	{name: "container_memory_rss", help: "Anonymous memory in bytes.", gauge: true, values: memory(func(m *stats.Memory) uint64 { return m.RSS })},
	{name: "container_memory_max_usage_bytes", help: "Highest memory usage so far.", gauge: true, values: figure(stats.MemoryPeak, 1)},
	{name: "container_memory_cache", help: "Page cache in bytes.", gauge: true, values: figure(stats.MemoryCache, 1)},
	{name: "container_memory_mapped_file", help: "Files mapped into memory, in bytes.", gauge: true, values: figure(stats.MemoryMapped, 1)},
	{name: "container_memory_kernel_usage", help: "Memory that the kernel uses for the container, in bytes.", gauge: true, values: figure(stats.MemoryKernel, 1)},
	{name: "container_memory_swap", help: "Swap in use, in bytes.", gauge: true, values: swapUsage},
	{name: "container_memory_total_active_file_bytes", help: "Page cache used lately.", gauge: true, values: figure(stats.MemoryActiveFile, 1)},
	{name: "container_memory_total_inactive_file_bytes", help: "Page cache not used lately.", gauge: true, values: figure(stats.MemoryInactiveFile, 1)},
	{name: "container_memory_active_anon_bytes", help: "Anonymous memory used lately.", gauge: true, values: figure(stats.MemoryActiveAnon, 1)},
	{name: "container_memory_inactive_anon_bytes", help: "Anonymous memory not used lately.", gauge: true, values: figure(stats.MemoryInactiveAnon, 1)},
	{name: "container_memory_anon_thp_bytes", help: "Anonymous memory in transparent huge pages.", gauge: true, values: figure(stats.MemoryAnonHuge, 1)},
	{name: "container_memory_shmem_thp_bytes", help: "Shared memory in transparent huge pages; 0 on cgroup v1, which does not count it.", gauge: true, values: figure(stats.MemorySharedHuge, 1)},
	{name: "container_memory_file_thp_bytes", help: "Files in transparent huge pages; 0 on cgroup v1, which does not count it.", gauge: true, values: figure(stats.MemoryFileHuge, 1)},
	{name: "container_memory_failcnt", help: "How often the memory limit was met.", values: figure(stats.MemoryLimitHits, 1)},
	{name: "container_memory_failures_total", help: "Page faults.", labels: []string{"failure_type", "scope"}, values: faults},
	{name: "container_oom_events_total", help: "Processes that were ended for want of memory.", values: figure(stats.MemoryKilled, 1)},
	{name: "container_pressure_memory_waiting_seconds_total", help: "Time in which some task waited for memory, in seconds.", values: pressure(memoryPressure, some)},
	{name: "container_pressure_memory_stalled_seconds_total", help: "Time in which all tasks waited for memory, in seconds.", values: pressure(memoryPressure, full)},

	{name: "container_hugetlb_usage_bytes", help: "Huge pages in use.", labels: []string{"pagesize"}, gauge: true, values: hugeUsage},
	{name: "container_hugetlb_max_usage_bytes", help: "Most huge pages in use so far.", labels: []string{"pagesize"}, gauge: true, values: hugePeak},

	{name: "container_fs_usage_bytes", help: "Size of the writable layer.", labels: []string{"device"}, gauge: true, values: layerBytes},
	{name: "container_fs_limit_bytes", help: "Size of the filesystem that the writable layer is on.", labels: []string{"device"}, gauge: true, values: disk(func(f stats.Filesystem) uint64 { return f.Bytes })},
	{name: "container_fs_inodes_total", help: "Inodes of the filesystem that the writable layer is on.", labels: []string{"device"}, gauge: true, values: disk(func(f stats.Filesystem) uint64 { return f.Inodes })},
	{name: "container_fs_inodes_free", help: "Free inodes of the filesystem that the writable layer is on.", labels: []string{"device"}, gauge: true, values: disk(func(f stats.Filesystem) uint64 { return f.InodeFree })},
	{name: "container_fs_reads_bytes_total", help: "Bytes read from a device.", labels: []string{"device"}, values: device("Read", ioBytes)},
	{name: "container_fs_reads_total", help: "Reads from a device.", labels: []string{"device"}, values: device("Read", ioCount)},
	{name: "container_fs_writes_bytes_total", help: "Bytes written to a device.", labels: []string{"device"}, values: device("Write", ioBytes)},
	{name: "container_fs_writes_total", help: "Writes to a device.", labels: []string{"device"}, values: device("Write", ioCount)},
	{name: "container_blkio_device_usage_total", help: "Bytes moved to and from a block device, by kind of operation.", labels: []string{"device", "major", "minor", "operation"}, values: blockDevices},
	{name: "container_pressure_io_waiting_seconds_total", help: "Time in which some task waited for I/O, in seconds.", values: pressure(ioPressure, some)},
	{name: "container_pressure_io_stalled_seconds_total", help: "Time in which all tasks waited for I/O, in seconds.", values: pressure(ioPressure, full)},

	{name: "container_processes", help: "Processes that run.", gauge: true, values: processes},
	{name: "container_threads", help: "Threads that run.", gauge: true, values: figure(stats.Threads, 1)},
	{name: "container_threads_max", help: "Most threads that may run; 0 without a limit.", gauge: true, values: figure(stats.ThreadsMax, 1)},
	{name: "container_file_descriptors", help: "File descriptors that processes hold.", gauge: true, values: descriptors},
	{name: "container_sockets", help: "File descriptors that are sockets.", gauge: true, values: sockets},
	{name: "container_ulimits_soft", help: "Soft limits of the first process.", labels: []string{"ulimit"}, gauge: true, values: openFileLimit},

	{name: "container_start_time_seconds", help: "When the container was started, in seconds since 1970.", gauge: true, values: startTime},
	{name: "container_last_seen", help: "When these figures were read, in seconds since 1970.", gauge: true, values: lastSeen},
	{name: "container_spec_cpu_period", help: "Period of the CPU quota, in microseconds.", gauge: true, values: figure(stats.CPUPeriod, microsecond)},
	{name: "container_spec_cpu_quota", help: "CPU time allowed in a period, in microseconds; missing without a limit.", gauge: true, values: figure(stats.CPUQuota, microsecond)},
	{name: "container_spec_cpu_shares", help: "CPU shares.", gauge: true, values: cpuShares},
	{name: "container_spec_memory_limit_bytes", help: "Memory limit; 0 without one.", gauge: true, values: figure(stats.MemoryLimit, 1)},
	{name: "container_spec_memory_reservation_limit_bytes", help: "Memory that is left to the container longest; 0 for none.", gauge: true, values: figure(stats.MemoryReservation, 1)},
	{name: "container_spec_memory_swap_limit_bytes", help: "Swap limit, with memory on cgroup v1; 0 without one.", gauge: true, values: figure(stats.MemorySwapLimit, 1)},
}

// ofInterfaces are all metrics of a pod's interfaces.
var ofInterfaces = []networkMetric{
	{"container_network_receive_bytes_total", "Bytes received.", func(i *stats.Interface) uint64 { return i.Received.Bytes }},
	{"container_network_receive_packets_total", "Packets received.", func(i *stats.Interface) uint64 { return i.Received.Packets }},
	{"container_network_receive_errors_total", "Errors in receiving.", func(i *stats.Interface) uint64 { return i.Received.Errors }},
	{"container_network_receive_packets_dropped_total", "Packets dropped in receiving.", func(i *stats.Interface) uint64 { return i.Received.Dropped }},
	{"container_network_transmit_bytes_total", "Bytes sent.", func(i *stats.Interface) uint64 { return i.Sent.Bytes }},
	{"container_network_transmit_packets_total", "Packets sent.", func(i *stats.Interface) uint64 { return i.Sent.Packets }},
	{"container_network_transmit_errors_total", "Errors in sending.", func(i *stats.Interface) uint64 { return i.Sent.Errors }},
	{"container_network_transmit_packets_dropped_total", "Packets dropped in sending.", func(i *stats.Interface) uint64 { return i.Sent.Dropped }},
}
