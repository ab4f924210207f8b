package runtime

import (
	"slices"
	"strings"
	"testing"

	"berth/network/hostport"
	"berth/oci/spec"
)

// B103: what a node cannot do, and requests ask for in vain, stands in the
// verbose status.
func TestB103StatusTellsWhatIsMissing(t *testing.T) {
	for name, tc := range map[string]struct {
		host    spec.Host
		says    []string
		silence []string
	}{
		"a poor one on v1": {spec.Host{}, []string{
			"memory_swap_limit_in_bytes has no effect: the memory controller has no memory.memsw.limit_in_bytes", "hugepage_limits have no effect",
			"unified is refused", "oom_score_adj", "Localhost is refused", "selinux_options have no effect"}, []string{"RuntimeDefault"}},
		"without swap on v2": {spec.Host{CgroupV2: true, HugetlbControl: true, CanLowerOOM: true},
			[]string{"memory_swap_limit_in_bytes has no effect: the memory controller has no memory.swap.max"}, []string{"hugepage", "unified", "oom_score_adj"}},
		"a rich one": {spec.Host{CgroupV2: true, HugetlbControl: true, CanLowerOOM: true, SwapControl: true, AppArmorEnabled: true, SELinuxEnabled: true},
			[]string{"selinux_options are refused: runtime.selinux is off"}, []string{"swap", "hugepage", "unified", "oom_score_adj", "Localhost", "no effect"}},
	} {
		s := &Service{Parts: Parts{Host: tc.host, HostPorts: &hostport.Manager{}}}
		f := s.hostInfo()
		text := strings.Join(f.Without, "\n")
		for _, w := range tc.says {
			if !strings.Contains(text, w) {
				t.Errorf("%s: it does not say %q:\n%s", name, w, text)
			}
		}
		if i := slices.IndexFunc(tc.silence, func(w string) bool { return strings.Contains(text, w) }); i >= 0 {
			t.Errorf("%s: it says something of %q:\n%s", name, tc.silence[i], text)
		}
		if f.SwapLimits != tc.host.SwapControl || f.CgroupVersion == 2 != tc.host.CgroupV2 || f.Without == nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// A node without a monitor is not ready, and says what it waits for.
func TestStatusWithoutMonitor(t *testing.T) {
	for text, ready := range map[string]bool{"": true, "the monitor to begin: pid 7": false} {
		s := &Service{Parts: Parts{MonitorMissing: func() string { return text }}}
		c := s.runtimeReady()
		if c.GetStatus() != ready || !strings.HasSuffix(c.GetMessage(), text) || ready != (c.GetReason() == "") {
			t.Errorf("with %q missing: %v", text, c)
		}
	}
}
