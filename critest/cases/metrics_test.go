package cases

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// scrape reads a daemon's metrics as Prometheus would: series → value.
func (e *env) scrape() map[string]float64 {
	e.Helper()
	log, err := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if err != nil {
		e.Fatal(err)
	}
	said := regexp.MustCompile(`msg="serving metrics" address="(\S+)"`).FindSubmatch(log)
	if said == nil {
		e.Fatal("the log does not tell the address of the metrics")
	}
	reply, err := http.Get("http://" + string(said[1]) + "/metrics")
	if err != nil {
		e.Fatal(err)
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(reply.Body)
	if err != nil || reply.StatusCode != http.StatusOK || !strings.HasPrefix(reply.Header.Get("Content-Type"), "text/plain") {
		e.Fatalf("scrape: %s, %v", reply.Status, err)
	}
	values := map[string]float64{}
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndex(line, " ")
		v, err := strconv.ParseFloat(strings.TrimSpace(line[at+1:]), 64)
		if err != nil {
			e.Fatalf("scrape: %q: %v", line, err)
		}
		values[line[:at]] = v
	}
	return values
}

// Metrics tell what the daemon does and has done.
func TestMetrics(t *testing.T) {
	e := start(t, node.Options{Settings: map[string]string{"metrics": `address = ":0"`}})
	before := e.scrape()
	for series, want := range map[string]float64{`berth_monitor_up`: 1, `berth_images`: 0, `berth_pods{state="ready"}`: 0, `berth_containers{state="running"}`: 0,
		`berth_pulls_running{op="pull"}`: 0, `berth_pull_bytes_total{op="pull"}`: 0} {
		if got, ok := before[series]; !ok || got != want {
			t.Errorf("at first %s is %v (%v), want %v", series, got, ok, want)
		}
	}
	done := publish(t, "cases/metrics", "1", ispec.ImageConfig{Cmd: []string{"sh"}}, layer(t, images.File("f", 0o644, noise(10_000))))
	e.pull("docker.io/cases/metrics:1")
	if _, err := e.im.PullImage(e.ctx, pullRequest("docker.io/cases/metrics:none")); err == nil {
		t.Fatal("an image that is not there was pulled")
	}
	config := e.sandbox()
	pod := e.run(config)
	c := command("c", "sleep 1000")
	c.Image = &cri.ImageSpec{Image: done.Config.String()}
	e.startContainer(pod, c, config)
	after := e.scrape()
	for series, want := range map[string]float64{
		`berth_images`: 1, `berth_pods{state="ready"}`: 1, `berth_pods{state="notready"}`: 0, `berth_containers{state="running"}`: 1,
		`berth_pull_duration_seconds_count{op="pull",result="done"}`: 1, `berth_pull_failures_total{op="pull",reason="not_found"}`: 1,
		`berth_pull_layers_total{how="fetched",op="pull"}`:                                               2,
		`berth_rpc_requests_total{code="OK",method="RunPodSandbox",service="runtime.v1.RuntimeService"}`: 1,
		`berth_rpc_requests_total{code="NotFound",method="PullImage",service="runtime.v1.ImageService"}`: 1,
		`berth_rpc_duration_seconds_count{method="StartContainer",service="runtime.v1.RuntimeService"}`:  1,
		`berth_operation_step_duration_seconds_count{step="network setup",verb="RunPodSandbox"}`:         1,
	} {
		if got, ok := after[series]; !ok || got != want {
			t.Errorf("%s is %v (%v), want %v", series, got, ok, want)
		}
	}
	for _, series := range []string{`berth_pull_bytes_total{op="pull"}`, `berth_image_store_bytes{kind="layers"}`} {
		if after[series] < 10_000 {
			t.Errorf("%s is %v, less than the layer", series, after[series])
		}
	}
	for _, series := range []string{"go_goroutines", "process_open_fds", "process_resident_memory_bytes"} {
		if after[series] == 0 {
			t.Errorf("%s is missing", series)
		}
	}
	e.eventually("metrics and ImageFsInfo agree", func() bool {
		s := e.scrape()
		usage, err := e.im.ImageFsInfo(e.ctx, &cri.ImageFsInfoRequest{})
		return err == nil && uint64(s[`berth_image_store_bytes{kind="layers"}`]+s[`berth_image_store_bytes{kind="resumable"}`]+s[`berth_image_store_bytes{kind="other"}`]) == usage.GetImageFilesystems()[0].GetUsedBytes().GetValue()
	})
}
