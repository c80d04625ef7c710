package executor

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	running prometheus.Gauge
	claimed prometheus.Counter
	ended   *prometheus.CounterVec
	fenced  prometheus.Counter
	stalled prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		running: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "herdgate", Subsystem: "executor", Name: "tasks_running", Help: "tasks being worked on"}),
		claimed: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "claims_total", Help: "grants claimed"}),
		ended:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "ends_total", Help: "ends written, by state"}, []string{"state"}),
		fenced:  prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "fenced_total", Help: "attempts that lost their lease or their record"}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "stalled_total", Help: "attempts that were stopped because nothing happened in them"}),
	}
	if reg != nil {
		reg.MustRegister(m.running, m.claimed, m.ended, m.fenced, m.stalled)
	}
	return m
}
