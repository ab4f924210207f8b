package layer

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"testing"
	"time"
)

// manyFiles is a layer of the shape of a distribution's: 13,800 files.
func manyFiles(tb testing.TB) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	body := bytes.Repeat([]byte("0123456789abcdef"), 6000)
	for d := range 690 {
		dir := fmt.Sprintf("d%d/s%d", d/30, d)
		header(tb, w, &tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755, ModTime: time.Unix(1_700_000_000, 0)})
		for f := range 20 {
			size := []int{500, 2000, 8000, 30000, 80000}[(d+f)%5]
			header(tb, w, &tar.Header{
				Name: fmt.Sprintf("%s/f%d", dir, f), Typeflag: tar.TypeReg, Mode: 0o644,
				Size: int64(size), ModTime: time.Unix(1_700_000_000, 0),
			})
			w.Write(body[:size])
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func header(tb testing.TB, w *tar.Writer, h *tar.Header) {
	tb.Helper()
	if err := w.WriteHeader(h); err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkUnpack is to be compared with `tar x` of the same bytes. Listing
// what was unpacked is part of it.
func BenchmarkUnpack(b *testing.B) {
	if os.Getuid() != 0 {
		b.Skip("needs root")
	}
	data := manyFiles(b)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		b.StopTimer()
		dir := b.TempDir()
		b.StartTimer()
		r, err := Unpack(b.Context(), dir, bytes.NewReader(data), Limits{})
		if err == nil {
			_, err = WriteList(dir, io.Discard, r.Sums)
		}
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		os.RemoveAll(dir)
		b.StartTimer()
	}
}
