package image

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"berth/image/layer"
)

// BenchmarkPullCosts tells what lists of files and leftovers cost of a cold pull of
// 324 MB in six layers, in CPU time of the process, registry included: pulls without
// leftovers, as they are, and with everything written down that arrives, in turns; and
// what lists add: walking and writing them, and the checksums of the content. Medians.
func BenchmarkPullCosts(b *testing.B) {
	layers := benchImage(b, gzipLayer)
	took := map[string][]time.Duration{}
	kinds := []string{"without leftovers", "with leftovers", "all written down"}
	for n := range b.N {
		for _, kind := range kinds {
			took[kind] = append(took[kind], pullCost(b, layers, kind, fmt.Sprint(n, kind)))
		}
		list, sums := listCost(b, layers)
		took["lists"], took["checksums"] = append(took["lists"], list), append(took["checksums"], sums)
	}
	middle := func(kind string) float64 {
		slices.Sort(took[kind])
		return float64(took[kind][len(took[kind])/2].Microseconds()) / 1000
	}
	for kind, unit := range map[string]string{kinds[0]: "ms/pull-without", kinds[1]: "ms/pull", kinds[2]: "ms/pull-all-written", "lists": "ms/lists", "checksums": "ms/checksums"} {
		b.ReportMetric(middle(kind), unit)
	}
	b.ReportMetric(100*(middle("lists")+middle("checksums"))/middle(kinds[1]), "%/lists")
}

// pullCost is the CPU time of one pull into a new store.
func pullCost(b *testing.B, layers []layerBlob, kind, name string) time.Duration {
	b.Helper()
	reg := newRegistry(b)
	reg.push("bench", "1", layers...)
	s := open(b, filepath.Join(b.TempDir(), "images"), func(o *Options) {
		if kind == "without leftovers" {
			o.PartialBytes = -1
		}
	}, reg)
	if kind == "all written down" {
		s.left.quick = 0
	}
	began := cpu(syscall.RUSAGE_SELF)
	mustPull(b, s, reg.ref("bench:1"))
	used := cpu(syscall.RUSAGE_SELF) - began
	if err := s.Close(); err != nil {
		b.Fatal(name, err)
	}
	return used
}

// listCost is the CPU time that the lists of an image take, and the checksums in them.
func listCost(b *testing.B, layers []layerBlob) (list, sums time.Duration) {
	b.Helper()
	for _, l := range layers {
		dir := b.TempDir()
		result, err := layer.Unpack(b.Context(), dir, bytes.NewReader(l.tar), layer.Limits{})
		if err != nil {
			b.Fatal(err)
		}
		began := cpu(syscall.RUSAGE_SELF)
		if _, err := layer.WriteList(dir, io.Discard, result.Sums); err != nil {
			b.Fatal(err)
		}
		between := cpu(syscall.RUSAGE_SELF)
		_, _ = xxhash.New().Write(l.tar)
		list, sums = list+between-began, sums+cpu(syscall.RUSAGE_SELF)-between
		if err := os.RemoveAll(dir); err != nil {
			b.Fatal(err)
		}
	}
	return list, sums
}
