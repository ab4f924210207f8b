package spec

import (
	"encoding/json"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestUpdateResources: what the request does not name stays unset, and swap
// follows memory.
func TestUpdateResources(t *testing.T) {
	type r = cri.LinuxContainerResources
	v1 := Host{SwapControl: true, HugetlbControl: true}
	v2 := Host{SwapControl: true, CgroupV2: true}
	for _, c := range []struct {
		name    string
		request *r
		host    Host
		want    string
	}{
		{"nothing", nil, v1, `{}`},
		{"the score alone", &r{OomScoreAdj: 5}, v1, `{}`},
		{"quota", &r{CpuQuota: 2000, CpuPeriod: 10000}, v1, `{"cpu":{"quota":2000,"period":10000}}`},
		{"no quota", &r{CpuQuota: -1}, v1, `{"cpu":{"quota":-1}}`},
		{"shares", &r{CpuShares: 2}, v1, `{"cpu":{"shares":2}}`},
		{"sets", &r{CpusetCpus: "0-3,7", CpusetMems: "0"}, v1, `{"cpu":{"cpus":"0-3,7","mems":"0"}}`},
		{"memory", &r{MemoryLimitInBytes: 1 << 20}, v1, `{"memory":{"limit":1048576,"swap":1048576,"checkBeforeUpdate":true}}`},
		{"memory without swap control", &r{MemoryLimitInBytes: 1 << 20}, Host{}, `{"memory":{"limit":1048576,"checkBeforeUpdate":true}}`},
		{"memory and swap", &r{MemoryLimitInBytes: 1, MemorySwapLimitInBytes: 2}, v1, `{"memory":{"limit":1,"swap":2,"checkBeforeUpdate":true}}`},
		{"unlimited swap", &r{MemoryLimitInBytes: 1, MemorySwapLimitInBytes: -1}, v1, `{"memory":{"limit":1,"swap":-1,"checkBeforeUpdate":true}}`},
		{"huge pages", &r{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 5}}}, v1, `{"hugepageLimits":[{"pageSize":"2MB","limit":5}]}`},
		{"huge pages without the controller", &r{HugepageLimits: []*cri.HugepageLimit{{PageSize: "2MB", Limit: 5}}}, v2, `{}`},
		{"unified", &r{Unified: map[string]string{"memory.high": "max", "io.weight": "default 100"}}, v2, `{"unified":{"io.weight":"default 100","memory.high":"max"}}`},
	} {
		got, err := UpdateResources(c.request, c.host)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		text, err := json.Marshal(got)
		if err != nil || string(text) != c.want {
			t.Errorf("%s: %s, want %s", c.name, text, c.want)
		}
	}
}
