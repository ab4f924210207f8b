// Package metrics names what was measured as cAdvisor names it, so that what a
// kubelet exports under /metrics/cadvisor is the same whichever source it uses.
//
// It owns the names, help texts, labels and units of metrics. It does not
// measure (runtime/stats) and does not know which pods exist (runtime).
//
// Terms: a descriptor says what a metric is called and which labels it has; a
// metric's label values are in the order of its descriptor. CRI's values are
// whole numbers, so what is counted in seconds is rounded down. A value that the
// kernel does not tell is missing.
//
// Files on disk: none.
package metrics

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/runtime/stats"
)

// baseLabels are the first labels of every metric, those of CRI's other
// runtimes; a metric's own follow.
var baseLabels = []string{"id", "image", "namespace", "pod", "container"}

// podContainer is the "container" label of what belongs to a whole pod, as
// cAdvisor has it for the pod's first process.
const podContainer = "POD"

// Pod names a pod.
type Pod struct{ ID, Namespace, Name string }

// Container is a container with what was measured of it.
type Container struct {
	ID, Image, Name string
	Started         time.Time
	Shares          uint64 // CPU shares as asked for, 0 for none

	Detail *stats.Detail
	Disk   stats.Filesystem // where writable layers are
	Seen   time.Time        // when it was measured
}

// Descriptors describes every metric there can be; always the same.
func Descriptors() []*cri.MetricDescriptor {
	var out []*cri.MetricDescriptor
	for _, m := range ofContainers {
		out = append(out, describe(m.name, m.help, m.labels...))
	}
	for _, m := range ofInterfaces {
		out = append(out, describe(m.name, m.help, "interface"))
	}
	return out
}

func describe(name, help string, labels ...string) *cri.MetricDescriptor {
	return &cri.MetricDescriptor{Name: name, Help: help, LabelKeys: withLabels(baseLabels, labels)}
}

// OfContainer are the metrics of a container of pod. The time of a metric is 0,
// which means now, but for what was measured behind.
func OfContainer(pod Pod, c *Container) []*cri.Metric {
	base := []string{c.ID, c.Image, pod.Namespace, pod.Name, c.Name}
	out := make([]*cri.Metric, 0, len(ofContainers)+8) // some have several values
	for i := range ofContainers {
		m := &ofContainers[i]
		m.values(c, func(value uint64, at time.Time, labels ...string) {
			metric := newMetric(m.name, value, withLabels(base, labels))
			if m.gauge {
				metric.MetricType = cri.MetricType_GAUGE
			}
			if !at.IsZero() {
				metric.Timestamp = at.UnixNano()
			}
			out = append(out, metric)
		})
	}
	return out
}

// OfNetwork are the metrics of a pod's interfaces; none for nil.
func OfNetwork(pod Pod, n *stats.Network) []*cri.Metric {
	if n == nil {
		return nil
	}
	base := []string{pod.ID, "", pod.Namespace, pod.Name, podContainer}
	var out []*cri.Metric
	for i := range n.Interfaces {
		labels := withLabels(base, []string{n.Interfaces[i].Name})
		for _, m := range ofInterfaces {
			out = append(out, newMetric(m.name, m.value(&n.Interfaces[i]), labels))
		}
	}
	return out
}

func newMetric(name string, value uint64, labels []string) *cri.Metric {
	return &cri.Metric{Name: name, MetricType: cri.MetricType_COUNTER, LabelValues: labels, Value: &cri.UInt64Value{Value: value}}
}

// withLabels is base itself where there are no more.
func withLabels(base, more []string) []string {
	if len(more) == 0 {
		return base
	}
	return append(base[:len(base):len(base)], more...)
}
