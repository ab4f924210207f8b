package smoke

import (
	"os"
	"strings"
	"testing"
)

// TestSwapAndHugepages reads what the kernel made of limits that cgroup v2 has
// files of its own for.
func TestSwapAndHugepages(t *testing.T) {
	if !unified() {
		t.Skip("skipped: needs cgroup v2, this machine has v1")
	}
	e := start(t)
	pod, config := e.pod("limits", "")
	none := e.container(pod, config, "none", "sleep 1000", object{"resources": object{"memory_limit_in_bytes": 64 * mib}})
	e.check("memory.swap.max with memory alone", e.limit(none, "memory.swap.max", "", ""), "0")
	some := e.container(pod, config, "some", "sleep 1000", object{"resources": object{
		"memory_limit_in_bytes": 64 * mib, "memory_swap_limit_in_bytes": 96 * mib,
		"hugepage_limits": []object{{"page_size": "2MB", "limit": 4 * mib}},
	}})
	e.check("memory.swap.max", e.limit(some, "memory.swap.max", "", ""), "33554432")
	free := e.container(pod, config, "free", "sleep 1000", object{"resources": object{"memory_limit_in_bytes": 64 * mib, "memory_swap_limit_in_bytes": -1}})
	e.check("memory.swap.max without a bound", e.limit(free, "memory.swap.max", "", ""), "max")
	controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(controllers), "hugetlb") {
		e.check("hugetlb.2MB.max", e.limit(some, "hugetlb.2MB.max", "", ""), "4194304")
	} else {
		t.Log("this kernel has no hugetlb controller")
	}
	e.crictl("stopp", pod)
	e.crictl("rmp", pod)
}
