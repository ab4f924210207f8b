package selinux

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

// The contexts of Fedora's container-selinux.
const (
	baseProcess = "system_u:system_r:container_t:s0:c1,c2"
	baseFile    = "system_u:object_r:container_file_t:s0:c1,c2"
)

// fake stands for a kernel with SELinux: it knows every context but those with
// the type unknown_t, and notes what it is told.
type fake struct{ calls []string }

var errUnknown = errors.New("invalid argument")

func (f *fake) kernel() kernel {
	return kernel{
		known: func(context string) error {
			if strings.Contains(context, ":unknown_t") {
				return errUnknown
			}
			return nil
		},
		label: func(path, context string) error { f.calls = append(f.calls, "label "+path+" "+context); return nil },
	}
}

func policy(t *testing.T) (*Policy, *fake) {
	t.Helper()
	f := &fake{}
	p, err := open(baseProcess, baseFile, f.kernel())
	if err != nil {
		t.Fatal(err)
	}
	return p, f
}

func pod(t *testing.T, p *Policy, o *cri.SELinuxOption) spec.Labels {
	t.Helper()
	l, err := p.Pod(o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestOpen(t *testing.T) {
	if _, err := Open(); err != nil && !errors.Is(err, ErrOff) {
		t.Errorf("here: %v", err)
	}
	for _, base := range [][2]string{{"", ""}, {baseProcess, ""}, {"", baseFile}, {"nonsense", baseFile}} {
		if _, err := open(base[0], base[1], kernel{}); !errors.Is(err, errPolicy) {
			t.Errorf("%q: %v", base, err)
		}
	}
}

func TestPodsHaveCategoriesOfTheirOwn(t *testing.T) {
	p, _ := policy(t)
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				l, err := p.Pod(nil)
				process, file := split(l.Process), split(l.Mount)
				mu.Lock()
				if err != nil || process.level != file.level || seen[process.level] {
					t.Errorf("labels %v (%v); seen before: %v", l, err, seen[process.level])
				}
				seen[process.level] = true
				mu.Unlock()
				if process.level = ""; process.String() != "system_u:system_r:container_t" {
					t.Errorf("process %s", l.Process)
				}
				if file.level = ""; file.String() != "system_u:object_r:container_file_t" {
					t.Errorf("files %s", l.Mount)
				}
			}
		})
	}
	wg.Wait()
	for l := range seen {
		if strings.Contains(l, "c1022") || strings.Contains(l, "c1023") {
			t.Errorf("level %s uses the categories of privileged containers", l)
		}
	}
	if got := p.Privileged(); got != (spec.Labels{Mount: "system_u:object_r:container_file_t:s0:c1022,c1023"}) {
		t.Errorf("privileged: %v", got)
	}
}

func TestLevelsAreTakenAndGivenBack(t *testing.T) {
	p, _ := policy(t)
	mine := pod(t, p, &cri.SELinuxOption{Level: "s0:c5,c6"})
	pod(t, p, &cri.SELinuxOption{Level: "s0:c5,c6"}) // two pods may ask for one level
	restored := spec.Labels{Process: "system_u:system_r:container_t:s0:c7,c8"}
	p.Reserve(restored)
	// All other levels are taken.
	p.categories = 20
	for low := range p.categories - 2 {
		for high := low + 1; high < p.categories-2; high++ {
			if l := level(low, high); p.used[l] == 0 && l != "s0:c9,c10" {
				p.used[l] = 1
			}
		}
	}
	p.Release(mine)
	if p.used["s0:c5,c6"] != 1 || p.used["s0:c7,c8"] != 1 {
		t.Errorf("levels are counted %d and %d times", p.used["s0:c5,c6"], p.used["s0:c7,c8"])
	}
	p.Release(mine)
	p.Release(restored)
	if _, ok := p.used["s0:c5,c6"]; ok {
		t.Error("a level without pods is still noted")
	}
	for l := range p.used {
		p.used[l] = 1
	}
	p.used["s0:c5,c6"], p.used["s0:c7,c8"], p.used["s0:c9,c10"] = 1, 1, 1
	if l, err := p.Pod(nil); err == nil {
		t.Errorf("without a free level a pod got %v", l)
	}
}

