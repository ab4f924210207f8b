package cases

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// damaged truncates the file "own" in the layer of images that has it.
func (e *env) damaged() {
	e.Helper()
	found, err := filepath.Glob(filepath.Join(e.Root(), "images", "layers", "*", "diff", "own"))
	if err != nil || len(found) == 0 {
		e.Fatalf("no layer has the file: %v", err)
	}
	for _, path := range found {
		if err := os.Truncate(path, 5); err != nil {
			e.Fatal(err)
		}
	}
}

// B39: a file that was truncated by hand is found by a check, which names image,
// layer and file; a repair mends it for containers to come while one runs on, and so
// does a pull.
func TestB39CheckAndRepair(t *testing.T) {
	e := start(t, node.Options{})
	body := strings.Repeat("x", 100_000)
	publish(t, "cases/damaged", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.File("own", 0o644, body)))
	const ref = "docker.io/cases/damaged:1"
	e.pull(ref)
	e.operator(true, []string{"check"}, "1 images, 2 layers checked: 0 findings")
	config := e.sandbox()
	pod := e.run(config)
	c := command("old", "sleep 1000")
	c.Image.Image = ref
	old := e.startContainer(pod, c, config)
	mounted := e.exec(old, "ls -i /own")
	size := func(name string) string {
		c := command(name, "wc -c </own")
		c.Image.Image = ref
		return strings.TrimSpace(e.output(pod, c, config))
	}
	e.damaged()
	e.operator(false, []string{"check", ref}, `"/own"`, "5 bytes, should have 100000", "image "+ref)
	e.operator(true, []string{"check", "--repair"}, "repaired "+ref+": fetched again from docker.io/cases/damaged@sha256:")
	e.operator(true, []string{"check"}, "0 findings")
	if got := size("new"); got != "100000" {
		t.Errorf("after a repair a new container sees %s bytes", got)
	}
	if now := e.exec(old, "ls -i /own"); now != mounted {
		t.Errorf("under a running container the file was exchanged: %s, was %s", now, mounted)
	}
	e.damaged()
	e.operator(false, []string{"check"}, "5 bytes")
	e.pull(ref)
	e.operator(true, []string{"check"}, "0 findings")
	if got := size("pulled"); got != "100000" {
		t.Errorf("after a pull a new container sees %s bytes", got)
	}
	e.operator(false, []string{"check", "nothing:1"}, "image not found", "NotFound")
	e.removePod(pod)
	e.remove(ref)
}

type diskUsage struct{ Bytes, Inodes uint64 }

type usageReply struct {
	Root   string
	Total  diskUsage
	Images []struct {
		Names      []string
		Total      diskUsage
		Unique     diskUsage
		SharedWith []string
	}
	Kinds []struct {
		Name          string
		Bytes, Inodes uint64
	}
}

// usesAsDu is what berth image du tells once that is what du counts: something
// goes on behind a pull or a removal for a moment.
func (e *env) usesAsDu() usageReply {
	e.Helper()
	for limit := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		r := asked[usageReply](e, "du")
		out, err := exec.Command("du", "-s", "--block-size=1", r.Root).Output()
		if err != nil {
			e.Logf("du: %v", err) // of what goes while it looks
			out = []byte("nothing")
		}
		var sum diskUsage
		for _, k := range r.Kinds {
			sum.Bytes += k.Bytes
			sum.Inodes += k.Inodes
		}
		if sum != r.Total {
			e.Fatalf("the kinds add up to %+v: %+v", sum, r)
		}
		if strings.Fields(string(out))[0] == strconv.FormatUint(r.Total.Bytes, 10) {
			return r
		}
		if time.Now().After(limit) {
			e.Fatalf("du says %s of %+v", out, r)
		}
	}
}

// The daemon is killed amid pulls and removals: whatever was going on, after the
// next start nothing is damaged, nothing is left over, and du counts what is told.
func TestKilledAmidPullsAndRemovals(t *testing.T) {
	e := start(t, node.Options{})
	var refs []string
	for i := range 3 {
		name := fmt.Sprintf("cases/killed%d", i)
		publish(t, name, "1", ispec.ImageConfig{}, layer(t, images.File("own", 0o644, strings.Repeat(name, 200_000))))
		refs = append(refs, "docker.io/"+name+":1")
	}
	for range 6 {
		var wg sync.WaitGroup
		for i := range refs {
			wg.Go(func() {
				for n := 0; ; n++ { // until the daemon is gone
					image := &cri.ImageSpec{Image: refs[(i+n)%len(refs)]}
					if _, err := e.im.PullImage(e.ctx, &cri.PullImageRequest{Image: image}); err != nil {
						return
					}
					if _, err := e.im.RemoveImage(e.ctx, &cri.RemoveImageRequest{Image: image}); err != nil {
						return
					}
				}
			})
		}
		time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
		if err := e.Kill(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if err := e.Launch(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.usesAsDu()
		e.operator(true, []string{"check"}, "0 findings")
	}
	for _, ref := range refs {
		e.pull(ref)
	}
	e.operator(true, []string{"check"}, "3 images", "0 findings")
}

// The kinds of berth image du add up to what du says, and what removal frees is told.
func TestDiskUsageByHand(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/big", "1", ispec.ImageConfig{}, layer(t, images.File("own", 0o644, strings.Repeat("x", 1_000_000))))
	publish(t, "cases/small", "1", ispec.ImageConfig{}, layer(t, images.File("other", 0o644, "x")))
	e.pull("docker.io/cases/big:1")
	e.pull("docker.io/cases/small:1")
	r := e.usesAsDu()
	if len(r.Images) != 2 || r.Images[0].Names[0] != "docker.io/cases/big:1" || len(r.Images[0].SharedWith) != 1 ||
		r.Images[0].Unique.Bytes < 1_000_000 || r.Images[1].Unique.Bytes > 100_000 || r.Images[1].Total.Bytes <= r.Images[1].Unique.Bytes {
		t.Errorf("images: %+v", r.Images)
	}
	e.operator(true, []string{"du"}, "UNIQUE", "docker.io/cases/big:1", "trash", r.Root)
}
