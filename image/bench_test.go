package image

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// benchImage is an image of the shape of a large one: six layers, 13,800
// files, 324 MB, compressing about as well as programs do.
func benchImage(t testing.TB, pack func([]byte) layerBlob) []layerBlob {
	t.Helper()
	random := rand.New(rand.NewPCG(1, 2))
	piece := make([]byte, 1<<20)
	for i := 0; i < len(piece); i += 4 { // about 2:1
		if random.IntN(2) == 0 {
			piece[i] = byte(random.Uint32())
			piece[i+1] = byte(random.Uint32())
		}
	}
	var layers []layerBlob
	for l := range 6 {
		var files []file
		for i := range 2300 {
			if i%20 == 0 {
				files = append(files, file{name: fmt.Sprintf("l%d/d%d/", l, i/20)})
			}
			size := []int{500, 3000, 9000, 30000, 75000}[random.IntN(5)]
			at := random.IntN(len(piece) - size)
			files = append(files, file{name: fmt.Sprintf("l%d/d%d/f%d", l, i/20, i), body: string(piece[at : at+size])})
		}
		layers = append(layers, pack(tarOf(t, files...)))
	}
	return layers
}

func cpu(who int) time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(who, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestColdPullAgainstTheFloor prints how long a cold pull takes beside
// `gzip -d | tar x` of the same layers, three at a time. It measures only when
// BERTH_BENCH names a directory on the filesystem to measure.
func TestColdPullAgainstTheFloor(t *testing.T) {
	base := os.Getenv("BERTH_BENCH")
	if base == "" {
		t.Skip("BERTH_BENCH names no directory to measure in")
	}
	for kind, pack := range map[string]func([]byte) layerBlob{"gzip": gzipLayer, "zstd": zstdLayer} {
		layers := benchImage(t, pack)
		var total int
		for _, l := range layers {
			total += len(l.tar)
		}
		t.Logf("%s: %d MB in %d layers", kind, total>>20, len(layers))
		for round := range 3 {
			floor(t, filepath.Join(base, fmt.Sprintf("%s-floor-%d", kind, round)), kind, layers)
			reg := newRegistry(t)
			reg.push("bench", "1", layers...)
			s := open(t, filepath.Join(base, fmt.Sprintf("%s-berth-%d", kind, round)), nil, reg)
			start, used := time.Now(), cpu(syscall.RUSAGE_SELF)
			mustPull(t, s, reg.ref("bench:1"))
			t.Logf("%s berth: %.2f s wall, %.2f s CPU (with the registry)", kind, time.Since(start).Seconds(), (cpu(syscall.RUSAGE_SELF) - used).Seconds())
			calm(t, s)
			start = time.Now()
			if err := s.Remove(t.Context(), s.List()[0].ID); err != nil {
				t.Fatal(err)
			}
			t.Logf("%s berth: remove returns after %v", kind, time.Since(start))
			s.Close() // the files stay, see the traps of measuring
		}
	}
}

func floor(t *testing.T, dir, kind string, layers []layerBlob) {
	t.Helper()
	start, used := time.Now(), cpu(syscall.RUSAGE_CHILDREN)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 3)
	for i, l := range layers {
		out := filepath.Join(dir, fmt.Sprint(i))
		if err := os.MkdirAll(out, 0o755); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			cmd := exec.Command("tar", "--extract", "--"+kind, "--directory", out)
			cmd.Stdin = bytes.NewReader(l.data)
			if msg, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("tar: %v %s", err, msg)
			}
		})
	}
	wg.Wait()
	t.Logf("%s floor: %.2f s wall, %.2f s CPU", kind, time.Since(start).Seconds(), (cpu(syscall.RUSAGE_CHILDREN) - used).Seconds())
}
