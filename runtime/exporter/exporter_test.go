package exporter

import (
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

func scraped(t *testing.T, s *Server) string {
	t.Helper()
	reply, err := http.Get("http://" + s.Addr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(reply.Body)
	if err != nil || reply.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v: %s", reply.Status, err, body)
	}
	return string(body)
}

func listen(t *testing.T, m *Metrics) *Server {
	t.Helper()
	s, err := m.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// What was told and what is true is in a scrape, in base units.
func TestScrape(t *testing.T) {
	m := New("1.2.3", func() State {
		return State{Pulls: map[string]int{"pull": 2}, PullBytes: map[string]int64{"pull": 5e9}, Images: 3,
			ImageBytes: map[string]uint64{"layers": 7, "other": 8}, ImageFiles: 9, Pods: map[string]int{"ready": 4, "notready": 0},
			Containers: map[string]int{"running": 6}, Sessions: 1, MonitorUp: true,
			Operations: []Operation{{"RunPodSandbox", time.Now()}, {"RunPodSandbox", time.Now().Add(-time.Hour)}}}
	})
	m.RPC(RPC{Service: "runtime.v1.RuntimeService", Method: "Status", Code: "OK", Took: 2 * time.Second})
	m.RPC(RPC{Service: "runtime.v1.RuntimeService", Method: "GetContainerEvents", Code: "Canceled", Took: time.Hour, Stream: true})
	m.Step("RunPodSandbox", "network setup", 500*time.Millisecond)
	m.Pull(Pull{Op: "pull", Took: 3 * time.Second, Fetched: 2, Reused: 5, Resumed: 1, ResumedBytes: 1000})
	m.Pull(Pull{Op: "import", Took: time.Second, Reason: "no_space"})
	m.Preload("imported")
	text := scraped(t, listen(t, m))
	for _, want := range []string{
		`berth_build_info{version="1.2.3"} 1`,
		`berth_rpc_requests_total{code="OK",method="Status",service="runtime.v1.RuntimeService"} 1`,
		`berth_rpc_requests_total{code="Canceled",method="GetContainerEvents",service="runtime.v1.RuntimeService"} 1`,
		`berth_rpc_duration_seconds_sum{method="Status",service="runtime.v1.RuntimeService"} 2`,
		`berth_operation_step_duration_seconds_sum{step="network setup",verb="RunPodSandbox"} 0.5`,
		`berth_operations_running{verb="RunPodSandbox"} 2`,
		`berth_pulls_running{op="pull"} 2`,
		`berth_pull_bytes_total{op="pull"} 5e+09`,
		`berth_pull_duration_seconds_sum{op="pull",result="done"} 3`,
		`berth_pull_duration_seconds_count{op="import",result="failed"} 1`,
		`berth_pull_failures_total{op="import",reason="no_space"} 1`,
		`berth_pull_layers_total{how="reused",op="pull"} 5`,
		`berth_pull_layers_total{how="resumed",op="pull"} 1`,
		`berth_pull_resumed_bytes_total 1000`,
		`berth_preload_files_total{result="imported"} 1`,
		`berth_images 3`,
		`berth_image_store_bytes{kind="layers"} 7`,
		`berth_image_store_inodes 9`,
		`berth_pods{state="notready"} 0`,
		`berth_containers{state="running"} 6`,
		`berth_streaming_sessions 1`,
		`berth_monitor_up 1`,
		`# TYPE berth_pull_bytes_total counter`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is not in the scrape", want)
		}
	}
	for _, want := range []string{`(?m)^berth_operation_oldest_age_seconds\{verb="RunPodSandbox"\} 360\d`, `(?m)^go_goroutines \d`, `(?m)^process_resident_memory_bytes \d`} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("%s is not in the scrape", want)
		}
	}
	if strings.Contains(text, `duration_seconds_count{method="GetContainerEvents"`) {
		t.Error("a stream's length is counted as a duration")
	}
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{":9100": "127.0.0.1:9100", "0.0.0.0:1": "0.0.0.0:1", "[::1]:2": "[::1]:2", "9100": ""} {
		if got, err := Address(in); got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v", in, got, err)
		}
	}
}

// A server is on loopback, answers nothing else, says whose port it wants when
// that is taken, and ends although a client stays.
func TestServer(t *testing.T) {
	m := New("1", func() State { return State{} })
	s := listen(t, m)
	if host, _, _ := net.SplitHostPort(s.Addr()); host != "127.0.0.1" {
		t.Errorf("it listens on %s", s.Addr())
	}
	for path, want := range map[string]int{"/": 404, "/debug/pprof/": 404, "/metrics": 200} {
		reply, err := http.Get("http://" + s.Addr() + path)
		if err != nil {
			t.Fatal(err)
		}
		reply.Body.Close()
		if reply.StatusCode != want {
			t.Errorf("%s: %s", path, reply.Status)
		}
	}
	if _, err := m.Listen(s.Addr()); err == nil || !strings.Contains(err.Error(), s.Addr()) {
		t.Errorf("a second server: %v", err)
	}
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /metrics HT"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
