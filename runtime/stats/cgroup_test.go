package stats

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// tree is a fake root of hierarchies: path → content.
type tree map[string]string

func (f tree) make(t testing.TB) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range f {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// with is the tree with some files changed; "-" takes one away.
func (f tree) with(changes tree) tree {
	out := tree{}
	for name, content := range f {
		out[name] = content
	}
	for name, content := range changes {
		if out[name] = content; content == "-" {
			delete(out, name)
		}
	}
	return out
}

const none = "9223372036854771712\n" // version 1's "no limit"

var (
	version1 = tree{
		"cpuacct/cpuacct.usage":                    "1\n",
		"memory/memory.stat":                       "total_rss 1\n",
		"cpuacct/pod/c/cpuacct.usage":              "123456789\n",
		"memory/pod/c/memory.stat":                 "cache 1\nrss 2\nswap 3\ntotal_cache 4096\ntotal_rss 500\ntotal_rss_huge 9\ntotal_swap 70\ntotal_pgfault 11\ntotal_pgmajfault 12\ntotal_inactive_file 300\n",
		"memory/pod/c/memory.usage_in_bytes":       "1000\n",
		"memory/pod/c/memory.limit_in_bytes":       "5000\n",
		"memory/pod/c/memory.memsw.limit_in_bytes": "6000\n",
	}
	version2 = tree{
		"cgroup.controllers":        "cpu io memory pids\n",
		"pod/c/cpu.stat":            "usage_usec 123456\nuser_usec 1\nsystem_usec 2\n",
		"pod/c/cpu.pressure":        "some avg10=1.50 avg60=2.25 avg300=0.10 total=42\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
		"pod/c/memory.pressure":     "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"pod/c/io.pressure":         "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=0.00 avg60=0.00 avg300=3.00 total=2\n",
		"pod/c/memory.current":      "1000\n",
		"pod/c/memory.stat":         "anon 500\nfile 1\ninactive_file 300\nactive_file 2\npgfault 11\npgmajfault 12\n",
		"pod/c/memory.max":          "5000\n",
		"pod/c/memory.swap.current": "70\n",
		"pod/c/memory.swap.max":     "1000\n",
	}
)

func n(v uint64) *uint64 { return &v }

func TestReadCgroups(t *testing.T) {
	memory := Memory{Usage: 1000, WorkingSet: 700, RSS: 500, Available: n(4300), Faults: 11, Major: 12}
	change := func(f func(*Memory)) *Memory { m := memory; f(&m); return &m }
	p2 := &Pressure{Some: Stall{Total: 1000}}
	sample2 := Sample{
		CPU:    &CPU{Usage: 123456000, Pressure: &Pressure{Some: Stall{Total: 42000, Avg10: 1.5, Avg60: 2.25, Avg300: .1}, Full: Stall{Total: 7000}}},
		Memory: change(func(m *Memory) { m.Pressure = p2 }),
		Swap:   &Swap{Usage: 70, Available: n(930)},
		IO:     &Pressure{Some: Stall{Total: 3000}, Full: Stall{Total: 2000, Avg300: 3}},
	}
	cpu1 := &CPU{Usage: 123456789}
	for name, c := range map[string]struct {
		files tree
		want  Sample
	}{
		"1": {version1, Sample{CPU: cpu1, Memory: &memory, Swap: &Swap{Usage: 70, Available: n(930)}}},
		"1, joined controllers": {version1.with(tree{"cpuacct/cpuacct.usage": "-", "cpu,cpuacct/cpuacct.usage": "1\n", "cpu,cpuacct/pod/c/cpuacct.usage": "5\n"}),
			Sample{CPU: &CPU{Usage: 5}, Memory: &memory, Swap: &Swap{Usage: 70, Available: n(930)}}},
		"1, no limit": {version1.with(tree{"memory/pod/c/memory.limit_in_bytes": none, "memory/pod/c/memory.memsw.limit_in_bytes": none}),
			Sample{CPU: cpu1, Memory: change(func(m *Memory) { m.Available = nil }), Swap: &Swap{Usage: 70}}},
		"1, no limit, nor a pod's": {version1.with(tree{"memory/pod/c/memory.stat": "hierarchical_memory_limit " + none + version1["memory/pod/c/memory.stat"],
			"memory/pod/c/memory.limit_in_bytes": "-", "memory/pod/c/memory.memsw.limit_in_bytes": "-"}),
			Sample{CPU: cpu1, Memory: change(func(m *Memory) { m.Available = nil }), Swap: &Swap{Usage: 70}}},
		"1, swap not limited": {version1.with(tree{"memory/pod/c/memory.memsw.limit_in_bytes": none}),
			Sample{CPU: cpu1, Memory: &memory, Swap: &Swap{Usage: 70}}},
		"1, no swap limits": {version1.with(tree{"memory/pod/c/memory.memsw.limit_in_bytes": "-"}),
			Sample{CPU: cpu1, Memory: &memory, Swap: &Swap{Usage: 70}}},
		"1, no swap": {version1.with(tree{"memory/pod/c/memory.stat": "total_rss 500\ntotal_pgfault 11\ntotal_pgmajfault 12\ntotal_inactive_file 300\n"}),
			Sample{CPU: cpu1, Memory: &memory}},
		"1, no memory controller": {version1.with(tree{"memory/memory.stat": "-"}), Sample{CPU: cpu1}},
		"1, no cpuacct controller": {version1.with(tree{"cpuacct/cpuacct.usage": "-"}),
			Sample{Memory: &memory, Swap: &Swap{Usage: 70, Available: n(930)}}},
		"1, less used than inactive": {version1.with(tree{"memory/pod/c/memory.usage_in_bytes": "200\n"}),
			Sample{CPU: cpu1, Memory: change(func(m *Memory) { m.Usage, m.WorkingSet, m.Available = 200, 0, n(5000) }), Swap: &Swap{Usage: 70, Available: n(930)}}},
		"1, limit below use": {version1.with(tree{"memory/pod/c/memory.limit_in_bytes": "600\n", "memory/pod/c/memory.memsw.limit_in_bytes": "600\n"}),
			Sample{CPU: cpu1, Memory: change(func(m *Memory) { m.Available = n(0) }), Swap: &Swap{Usage: 70, Available: n(0)}}},
		"2": {version2, sample2},
		"2, no limits": {version2.with(tree{"pod/c/memory.max": "max\n", "pod/c/memory.swap.max": "max\n"}),
			Sample{CPU: sample2.CPU, Memory: change(func(m *Memory) { m.Available, m.Pressure = nil, p2 }), Swap: &Swap{Usage: 70}, IO: sample2.IO}},
		"2, no swap": {version2.with(tree{"pod/c/memory.swap.current": "-", "pod/c/memory.swap.max": "-"}),
			Sample{CPU: sample2.CPU, Memory: sample2.Memory, IO: sample2.IO}},
		"2, no memory controller": {version2.with(tree{"pod/c/memory.current": "-", "pod/c/memory.stat": "-", "pod/c/memory.max": "-"}),
			Sample{CPU: sample2.CPU, IO: sample2.IO}},
		"2, no or odd pressure": {version2.with(tree{"pod/c/cpu.pressure": "-", "pod/c/memory.pressure": "-", "pod/c/io.pressure": "much\n"}),
			Sample{CPU: &CPU{Usage: 123456000}, Memory: &memory, Swap: sample2.Swap}},
	} {
		t.Run(name, func(t *testing.T) {
			before := time.Now()
			got, err := OpenCgroups(c.files.make(t)).Read("/pod/c")
			if err != nil {
				t.Fatal(err)
			}
			if got.At.Before(before) || time.Since(got.At) > time.Minute {
				t.Errorf("taken at %v", got.At)
			}
			got.At = time.Time{}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %s\nwant %s", show(got), show(c.want))
			}
		})
	}
}

