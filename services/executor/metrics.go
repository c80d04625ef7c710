package executor

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	running prometheus.Gauge
	claimed prometheus.Counter
	ended   *prometheus.CounterVec
	fenced  prometheus.Counter
	stalled prometheus.Counter
	panics  prometheus.Counter
	dead    prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		running: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "herdgate", Subsystem: "executor", Name: "tasks_running", Help: "tasks being worked on"}),
		claimed: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "claims_total", Help: "grants claimed"}),
		ended:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "ends_total", Help: "ends written, by state"}, []string{"state"}),
		fenced:  prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "fenced_total", Help: "attempts that lost their lease or their record"}),
		stalled: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "stalled_total", Help: "attempts that were stopped because nothing happened in them"}),
		panics:  prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "panics_total", Help: "panics that were caught in the handling of a grant or in an attempt"}),
		dead:    prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "executor", Name: "dead_letters_total", Help: "grants that could not be used"}),
	}
	if reg != nil {
		reg.MustRegister(m.running, m.claimed, m.ended, m.fenced, m.stalled, m.panics, m.dead)
	}
	return m
}
