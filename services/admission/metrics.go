package admission

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/herdgate/herdgate/services/admission/gate"
)

type metrics struct {
	leader, running, queued               prometheus.Gauge
	grants, lost, fenced, takeovers, dead prometheus.Counter
	grantSeconds                          prometheus.Histogram
	stuck                                 *stuckDeliveries
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "herdgate", Subsystem: "admission", Name: name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "admission", Name: name, Help: help})
	}
	m := &metrics{
		leader:    gauge("leader", "1 while this process leads the gate"),
		running:   gauge("slots_in_use", "slots held by tasks"),
		queued:    gauge("queue_length", "tasks waiting for a slot"),
		grants:    counter("grants_total", "grants sent"),
		lost:      counter("executor_lost_total", "attempts whose lease ran out"),
		fenced:    counter("fence_rejections_total", "writes refused because the leader key had moved"),
		takeovers: counter("takeovers_total", "reigns begun"),
		dead:      counter("dead_letters_total", "messages that could not be used"),
		stuck:     newStuckDeliveries(),
		grantSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "herdgate", Subsystem: "admission", Name: "grant_seconds", Help: "time from the record of a grant to its message",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}),
	}
	if reg != nil {
		reg.MustRegister(m.leader, m.running, m.queued, m.grants, m.lost, m.fenced, m.takeovers, m.dead, m.grantSeconds, m.stuck.total)
	}
	return m
}

// observe sets the gauges to what the leader's gate holds; nil is a standby.
func (m *metrics) observe(g *gate.Gate) {
	leader, running, queued := 0, 0, 0
	if g != nil {
		leader = 1
		running, queued = g.Counts()
	}
	m.leader.Set(float64(leader))
	m.running.Set(float64(running))
	m.queued.Set(float64(queued))
}
