package cases

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// onHost is the configuration of a pod on the host's network: quick to make.
func (e *env) onHost() *cri.PodSandboxConfig {
	c := e.sandbox()
	c.Hostname = ""
	c.Linux.SecurityContext.NamespaceOptions.Network = cri.NamespaceMode_NODE
	return c
}

// inspected decodes what a verbose status says under "info".
func (e *env) inspected(info map[string]string, into any) {
	e.Helper()
	if err := json.Unmarshal([]byte(info["info"]), into); err != nil {
		e.Fatalf("verbose info: %v", err)
	}
}

// pid is a running container's init.
func (e *env) initOf(container string) int {
	e.Helper()
	res, err := e.rt.ContainerStatus(e.ctx, &cri.ContainerStatusRequest{ContainerId: container, Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	var info struct{ PID int }
	if e.inspected(res.GetInfo(), &info); info.PID < 2 {
		e.Fatalf("container %s has the init %d", container, info.PID)
	}
	return info.PID
}

// cgroupNumber reads a number of a container's cgroup, from a file of version 1
// (with its controller) or, on version 2, the line "key number" of another.
func (e *env) cgroupNumber(pod, container, file1, file2, key2 string) uint64 {
	e.Helper()
	res, err := e.rt.PodSandboxStatus(e.ctx, &cri.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	if err != nil {
		e.Fatal(err)
	}
	var info struct{ CgroupParent string }
	e.inspected(res.GetInfo(), &info)
	controller, name := filepath.Split(file1)
	text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, info.CgroupParent, container, name))
	if err != nil {
		if text, err = os.ReadFile(filepath.Join("/sys/fs/cgroup", info.CgroupParent, container, file2)); err != nil {
			e.Fatal(err)
		}
	}
	for line := range strings.Lines(string(text)) {
		value, isKey := strings.CutPrefix(strings.TrimSpace(line), key2+" ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil && (isKey || key2 == "" || !strings.Contains(line, " ")) {
			return n
		}
	}
	e.Fatalf("%s of container %s has no number: %q", file1, container, text)
	return 0
}

// crowd is many pods of one container each, whose inits are killed one by one.
type crowd struct {
	*env
	pods map[string]string // by container

	mu     sync.Mutex
	living map[string]bool // containers that nobody has begun to kill; guarded by mu
}

func (e *env) crowd(n int) *crowd {
	e.Helper()
	c := &crowd{env: e, pods: map[string]string{}, living: map[string]bool{}}
	for i := range n {
		config := e.onHost()
		pod := e.run(config)
		id := e.startContainer(pod, command("main", fmt.Sprintf("exec sleep %d", 10000+i)), config)
		c.pods[id], c.living[id] = pod, true
	}
	return c
}

// missing are the living that a reply has left out. It is asked after the reply
// came, so whoever was living then was so all the time before.
func (c *crowd) missing(listed map[string]bool) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for id := range c.living {
		if !listed[id] {
			out = append(out, id)
		}
	}
	return out
}

