package cases

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
	"berth/sandbox/leakcheck"
)

// bigImage publishes an image whose last layer is so large; it does not compress.
func bigImage(t *testing.T, repository string, size int) (blob string) {
	t.Helper()
	l := layer(t, images.File("big", 0o644, noise(size)))
	publish(t, repository, "1", ispec.ImageConfig{}, l)
	return reg.PutBlob(l.Blob).String()
}

// requests are those for a blob so far, in the order they ended.
func requests(blob string) []registry.Request {
	return slices.DeleteFunc(reg.Requests(), func(q registry.Request) bool { return !strings.HasSuffix(q.Path, blob) })
}

func ranges(blob string) []string {
	var list []string
	for _, q := range requests(blob) {
		list = append(list, q.Range)
	}
	return list
}

// stuckPull has one pull that gets nowhere while another one works.
func (e *env) stuckPull(repository string, fault registry.Fault, settings, words string) {
	e.Helper()
	n := start(e.T, node.Options{Settings: map[string]string{"image": settings}})
	fault.Path = bigImage(e.T, repository, 5<<20)
	mend := reg.Script(fault)
	defer mend()
	reference, other := "docker.io/"+repository+":1", repository+"-other"
	publish(e.T, other, "1", ispec.ImageConfig{}, layer(e.T, images.File("other", 0o644, other)))
	result := make(chan error, 1)
	begin := time.Now()
	go func() {
		_, err := n.im.PullImage(n.ctx, pullRequest(reference))
		result <- err
	}()
	n.eventually("the pull is under way", func() bool {
		list := n.pulls()
		return len(list) == 1 && len(list[0].Layers) == 2 && list[0].Layers[1].Bytes > 0
	})
	n.pull("docker.io/" + other + ":1") // others go on
	err := <-result
	if s, _ := status.FromError(err); s.Code() != codes.Unknown || !strings.HasPrefix(s.Message(), "RegistryUnavailable") || !strings.Contains(err.Error(), words) {
		e.Errorf("%s: %v", words, err)
	}
	if took := time.Since(begin); took > leakcheck.Patience(20*time.Second) {
		e.Errorf("%s: the pull lasted %v", words, took)
	}
	mend()
	n.pull(reference) // the same pull works
}

// B03: a registry that stalls or drips ends the pull within the time of the
// configuration, and with it nothing else.
func TestB03StallAndDrip(t *testing.T) {
	t.Run("stall", func(t *testing.T) {
		(&env{T: t}).stuckPull("cases/b03-stall", registry.Fault{StallAfter: 1 << 20}, "idle_timeout = '2s'", "no data for 2s")
	})
	t.Run("drip", func(t *testing.T) {
		(&env{T: t}).stuckPull("cases/b03-drip", registry.Fault{Rate: 1}, "min_rate_window = '3s'", "too slowly")
	})
}

// B03: a pull whose caller goes away is over within two seconds, at the registry
// too; the next one goes on from there, also after the daemon was killed.
func TestB03CancelledPullIsResumed(t *testing.T) {
	e := start(t, node.Options{})
	blob := bigImage(t, "cases/b03-cancel", 12<<20)
	mend := reg.Script(registry.Fault{Path: blob, Rate: 2 << 20})
	defer mend()
	pull := e.crictl("pull", "docker.io/cases/b03-cancel:1")
	if err := pull.Start(); err != nil {
		t.Fatal(err)
	}
	const enough = 3 << 20
	e.eventually("three megabytes are here", func() bool {
		list := e.pulls()
		return len(list) == 1 && len(list[0].Layers) == 2 && list[0].Layers[1].Bytes > enough
	})
	if err := pull.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	left := time.Now()
	_ = pull.Wait() // killed by the signal
	e.eventually("the registry's connection is closed", func() bool { return len(requests(blob)) > 0 })
	if q := requests(blob)[0]; !q.Broken || time.Since(left) > leakcheck.Patience(2*time.Second) {
		t.Errorf("after %v the registry has %+v", time.Since(left), q)
	}
	e.eventually("ImageFsInfo counts what is left", func() bool {
		kept, err := exec.CommandContext(e.ctx, "du", "-s", "-B1", filepath.Join(e.Root(), "images")).Output()
		info, err2 := e.im.ImageFsInfo(e.ctx, &cri.ImageFsInfoRequest{})
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		used := info.GetImageFilesystems()[0].GetUsedBytes().GetValue()
		return used > enough && strings.HasPrefix(string(kept), fmt.Sprint(used)+"\t")
	})
	if err := errors.Join(e.Kill(), e.Launch(e.ctx)); err != nil {
		t.Fatal(err)
	}
	e.rt, e.im = e.Runtime(), e.Images()
	mend()
	e.pull("docker.io/cases/b03-cancel:1")
	all := ranges(blob)
	from, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(all[len(all)-1], "bytes="), "-"))
	if err != nil || from < enough || len(all) != 2 {
		t.Errorf("asked for %q; want the rest of more than %d bytes in the end", all, enough)
	}
}