func TestReadWhatCannotBeRead(t *testing.T) {
	for name, c := range map[string]struct {
		files tree
		path  string
		want  error
		text  string
	}{
		"1, gone":                 {version1, "/pod/d", ErrGone, "cgroup /pod/d"},
		"1, memory gone":          {version1.with(tree{"memory/pod/c/memory.stat": "-"}), "/pod/c", ErrGone, "memory.stat"},
		"1, gone while read":      {version1.with(tree{"memory/pod/c/memory.usage_in_bytes": "-"}), "/pod/c", ErrGone, "memory.usage_in_bytes"},
		"1, limit gone":           {version1.with(tree{"memory/pod/c/memory.limit_in_bytes": "-"}), "/pod/c", ErrGone, "memory.limit_in_bytes"},
		"2, gone":                 {version2, "/pod/d", ErrGone, "cgroup /pod/d"},
		"2, gone while read":      {version2.with(tree{"pod/c/memory.stat": "-"}), "/pod/c", ErrGone, "memory.stat"},
		"2, limit gone":           {version2.with(tree{"pod/c/memory.max": "-"}), "/pod/c", ErrGone, "memory.max"},
		"no path is not the root": {version1, "", ErrGone, "cgroup"},
		"no hierarchy":            {tree{"other/file": ""}, "/pod/c", ErrNoCgroups, ""},
		"1, no number":            {version1.with(tree{"cpuacct/pod/c/cpuacct.usage": "many\n"}), "/pod/c", errFormat, `"many"`},
		"1, nothing":              {version1.with(tree{"memory/pod/c/memory.usage_in_bytes": "\n"}), "/pod/c", errFormat, "empty"},
		"1, odd swap limit":       {version1.with(tree{"memory/pod/c/memory.memsw.limit_in_bytes": "-1\n"}), "/pod/c", errFormat, "memsw"},
		"2, no number":            {version2.with(tree{"pod/c/cpu.stat": "usage_usec x\n"}), "/pod/c", errFormat, "cpu.stat"},
		"2, odd swap":             {version2.with(tree{"pod/c/memory.swap.current": "x\n"}), "/pod/c", errFormat, "memory.swap.current"},
		"2, odd swap limit":       {version2.with(tree{"pod/c/memory.swap.max": "x\n"}), "/pod/c", errFormat, "memory.swap.max"},
		"2, too large a number":   {version2.with(tree{"pod/c/memory.current": "18446744073709551616\n"}), "/pod/c", errFormat, "memory.current"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := OpenCgroups(c.files.make(t)).Read(c.path)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v; want %v with %q", err, c.want, c.text)
			}
			if !reflect.DeepEqual(got, Sample{}) {
				t.Errorf("half a sample: %s", show(got))
			}
		})
	}
}

func TestParseUint(t *testing.T) {
	for text, want := range map[string]uint64{"0": 0, "00042": 42, "18446744073709551615": 1<<64 - 1} {
		if got, err := parseUint([]byte(text)); err != nil || got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "-1", "1 ", "0x1", "18446744073709551616", "99999999999999999999"} {
		if got, err := parseUint([]byte(text)); !errors.Is(err, errFormat) {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}

// A file that does not end is refused, not read for ever.
func TestEndlessFile(t *testing.T) {
	if err := read("/dev/zero", func([]byte) error { return nil }); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("error %v", err)
	}
}