// killAll ends inits, one every 20 ms, until some are left.
func (c *crowd) killAll(leave int) {
	for id := range c.pods {
		c.mu.Lock()
		enough := len(c.living) <= leave
		if !enough {
			delete(c.living, id)
		}
		c.mu.Unlock()
		if enough {
			return
		}
		if err := syscall.Kill(c.initOf(id), syscall.SIGKILL); err != nil {
			c.Errorf("kill %s: %v", id, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// the calls that list the living containers.
func (c *crowd) lists() map[string]func() (map[string]bool, error) {
	return map[string]func() (map[string]bool, error){
		"ListContainerStats": func() (map[string]bool, error) {
			res, err := c.rt.ListContainerStats(c.ctx, &cri.ListContainerStatsRequest{})
			listed := map[string]bool{}
			for _, s := range res.GetStats() {
				listed[s.GetAttributes().GetId()] = s.GetCpu().GetUsageCoreNanoSeconds() != nil && s.GetMemory().GetWorkingSetBytes() != nil
			}
			return listed, err
		},
		"ListPodSandboxStats": func() (map[string]bool, error) {
			res, err := c.rt.ListPodSandboxStats(c.ctx, &cri.ListPodSandboxStatsRequest{})
			listed := map[string]bool{}
			for _, s := range res.GetStats() {
				for _, k := range s.GetLinux().GetContainers() {
					listed[k.GetAttributes().GetId()] = c.pods[k.GetAttributes().GetId()] == s.GetAttributes().GetId()
				}
			}
			if len(res.GetStats()) != len(c.pods) && err == nil {
				err = fmt.Errorf("%d pods are listed, %d are ready", len(res.GetStats()), len(c.pods))
			}
			return listed, err
		},
		"ListPodSandboxMetrics": func() (map[string]bool, error) {
			res, err := c.rt.ListPodSandboxMetrics(c.ctx, &cri.ListPodSandboxMetricsRequest{})
			listed := map[string]bool{}
			for _, p := range res.GetPodMetrics() {
				for _, k := range p.GetContainerMetrics() {
					listed[k.GetContainerId()] = len(k.GetMetrics()) > 20
				}
			}
			return listed, err
		},
	}
}

// B93: while inits are killed, every reply of every list has all that live, and
// a list takes no longer for it.
func TestB93StatsWhileContainersVanish(t *testing.T) {
	e := start(t, node.Options{LogLevel: "info"})
	e.pull(images.Busybox)
	const many, leave = 60, 20
	c := e.crowd(many)
	killed := make(chan struct{})
	var all sync.WaitGroup
	for name, list := range c.lists() {
		all.Go(func() {
			var calm, rough []time.Duration
			for done, rounds := false, 0; !done || rounds == 0; rounds++ {
				select {
				case <-killed:
					done = true
				default:
				}
				began := time.Now()
				listed, err := list()
				rough = append(rough, time.Since(began))
				if missing := c.missing(listed); err != nil || len(missing) > 0 {
					t.Errorf("%s: %v; it left out %v, which live", name, err, missing)
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
			for range 20 {
				began := time.Now()
				if _, err := list(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				calm = append(calm, time.Since(began))
			}
			slices.Sort(rough)
			slices.Sort(calm)
			t.Logf("%s: %d replies while inits are killed, median %v, p99 %v; afterwards median %v, longest %v",
				name, len(rough), rough[len(rough)/2], rough[len(rough)*99/100], calm[len(calm)/2], calm[len(calm)-1])
			if worst := rough[len(rough)-1]; worst > 30*time.Second {
				t.Errorf("%s took %v", name, worst)
			}
		})
	}
	c.killAll(leave)
	close(killed)
	all.Wait()
	e.eventually("the dead are no more listed", func() bool {
		for _, list := range c.lists() {
			if listed, err := list(); err != nil || len(listed) != leave {
				return false
			}
		}
		return true
	})
}

// talk serves what a container sends: it takes all, and gives as much back.
func (e *env) talk(address string, size int64) (port string, done <-chan error) {
	e.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		e.Fatal(err)
	}
	result := make(chan error, 1)
	go func() {
		defer l.Close()
		c, err := l.Accept()
		if err == nil {
			defer c.Close()
			_, err = io.CopyN(io.Discard, c, size)
		}
		if err == nil {
			_, err = c.Write(make([]byte, size))
		}
		result <- err
	}()
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port, result
}

func (e *env) podStats(pod string) *cri.LinuxPodSandboxStats {
	e.Helper()
	res, err := e.rt.PodSandboxStats(e.ctx, &cri.PodSandboxStatsRequest{PodSandboxId: pod})
	if err != nil {
		e.Fatalf("stats of pod %s: %v", pod, err)
	}
	return res.GetStats().GetLinux()
}

// B95: a pod's network counters are its own, also when nothing runs in it any
// more; the host's are those of pods on the host's network alone.
func TestB95NetworkCountersAreThePods(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	configA, configB, configHost := e.sandbox(), e.sandbox(), e.onHost()
	a, b, host := e.run(configA), e.run(configB), e.run(configHost)
	talker := e.startContainer(a, command("main", "sleep 1000"), configA)
	gateway := strings.Replace(e.Subnet, ".0/24", ".1", 1)

	const size = 1 << 20
	before := e.podStats(a).GetNetwork().GetDefaultInterface()
	port, done := e.talk(gateway, size)
	e.exec(talker, fmt.Sprintf("head -c %d /dev/zero | nc %s %s | head -c %d >/dev/null", size, gateway, port, size))
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	sysfs := func(name string) uint64 {
		n, err := strconv.ParseUint(strings.TrimSpace(e.exec(talker, "cat /sys/class/net/eth0/statistics/"+name)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	leastRx, leastTx := sysfs("rx_bytes"), sysfs("tx_bytes")
	after := e.podStats(a).GetNetwork()
	i := after.GetDefaultInterface()
	rx, tx := i.GetRxBytes().GetValue()-before.GetRxBytes().GetValue(), i.GetTxBytes().GetValue()-before.GetTxBytes().GetValue()
	if after.GetTimestamp() == 0 || i.GetName() != "eth0" || len(after.GetInterfaces()) != 0 || rx < size || rx > size*3/2 || tx < size || tx > size*3/2 {
		t.Errorf("pod A sent and received 1 MiB: %v; before %v", after, before)
	}
	if i.GetRxBytes().GetValue() < leastRx || i.GetTxBytes().GetValue() < leastTx || i.GetRxErrors() == nil || i.GetTxErrors() == nil {
		t.Errorf("pod A's counters %v, inside they were %d and %d before", i, leastRx, leastTx)
	}
	if other := e.podStats(b).GetNetwork().GetDefaultInterface(); other.GetName() != "eth0" || other.GetRxBytes().GetValue() > size/4 || other.GetTxBytes().GetValue() > size/4 {
		t.Errorf("pod B was silent: %v", other)
	}
	onHost := e.podStats(host).GetNetwork()
	names := []string{onHost.GetDefaultInterface().GetName()}
	for _, i := range onHost.GetInterfaces() {
		names = append(names, i.GetName())
	}
	if !slices.Contains(names, e.Bridge) || slices.Contains(names, "lo") || slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, "veth") }) {
		t.Errorf("a pod on the host's network has the interfaces %v; want the host's, such as %s, without those of pods", names, e.Bridge)
	}
	if _, err := e.rt.StopContainer(e.ctx, &cri.StopContainerRequest{ContainerId: talker}); err != nil {
		t.Fatal(err)
	}
	empty := e.podStats(a)
	if i := empty.GetNetwork().GetDefaultInterface(); i.GetTxBytes().GetValue() < before.GetTxBytes().GetValue()+size || len(empty.GetContainers()) != 0 {
		t.Errorf("pod A without a process: %v", empty)
	}
	e.networkMetrics(a, b, size)
}

// networkMetrics checks the same by the metrics, which say where the bytes went.
func (e *env) networkMetrics(a, b string, size uint64) {
	e.Helper()
	res, err := e.rt.ListPodSandboxMetrics(e.ctx, &cri.ListPodSandboxMetricsRequest{})
	if err != nil {
		e.Fatal(err)
	}
	sent := map[string]uint64{}
	for _, p := range res.GetPodMetrics() {
		for _, m := range p.GetMetrics() {
			if m.GetName() == "container_network_transmit_bytes_total" && slices.Contains(m.GetLabelValues(), "eth0") {
				sent[p.GetPodSandboxId()] = m.GetValue().GetValue()
			}
		}
	}
	if sent[a] < size || sent[b] > size/4 {
		e.Errorf("by the metrics pod A sent %d bytes, B %d", sent[a], sent[b])
	}
}

func (e *env) containerStats(id string) *cri.ContainerStats {
	e.Helper()
	res, err := e.rt.ContainerStats(e.ctx, &cri.ContainerStatsRequest{ContainerId: id})
	if err != nil {
		e.Fatalf("stats of container %s: %v", id, err)
	}
	return res.GetStats()
}

// The figures follow what a container does, and are the kernel's.
func TestStatsFollowTheContainer(t *testing.T) {
	const mb = 1 << 20
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.onHost()
	pod := e.run(config)
	c := command("main", "while [ ! -e /go ]; do sleep 0.1; done; dd if=/dev/zero bs=32M count=1 2>/dev/null | { sleep 10000; cat; } & while :; do :; done")
	c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 256 * mb}
	id := e.startContainer(pod, c, config)
	idle := e.containerStats(id)
	if m := idle.GetMemory(); m.GetRssBytes().GetValue() > 16*mb || m.GetAvailableBytes().GetValue() != 256*mb-m.GetWorkingSetBytes().GetValue() {
		t.Errorf("memory of an idle container: %v", m)
	}
	e.exec(id, "dd if=/dev/zero of=/big bs=1M count=5 2>/dev/null; for i in 1 2 3 4 5 6 7 8 9 10; do echo x >/file$i; done; : >/go")

	e.eventually("the memory it took", func() bool { return e.containerStats(id).GetMemory().GetRssBytes().GetValue() >= 32*mb })
	kernelBefore := e.cgroupNumber(pod, id, "cpuacct/cpuacct.usage", "cpu.stat", "usage_usec")
	busy := e.containerStats(id)
	kernelAfter := e.cgroupNumber(pod, id, "cpuacct/cpuacct.usage", "cpu.stat", "usage_usec")
	usage := busy.GetCpu().GetUsageCoreNanoSeconds().GetValue()
	if usage <= idle.GetCpu().GetUsageCoreNanoSeconds().GetValue() || !(usage >= kernelBefore && usage <= kernelAfter || usage/1000 >= kernelBefore && usage/1000 <= kernelAfter) {
		t.Errorf("CPU time %d, idle %v, the kernel's before %d and after %d", usage, idle.GetCpu(), kernelBefore, kernelAfter)
	}
	kernelMemory := e.cgroupNumber(pod, id, "memory/memory.usage_in_bytes", "memory.current", "")
	m := busy.GetMemory()
	if used := m.GetUsageBytes().GetValue(); used < m.GetWorkingSetBytes().GetValue() || m.GetWorkingSetBytes().GetValue() < 32*mb || used > kernelMemory+16*mb || used+16*mb < kernelMemory ||
		m.GetPageFaults().GetValue() < 100 || m.GetMajorPageFaults() == nil {
		t.Errorf("memory %v, the kernel's usage is %d", m, kernelMemory)
	}
	e.eventually("a CPU rate", func() bool {
		rate := e.containerStats(id).GetCpu().GetUsageNanoCores()
		return rate != nil && rate.GetValue() > 10e6
	})
	// It is measured behind, at times that depend on how long it took before.
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		l := e.containerStats(id).GetWritableLayer()
		if l.GetUsedBytes().GetValue() >= 5*mb && l.GetInodesUsed().GetValue() >= idle.GetWritableLayer().GetInodesUsed().GetValue()+11 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the layer with 5 MB in 11 files is %v, before it was %v", l, idle.GetWritableLayer())
		}
	}
	e.podFollows(pod, id, usage)
}

// podFollows checks a pod of one container against that.
func (e *env) podFollows(pod, id string, usage uint64) {
	e.Helper()
	linux := e.podStats(pod)
	if len(linux.GetContainers()) != 1 || linux.GetContainers()[0].GetAttributes().GetId() != id || linux.GetCpu().GetUsageCoreNanoSeconds().GetValue() < usage {
		e.Errorf("the pod of a container that used %d: %v", usage, linux)
	}
	inside := strings.Fields(e.exec(id, "cd /proc; echo [0-9]*")) // with the shell that asks
	processes := linux.GetProcess().GetProcessCount().GetValue()
	if got := uint64(len(inside) - 1); processes != got {
		e.Errorf("%d processes; inside are %v and the one that asked", processes, inside)
	}
	if linux.GetMemory().GetWorkingSetBytes().GetValue() < linux.GetContainers()[0].GetMemory().GetRssBytes().GetValue()/2 {
		e.Errorf("memory of the pod %v", linux.GetMemory())
	}
	if _, err := os.Stat("/proc/pressure/cpu"); err != nil {
		e.Logf("pressure is not looked at: this kernel has none: %v", err)
		return
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil && linux.GetCpu().GetPsi() == nil {
		e.Errorf("the kernel has pressure, the pod has none: %v", linux.GetCpu())
	}
}

// What an operator's tool makes of it.
func TestStatsWithCrictl(t *testing.T) {
	e := start(t, node.Options{})
	e.pull(images.Busybox)
	config := e.sandbox()
	pod := e.run(config)
	id := e.startContainer(pod, command("main", "nc -l -p 80 & exec sleep 1000"), config)
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"stats", "--all", "--output", "json"}, []string{id, `"usageCoreNanoSeconds"`, `"workingSetBytes"`, `"writableLayer"`}},
		{[]string{"stats", id[:13]}, []string{id[:13], "main"}},
		{[]string{"statsp", "--output", "json"}, []string{pod, id, `"defaultInterface"`, `"eth0"`, `"processCount"`}},
		{[]string{"statsp"}, []string{pod[:13], "pod1"}},
		{[]string{"metricdescs"}, []string{"container_cpu_usage_seconds_total", "namespace"}},
		{[]string{"metricsp"}, []string{id, "container_sockets", images.Busybox, "container_network_receive_bytes_total"}},
	} {
		out, err := e.Crictl(e.ctx, c.args...)
		if err != nil {
			t.Errorf("%v", err)
		}
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("crictl %v does not say %q: %s", c.args, w, out)
			}
		}
	}
	e.metric(id, "container_sockets", 1)
	e.metric(id, "container_processes", 2)
	e.metric(id, "container_threads", 2)
	e.metric(id, "container_file_descriptors", 4)
}

// metric checks that a container has at least so much of a metric.
func (e *env) metric(id, name string, least uint64) {
	e.Helper()
	res, err := e.rt.ListPodSandboxMetrics(e.ctx, &cri.ListPodSandboxMetricsRequest{})
	if err != nil {
		e.Fatal(err)
	}
	for _, p := range res.GetPodMetrics() {
		for _, c := range p.GetContainerMetrics() {
			for _, m := range c.GetMetrics() {
				if c.GetContainerId() == id && m.GetName() == name && m.GetValue().GetValue() >= least {
					return
				}
			}
		}
	}
	e.Errorf("container %s has less than %d %s", id, least, name)
}
