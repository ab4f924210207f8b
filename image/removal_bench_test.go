package image

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkRemoval is of one image while some hundred others are here.
func BenchmarkRemoval(b *testing.B) {
	for range b.N {
		b.StopTimer()
		s, refs := manyImages(b, 200)
		var slowest time.Duration
		b.StartTimer()
		for _, ref := range refs {
			began := time.Now()
			if err := s.Remove(b.Context(), ref); err != nil {
				b.Fatal(err)
			}
			slowest = max(slowest, time.Since(began))
		}
		b.StopTimer()
		b.ReportMetric(b.Elapsed().Seconds()*1000/float64(b.N*len(refs)), "ms/removal")
		b.ReportMetric(float64(slowest.Microseconds())/1000, "ms/slowest")
		s.Close()
		b.StartTimer()
	}
}

func manyImages(b *testing.B, n int) (*Store, []string) {
	reg := newRegistry(b)
	base := gzipLayer(tarOf(b, file{name: "base", body: "base"}))
	var refs []string
	for i := range n {
		reg.push("app", fmt.Sprint(i), base, gzipLayer(tarOf(b, file{name: fmt.Sprint(i)})))
		refs = append(refs, reg.ref(fmt.Sprintf("app:%d", i)))
	}
	s := open(b, b.TempDir(), nil, reg)
	for _, ref := range refs {
		mustPull(b, s, ref)
	}
	return s, refs
}