// A connection that breaks in the middle of a layer is no more than a pause, with
// ranges and without.
func TestPullGoesOnAfterABreak(t *testing.T) {
	e := start(t, node.Options{})
	for name, ignore := range map[string]bool{"ranges": false, "none": true} {
		blob := bigImage(t, "cases/breaks-"+name, 4<<20+len(name))
		defer reg.Script(registry.Fault{Path: blob, CutAfter: 3 << 19, Times: 2, IgnoreRange: ignore})()
		defer reg.Script(registry.Fault{Path: blob, IgnoreRange: ignore})()
		e.pull("docker.io/cases/breaks-" + name + ":1")
		want := []string{"", "bytes=1572864-", "bytes=3145728-"}
		if ignore {
			want[2] = want[1] // twice it came no further
		}
		if got := ranges(blob); !slices.Equal(got[:len(want)], want) || len(got) > 3 {
			t.Errorf("%s: asked for %q, want %q", name, got, want)
		}
	}
}

// A large layer that comes slowly comes over several connections.
func TestLargeLayerInRanges(t *testing.T) {
	for connections, wanted := range map[int]bool{1: false, 4: true} {
		e := start(t, node.Options{Settings: map[string]string{"image": fmt.Sprintf("connections_per_layer = %d", connections)}})
		blob := bigImage(t, fmt.Sprintf("cases/ranges-%d", connections), 48<<20+connections)
		defer reg.Script(registry.Fault{Path: blob, Rate: 10 << 20})()
		begin := time.Now()
		e.pull(fmt.Sprintf("docker.io/cases/ranges-%d:1", connections))
		got := ranges(blob)
		t.Logf("%d connections of 10 MiB/s each: 48 MiB in %v, %d requests", connections, time.Since(begin), len(got))
		if split := len(got) > 3; split != wanted {
			t.Errorf("%d connections: asked for %q", connections, got)
		}
	}
}

// B05: ten pulls of one image fetch each blob once, and one caller that leaves
// takes nobody along.
func TestB05TenPullsAreOne(t *testing.T) {
	e := start(t, node.Options{})
	var more []images.Layer
	for i := range 7 {
		more = append(more, layer(t, images.File(fmt.Sprintf("f%d", i), 0o644, noise(100_000+i))))
	}
	publish(t, "cases/b05", "1", ispec.ImageConfig{}, more...)
	var blobs []string
	for _, l := range more {
		blobs = append(blobs, reg.PutBlob(l.Blob).String())
		defer reg.Script(registry.Fault{Path: blobs[len(blobs)-1], Delay: 500 * time.Millisecond})()
	}
	var all sync.WaitGroup
	failed := make([]error, 10)
	for i := range failed {
		ctx, leave := context.WithCancel(e.ctx)
		defer leave()
		if i == 0 {
			time.AfterFunc(300*time.Millisecond, leave)
		}
		all.Go(func() { _, failed[i] = e.im.PullImage(ctx, pullRequest("docker.io/cases/b05:1")) })
	}
	all.Wait()
	if status.Code(failed[0]) != codes.Canceled {
		t.Errorf("who left got %v", failed[0])
	}
	if err := errors.Join(failed[1:]...); err != nil {
		t.Errorf("who stayed got %v", err)
	}
	for _, blob := range blobs {
		if n := reg.Count("GET", blob); n != 1 {
			t.Errorf("%d requests for %s", n, blob)
		}
	}
}

// B07: a pull that is broken off at any moment can be had again at once, and
// what it makes is whole. BERTH_ROUNDS sets how often; the report's is 50.
func TestB07CancelAndRetryAtOnce(t *testing.T) {
	rounds := 8
	if n, err := strconv.Atoi(os.Getenv("BERTH_ROUNDS")); err == nil {
		rounds = n
	}
	e := startFor(t, node.Options{Settings: map[string]string{"image": "max_concurrent_downloads = 3"}}, time.Duration(rounds)*20*time.Second)
	var more []images.Layer
	for i := range 11 {
		more = append(more, layer(t, images.File(fmt.Sprintf("layer%d", i), 0o644, noise(1_500_000+i))))
	}
	publish(t, "cases/b07", "1", ispec.ImageConfig{}, more...)
	for _, l := range more {
		defer reg.Script(registry.Fault{Path: reg.PutBlob(l.Blob).String(), Delay: 150 * time.Millisecond})()
	}
	const reference = "docker.io/cases/b07:1"
	for round := range rounds {
		ctx, leave := context.WithTimeout(e.ctx, rand.N(800*time.Millisecond))
		_, _ = e.im.PullImage(ctx, pullRequest(reference)) // broken off, or just in time
		leave()
		e.pull(reference)
		sandbox := e.sandbox()
		pod := e.run(sandbox)
		c := command("look", "cat /layer* | wc -c")
		c.Image.Image = reference
		if got, want := strings.TrimSpace(e.output(pod, c, sandbox)), fmt.Sprint(11*1_500_000+55); got != want {
			t.Fatalf("round %d: the container reads %s bytes of its layers, want %s", round, got, want)
		}
		e.removePod(pod)
		if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: reference}}); err != nil {
			t.Fatal(err)
		}
	}
}
