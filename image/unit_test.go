package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"berth/image/fetch"
	"berth/image/layer"
	"berth/image/registries"
)

func TestNames(t *testing.T) {
	d := "sha256:" + strings.Repeat("a", 64)
	for in, want := range map[string]string{
		"busybox":                       "docker.io/library/busybox:latest",
		"busybox:1":                     "docker.io/library/busybox:1",
		"me/tool":                       "docker.io/me/tool:latest",
		"localhost:5000/x":              "localhost:5000/x:latest",
		"reg.example/a/b:v1@" + d:       "reg.example/a/b@" + d, // the digest wins
		"reg.example/a/b@" + d:          "reg.example/a/b@" + d,
		"index.docker.io/library/x:":    "",
		"UPPER":                         "",
		"":                              "",
		"-x":                            "",
		"a//b":                          "",
		"x:" + strings.Repeat("t", 200): "",
	} {
		n, err := parseName(in)
		if want == "" {
			if !errors.Is(err, ErrInvalidReference) {
				t.Errorf("%q: %v %v", in, n, err)
			}
			continue
		}
		if err != nil || n.String() != want {
			t.Errorf("%q: %v %v, want %s", in, n, err, want)
		}
		if hasTag := !strings.Contains(want, "@"); (n.tag() != "") != hasTag {
			t.Errorf("%q: tag %q", in, n.tag())
		}
	}
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		`Get "https://cdn.example/blob?X-Sig=abc&t=1": EOF`: `Get "https://cdn.example/blob": EOF`,
		"http://user:pw@host/v2/: refused":                  "http://host/v2/: refused",
		"token s3cr3t was refused":                          "token [redacted] was refused",
		"https://h/p#frag x":                                "https://h/p x",
		"nothing here":                                      "nothing here",
	} {
		if got := registries.Redact(in, []string{"s3cr3t", ""}); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func TestClassify(t *testing.T) {
	for _, test := range []struct {
		err  error
		want error
	}{
		{fmt.Errorf("write: %w", syscall.ENOSPC), ErrNoSpace},
		{fmt.Errorf("write: %w", syscall.EDQUOT), ErrNoSpace},
		{fmt.Errorf("x: %w", layer.ErrInvalid), ErrInvalidImage},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, ErrRegistryUnavailable},
		{&net.DNSError{Err: "no such host"}, ErrRegistryUnavailable},
		{fmt.Errorf("read: %w", io.ErrUnexpectedEOF), ErrRegistryUnavailable},
		{fmt.Errorf("x: %w", registries.ErrNotFound), ErrNotFound},
		{fmt.Errorf("x: %w", registries.ErrInvalid), ErrInvalidImage},
		{fmt.Errorf("x: %w", registries.ErrConfig), ErrRegistryConfig},
		{fmt.Errorf("x: %w", fetch.ErrIdle), ErrRegistryUnavailable},
		{errors.New("something else"), nil},
	} {
		if got := classify(test.err); got != test.want {
			t.Errorf("%v: %v, want %v", test.err, got, test.want)
		}
	}
}

func TestReadAheadKeepsBytesAndErrors(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789"), 200_000)
	for _, wrap := range []func(io.Reader) io.Reader{
		func(r io.Reader) io.Reader { return r }, iotest.HalfReader, iotest.DataErrReader,
	} {
		a := readAhead(wrap(bytes.NewReader(data)))
		got, err := io.ReadAll(a)
		a.close()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}
	// A stream that breaks off must not look like one that ends.
	for _, want := range []error{io.ErrUnexpectedEOF, syscall.ECONNRESET} {
		a := readAhead(io.MultiReader(bytes.NewReader(data), iotest.ErrReader(want)))
		got, err := io.ReadAll(a)
		a.close()
		if err != want || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v, want %v", len(got), err, want)
		}
	}
	a := readAhead(bytes.NewReader(data))
	a.Read(make([]byte, 10))
	a.close() // in the middle: must not hang
}

