// Package exporter has the daemon's own metrics and serves them to Prometheus.
//
// It owns their names (berth_*, after Prometheus' conventions: base units, _total
// for what only grows), what they count, and the HTTP server. It does not own what
// pods and containers use: that is CRI's business (packages stats and metrics). It
// knows nothing of the runtime: events are told to it, and at a scrape it asks for a
// State, which must come from memory.
//
// Terms: an operation is one of the runtime's long ones, which outlive their callers
// (package operation); an RPC is one call of a client.
//
// Files on disk: none.
package exporter

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// State is what is true at the time of a scrape.
type State struct {
	Pulls      map[string]int   // running ones, by op: pull, import
	PullBytes  map[string]int64 // fetched since the start, by op
	Images     int
	ImageBytes map[string]uint64 // on disk, by kind: layers, resumable, other
	ImageFiles uint64            // inodes
	Pods       map[string]int    // by state
	Containers map[string]int    // by state
	Operations []Operation
	Sessions   int // exec, attach and port-forward
	MonitorUp  bool
}

// Operation is one that runs.
type Operation struct {
	Verb  string
	Began time.Time
}

// Metrics are all metrics. Its methods may be called at the same time.
type Metrics struct {
	registry *prometheus.Registry

	rpcs        *prometheus.CounterVec
	rpcSeconds  *prometheus.HistogramVec
	steps       *prometheus.HistogramVec
	pullSeconds *prometheus.HistogramVec
	failures    *prometheus.CounterVec
	layers      *prometheus.CounterVec
	resumed     prometheus.Counter
	preloads    *prometheus.CounterVec
}

// New makes metrics at zero; state is asked at each scrape and must not block.
func New(version string, state func() State) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.registry.MustRegister(v)
		return v
	}
	histogram := func(name, help string, from float64, labels ...string) *prometheus.HistogramVec {
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(from, 3, 10)}, labels)
		m.registry.MustRegister(v)
		return v
	}
	m.rpcs = counter("berth_rpc_requests_total", "Calls that were answered.", "service", "method", "code")
	m.rpcSeconds = histogram("berth_rpc_duration_seconds", "How long calls took that answer once.", 0.0005, "service", "method")
	m.steps = histogram("berth_operation_step_duration_seconds", "How long the steps of operations took.", 0.0005, "verb", "step")
	m.pullSeconds = histogram("berth_pull_duration_seconds", "How long pulls and imports took.", 0.1, "op", "result")
	m.failures = counter("berth_pull_failures_total", "Pulls and imports that failed.", "op", "reason")
	m.layers = counter("berth_pull_layers_total", "Layers of pulls and imports that ended well.", "op", "how")
	m.resumed = counter("berth_pull_resumed_bytes_total", "Bytes that pulls had from an earlier try.").WithLabelValues()
	m.preloads = counter("berth_preload_files_total", "Archives of the preload directory that were tried.", "result")

	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "berth_build_info", Help: "Always 1."}, []string{"version"})
	info.WithLabelValues(version).Set(1)
	m.registry.MustRegister(info, scrape{state}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// RPC is a call that was answered.
type RPC struct {
	Service, Method, Code string
	Took                  time.Duration
	Stream                bool // it lasts as long as its client likes
}

// RPC counts a call.
func (m *Metrics) RPC(r RPC) {
	m.rpcs.WithLabelValues(r.Service, r.Method, r.Code).Inc()
	if !r.Stream {
		m.rpcSeconds.WithLabelValues(r.Service, r.Method).Observe(r.Took.Seconds())
	}
}

// Step counts a step of an operation.
func (m *Metrics) Step(verb, step string, took time.Duration) {
	m.steps.WithLabelValues(verb, step).Observe(took.Seconds())
}

// Pull is a pull or an import that has ended.
type Pull struct {
	Op     string // pull, import
	Reason string // of its failure; empty: it went well
	Took   time.Duration
	// Of one that went well.
	Fetched, Reused, Resumed int   // layers; resumed ones are not among the fetched
	ResumedBytes             int64 // that were there from an earlier try
}

// Pull counts a pull or an import.
func (m *Metrics) Pull(p Pull) {
	if p.Reason != "" {
		m.pullSeconds.WithLabelValues(p.Op, "failed").Observe(p.Took.Seconds())
		m.failures.WithLabelValues(p.Op, p.Reason).Inc()
		return
	}
	m.pullSeconds.WithLabelValues(p.Op, "done").Observe(p.Took.Seconds())
	m.layers.WithLabelValues(p.Op, "fetched").Add(float64(p.Fetched))
	m.layers.WithLabelValues(p.Op, "reused").Add(float64(p.Reused))
	m.layers.WithLabelValues(p.Op, "resumed").Add(float64(p.Resumed))
	m.resumed.Add(float64(p.ResumedBytes))
}

// Preload counts an archive of the preload directory: imported or failed.
func (m *Metrics) Preload(result string) { m.preloads.WithLabelValues(result).Inc() }
