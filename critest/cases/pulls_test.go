package cases

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// pull is what berth pulls -o json says of one.
type pull struct {
	Image, Stage, ID, Error string
	Ended                   bool
	Bytes, Total            int64
	Rate, Seconds           float64
	Left                    *float64
	Layers                  []struct {
		Blob, Stage  string
		Bytes, Total int64
	}
}

func pullRequest(reference string) *cri.PullImageRequest {
	return &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}}
}

// noise is what does not compress.
func noise(size int) string {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return string(b)
}

// pulls asks the operator's tool.
func (e *env) pulls() []pull {
	e.Helper()
	out, code := e.berth("pulls", "--socket", e.Socket, "-o", "json")
	var reply struct{ Pulls []pull }
	if err := json.Unmarshal([]byte(out), &reply); code != 0 || err != nil {
		e.Fatalf("berth pulls: exit code %d, %v: %s", code, err, out)
	}
	return reply.Pulls
}

// A slow pull can be watched: each layer's stage and bytes, rate and what is
// left; the log tells of it; and its end is shown.
func TestPullsAreWatched(t *testing.T) {
	e := start(t, node.Options{})
	if list := e.pulls(); len(list) != 0 {
		t.Errorf("with no pull: %+v", list)
	}
	big := layer(t, images.File("big", 0o644, noise(200<<10)))
	done := publish(t, "cases/watched", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, big)
	publish(t, "cases/watched-base", "1", ispec.ImageConfig{})
	e.pull("docker.io/cases/watched-base:1")
	var m ispec.Manifest
	if err := json.Unmarshal(done.Body, &m); err != nil {
		t.Fatal(err)
	}
	last := m.Layers[len(m.Layers)-1]
	defer reg.Script(registry.Fault{Method: "GET", Path: "/blobs/" + string(last.Digest), Rate: 14 << 10})()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if _, err := e.im.PullImage(e.ctx, pullRequest("docker.io/cases/watched:1")); err != nil {
			t.Error(err)
		}
	}()
	e.eventually("the pull is under way", func() bool {
		list := e.pulls()
		if len(list) != 2 {
			return false
		}
		p := list[1]
		if p.Image != "docker.io/cases/watched:1" || p.Ended {
			t.Fatalf("the pull: %+v", p)
		}
		if len(p.Layers) != 2 || p.Layers[0].Stage != "reused" || p.Layers[1].Bytes == 0 || p.Left == nil {
			return false
		}
		if p.Total != last.Size || p.Bytes != p.Layers[1].Bytes || p.Layers[1].Stage != "fetching" || p.Layers[1].Blob != string(last.Digest) || p.Rate <= 0 {
			t.Fatalf("the pull under way: %+v", p)
		}
		return true
	})
	if out, code := e.berth("pulls", "--socket", e.Socket); code != 0 || !regexp.MustCompile(`docker.io/cases/watched:1 +fetching .*B/s`).MatchString(out) {
		t.Errorf("the table: exit code %d\n%s", code, out)
	}
	e.watched()
	<-ended
	list := e.pulls()
	if p := list[len(list)-1]; !p.Ended || p.Stage != "done" || p.ID != done.Config.String() || p.Bytes != last.Size {
		t.Errorf("after the end: %+v", p)
	}
	log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil {
		t.Fatal(err)
	}
	slow := regexp.MustCompile(`msg="pull is slow".* bytes=\d+.* image="docker.io/cases/watched:1" layer="sha256:` + last.Digest.Encoded() + `".* left=\S+ percent=\d+ rate=\d+ stage=fetching`)
	if !slow.Match(log) {
		t.Errorf("the log does not tell of the slow pull")
	}
}

// watched looks at a running pull as somebody at a terminal does, and as a program
// does; both end when they are interrupted.
func (e *env) watched() {
	e.Helper()
	watch := filepath.Join(e.Bin, "berth") + " pulls --watch --socket " + e.Socket
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"script", "-qfec", watch, "/dev/null"}, `\x1b\[\dA\r\x1b\[Jdocker.io/cases/watched-base:1 [^\x1b]* all +\[#+-+\] +\d+% `},
		{append(strings.Fields(watch), "-o", "json"), `(?m)^\{"pulls":\[\{.*"stage":"fetching".*\}$`},
	} {
		cmd := exec.CommandContext(e.ctx, c.args[0], c.args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		var out output
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			e.Fatal(err)
		}
		e.eventually("the pull is shown by "+c.args[0], func() bool { return regexp.MustCompile(c.want).MatchString(out.String()) })
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil {
			e.Error(err)
		}
		if err := cmd.Wait(); err != nil && c.args[0] != "script" {
			e.Errorf("%v: %v", c.args, err)
		}
	}
}

// output is what a running program has written so far.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// A failed pull is shown with its reason, and without a daemon the tool says so.
func TestPullsThatFail(t *testing.T) {
	e := start(t, node.Options{})
	publish(t, "cases/fails", "1", ispec.ImageConfig{}, layer(t, images.File("f", 0o644, "f")))
	defer reg.Script(registry.Fault{Method: "GET", Path: "/blobs/", Status: 404, Times: 100})()
	if _, err := e.im.PullImage(e.ctx, pullRequest("docker.io/cases/fails:1")); err == nil {
		t.Fatal("a pull without blobs succeeds")
	}
	if list := e.pulls(); len(list) != 1 || list[0].Stage != "failed" || !strings.Contains(list[0].Error, "cases/fails") {
		t.Errorf("%+v", list)
	}
	if out, code := e.berth("pulls", "--socket", filepath.Join(e.Dir, "nobody.sock")); code != 1 || !strings.Contains(out, "does not answer") || !strings.Contains(out, "Unavailable") {
		t.Errorf("without a daemon: exit code %d, %s", code, out)
	}
	if out, code := e.berth("pulls", "--socket", e.Socket, "-o", "yaml"); code != 1 || !strings.Contains(out, `"yaml" is neither table nor json`) {
		t.Errorf("another output: exit code %d, %s", code, out)
	}
}
