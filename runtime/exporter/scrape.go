package exporter

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// scrape makes metrics of a State.
type scrape struct{ state func() State }

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	pulls      = describe("berth_pulls_running", "Pulls and imports that run.", "op")
	pullBytes  = describe("berth_pull_bytes_total", "Bytes of layers fetched from registries and archives, mostly compressed.", "op")
	images     = describe("berth_images", "Images with a name or id.")
	imageBytes = describe("berth_image_store_bytes", "What images take on their filesystem.", "kind")
	imageFiles = describe("berth_image_store_inodes", "Inodes that images take on their filesystem.")
	pods       = describe("berth_pods", "Pod sandboxes.", "state")
	containers = describe("berth_containers", "Containers.", "state")
	operations = describe("berth_operations_running", "Operations that run.", "verb")
	oldest     = describe("berth_operation_oldest_age_seconds", "Age of the oldest operation that runs.", "verb")
	sessions   = describe("berth_streaming_sessions", "Open sessions of exec, attach and port-forward.")
	monitorUp  = describe("berth_monitor_up", "1 while the daemon is connected with berth-monitor.")
)

// Describe names what Collect gives.
func (scrape) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{pulls, pullBytes, images, imageBytes, imageFiles, pods, containers, operations, oldest, sessions, monitorUp} {
		to <- d
	}
}

// Collect asks for the state.
func (c scrape) Collect(to chan<- prometheus.Metric) {
	s := c.state()
	send := func(d *prometheus.Desc, value float64, labels ...string) {
		kind := prometheus.GaugeValue
		if d == pullBytes {
			kind = prometheus.CounterValue
		}
		to <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	sendAll(send, pulls, s.Pulls)
	sendAll(send, pullBytes, s.PullBytes)
	send(images, float64(s.Images))
	sendAll(send, imageBytes, s.ImageBytes)
	send(imageFiles, float64(s.ImageFiles))
	sendAll(send, pods, s.Pods)
	sendAll(send, containers, s.Containers)
	running, ages := map[string]int{}, map[string]float64{}
	for _, o := range s.Operations {
		running[o.Verb]++
		ages[o.Verb] = max(ages[o.Verb], time.Since(o.Began).Seconds())
	}
	sendAll(send, operations, running)
	sendAll(send, oldest, ages)
	send(sessions, float64(s.Sessions))
	up := 0.0
	if s.MonitorUp {
		up = 1
	}
	send(monitorUp, up)
}

// sendAll sends a value for each label.
func sendAll[N int | int64 | uint64 | float64](send func(*prometheus.Desc, float64, ...string), d *prometheus.Desc, values map[string]N) {
	for label, v := range values {
		send(d, float64(v), label)
	}
}
