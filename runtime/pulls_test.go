package runtime

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"berth/image"
	"berth/runtime/exporter"
)

// halfway is a pull under way.
func halfway(began time.Time) image.Progress {
	return image.Progress{Op: "pull", Image: "docker.io/library/app:1", Began: began, Stage: image.StageFetching, Bytes: 60, Total: 200, Rate: 7,
		Layers: []image.LayerProgress{
			{Blob: "sha256:a", Stage: image.StageReused, Total: 1000},
			{Blob: "sha256:b", Stage: image.StageDone, Bytes: 50, Total: 50},
			{Blob: "sha256:c", Stage: image.StageFetching, Bytes: 10, Total: 100, Rate: 7, Resumed: 4},
			{Blob: "sha256:d", Stage: image.StageWaiting, Total: 50},
		}}
}

func TestDescribePull(t *testing.T) {
	now := time.Now()
	p := describePull(halfway(now.Add(-30*time.Second)), now)
	if p.Seconds != 30 || p.Ended || *p.Left != 20 || len(p.Layers) != 4 || p.Layers[3].Left != nil || p.Layers[2].Resumed != 4 || *p.Layers[2].Left < 12 {
		t.Errorf("under way: %+v", p)
	}
	over := halfway(now.Add(-time.Minute))
	over.Ended, over.Stage, over.Err = now.Add(-50*time.Second), image.StageFailed, errors.New("it failed")
	if p := describePull(over, now); p.Seconds != 10 || !p.Ended || p.Error != "it failed" {
		t.Errorf("at its end: %+v", p)
	}
}

// The line of a slow pull has what an operator asks first.
func TestLogOfASlowPull(t *testing.T) {
	var b bytes.Buffer
	logger := logrus.New()
	logger.SetOutput(&b)
	s := &Service{Parts: Parts{Log: logrus.NewEntry(logger)}}
	now := time.Now()
	p := halfway(now.Add(-30 * time.Second))
	s.logSlowPull(&p, now)
	for _, want := range []string{`msg="pull is slow"`, `image="docker.io/library/app:1"`, "for=30s", "bytes=60", "total=200", "percent=30", "rate=7", "left=20s",
		`layer="sha256:c"`, "layerStage=fetching", "layerBytes=10", "layerTotal=100"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q has no %s", b.String(), want)
		}
	}
	b.Reset()
	s.logSlowPull(&image.Progress{Op: "import", Began: now, Stage: image.StageResolving}, now)
	if text := b.String(); !strings.Contains(text, "import is slow") || strings.Contains(text, "percent") || strings.Contains(text, "left") || strings.Contains(text, "layer=") {
		t.Errorf("of a pull that resolves: %q", text)
	}
}

// A pull's layers are counted by how they came.
func TestPullsAreCounted(t *testing.T) {
	s := &Service{metrics: exporter.New("1", func() exporter.State { return exporter.State{} })}
	p := halfway(time.Now())
	p.Ended = p.Began.Add(2 * time.Second)
	s.pullEnded(p)
	p.Err = image.ErrNoSpace
	s.pullEnded(p)
	server, err := s.metrics.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	reply, err := http.Get("http://" + server.Addr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`berth_pull_layers_total{how="reused",op="pull"} 1`, `berth_pull_layers_total{how="fetched",op="pull"} 2`,
		`berth_pull_layers_total{how="resumed",op="pull"} 1`, `berth_pull_resumed_bytes_total 4`,
		`berth_pull_duration_seconds_sum{op="pull",result="done"} 2`, `berth_pull_failures_total{op="pull",reason="no_space"} 1`,
	} {
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("%s is not in the scrape", want)
		}
	}
}