func TestDecompressByFirstBytes(t *testing.T) {
	data := bytes.Repeat([]byte("layer"), 1000)
	skippable := append([]byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4}, zstdLayer(data).data...)
	for name, in := range map[string][]byte{
		"plain": data, "gzip": gzipLayer(data).data, "zstd": zstdLayer(data).data, "zstd with a skippable frame": skippable,
		"two gzip members":          append(gzipLayer(data[:100]).data, gzipLayer(data[100:]).data...),
		"gzip and zeros":            append(gzipLayer(data).data, make([]byte, 1000)...),
		"gzip with an empty member": append(gzipLayer(data).data, gzipLayer(nil).data...),
	} {
		body, done, err := decompress(bytes.NewReader(in), atOnce)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, err := io.ReadAll(body)
		done()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	whole := gzipLayer(data).data
	for name, in := range map[string][]byte{
		"cut": whole[:len(whole)-3], "rest": append(whole[:len(whole):len(whole)], "rest"...), "zeros and more": append(append(whole[:len(whole):len(whole)], 0, 0), whole...),
	} {
		body, _, err := decompress(bytes.NewReader(in), atOnce)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(body); err == nil {
			t.Errorf("gzip, %s: no error", name)
		}
	}
	for name, in := range map[string]string{"xz": "\xfd7zXZ\x00", "bzip2": "BZh9"} {
		if _, _, err := decompress(strings.NewReader(in), atOnce); !errors.Is(err, ErrInvalidImage) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Only what takes a lot of memory waits for its turn, and what takes too much
// is refused.
func TestLargeWindowsTakeTurns(t *testing.T) {
	data := bytes.Repeat([]byte("layer"), 8<<20/5)
	skippable := []byte{0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 1, 2, 3, 4}
	for window, large := range map[int]int{1 << 20: 0, zstdWindowMany: 0, 2 * zstdWindowMany: 1, zstdWindow: 1} {
		var b bytes.Buffer
		b.Write(skippable)
		w, err := zstd.NewWriter(&b, zstd.WithWindowSize(window))
		if err != nil {
			t.Fatal(err)
		}
		w.Write(data)
		w.Close()
		took, gave := 0, 0
		body, done, err := decompress(&b, func() (func(), error) { took++; return func() { gave++ }, nil })
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(body)
		done()
		if err != nil || !bytes.Equal(got, data) || took != large || gave != large {
			t.Errorf("window %d: %d bytes, %d turns, %d given back, error %v", window, len(got), took, gave, err)
		}
	}
	busy := errors.New("busy")
	single := []byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0} // one segment of 8 GiB
	if _, _, err := decompress(bytes.NewReader(single), func() (func(), error) { return nil, busy }); !errors.Is(err, busy) {
		t.Errorf("one segment: %v", err)
	}
	body, done, err := decompress(bytes.NewReader(single), atOnce)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	if _, err := io.ReadAll(body); !errors.Is(contentError(err), ErrInvalidImage) {
		t.Errorf("a window beyond all bounds: %v", err)
	}
}

func TestSlotsAreBounded(t *testing.T) {
	s := newSlots(2)
	one, err1 := s.enter(t.Context())
	two, err2 := s.enter(t.Context())
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errAbandoned)
	if _, err := s.enter(ctx); !errors.Is(err, errAbandoned) {
		t.Errorf("a third: %v", err)
	}
	one()
	if three, err := s.enter(t.Context()); err != nil {
		t.Error(err)
	} else {
		three()
	}
	two()
}

func TestCountedHoldsAStreamToItsSize(t *testing.T) {
	for size, want := range map[int64]error{10: nil, 9: ErrInvalidImage, 11: io.ErrUnexpectedEOF} {
		_, err := io.ReadAll(&counted{inner: strings.NewReader("0123456789"), left: size})
		if !errors.Is(err, want) {
			t.Errorf("promised %d of 10: %v", size, err)
		}
	}
}

func TestRecordsRoundTrip(t *testing.T) {
	id := digest.FromString("x").String()
	in := images{id: {Tags: []string{"a:1"}, Digests: []string{"a@" + id}, Layers: []int{3, 1, 3}, Removed: true}}
	data, err := encodeImages(in)
	if err != nil {
		t.Fatal(err)
	}
	out, err := decodeImages(data)
	if err != nil || fmt.Sprint(out[id]) != fmt.Sprint(in[id]) {
		t.Errorf("%v %v", out[id], err)
	}
	for i := range data {
		torn := bytes.Clone(data)
		torn[i] ^= 0x11
		if m, err := decodeImages(torn); err == nil && fmt.Sprint(m[id]) != fmt.Sprint(in[id]) {
			t.Fatalf("byte %d changed and nobody noticed: %v", i, m[id])
		}
	}
}