func TestOptions(t *testing.T) {
	p, _ := policy(t)
	given := pod(t, p, &cri.SELinuxOption{User: "u_u", Role: "r_r", Type: "mine_t", Level: "s0:c5,c6"})
	if given != (spec.Labels{Process: "u_u:r_r:mine_t:s0:c5,c6", Mount: "u_u:object_r:container_file_t:s0:c5,c6"}) {
		t.Errorf("all given: %v", given)
	}
	plain := pod(t, p, nil)
	own := split(plain.Process).level
	for name, tc := range map[string]struct {
		o    *cri.SELinuxOption
		want spec.Labels
	}{
		"nothing":    {nil, plain},
		"empty":      {&cri.SELinuxOption{}, plain},
		"type alone": {&cri.SELinuxOption{Type: "spc_t"}, spec.Labels{Process: "system_u:system_r:spc_t:" + own, Mount: "system_u:object_r:container_file_t:" + own}},
		"level": {&cri.SELinuxOption{Level: "s0:c3,c4"},
			spec.Labels{Process: "system_u:system_r:container_t:s0:c3,c4", Mount: "system_u:object_r:container_file_t:s0:c3,c4"}},
	} {
		if got, err := p.Container(plain, tc.o); err != nil || got != tc.want {
			t.Errorf("%s: %v, %v; want %v", name, got, err, tc.want)
		}
	}
	used := len(p.used)
	_, err := p.Pod(&cri.SELinuxOption{Type: "unknown_t"})
	if _, cerr := p.Container(plain, &cri.SELinuxOption{Type: "unknown_t"}); !errors.Is(err, spec.ErrInvalid) || !errors.Is(cerr, spec.ErrInvalid) || !strings.Contains(err.Error(), "unknown_t") {
		t.Errorf("a type that the policy lacks: pod %v, container %v", err, cerr)
	}
	if len(p.used) != used {
		t.Error("a refused pod keeps a level")
	}
}

// A policy without levels (MLS off) gets none.
func TestWithoutLevels(t *testing.T) {
	p, err := open("system_u:system_r:container_t", "system_u:object_r:container_file_t", (&fake{}).kernel())
	if err != nil {
		t.Fatal(err)
	}
	if l := pod(t, p, nil); l != (spec.Labels{Process: "system_u:system_r:container_t", Mount: "system_u:object_r:container_file_t"}) {
		t.Errorf("labels %v", l)
	}
	if l := p.Privileged(); l.Mount != "system_u:object_r:container_file_t" {
		t.Errorf("privileged %v", l)
	}
}

// The node's own directories get no container's label, and no tree gets one that its
// container does not need.
func TestRelabels(t *testing.T) {
	p, f := policy(t)
	l := pod(t, p, nil)
	for _, path := range []string{"/", "/etc", "/usr", "/usr/bin", "/var/lib", "/var/lib/", "/home", "/run/berth", "/var/lib/berth", "/data", "/var/../etc", "/var/lib/kubelet"} {
		_, err := p.Relabels("mounts[3].host_path", path, l, "/data/berth", "/run/berth", "/var/lib/berth")
		if !errors.Is(err, spec.ErrInvalid) || !strings.HasPrefix(err.Error(), "mounts[3].host_path") {
			t.Errorf("%s: %v", path, err)
		}
	}
	super, err := p.Container(l, &cri.SELinuxOption{Type: "spc_t"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path   string
		labels spec.Labels
		want   bool
	}{
		{"/var/lib/kubelet/pods/x/volumes/y", l, true}, {"/srv/data", l, true}, {"/home/me/data", l, true}, {"/database", l, true},
		{"/srv/other", super, false}, {"/srv/other", spec.Labels{}, false}, {"/srv/shared", p.Privileged(), true},
	} {
		if got, err := p.Relabels("f", tc.path, tc.labels, "/data/berth"); got != tc.want || err != nil {
			t.Errorf("%s as %v: %v, %v", tc.path, tc.labels, got, err)
		}
	}
	if err := p.Label("/var/lib/berth/x/hosts", l); err != nil {
		t.Error(err)
	}
	if want := []string{"label /var/lib/berth/x/hosts " + l.Mount}; !slices.Equal(f.calls, want) {
		t.Errorf("the kernel was told\n%q, want\n%q", f.calls, want)
	}
}
