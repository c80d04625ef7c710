package run

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts what the engine does.
type metrics struct {
	active    prometheus.Gauge
	takeovers prometheus.Counter
	ended     *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (metrics, error) {
	m := metrics{
		active:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "herdgate_lead_runs_active", Help: "Runs that this lead drives at the moment."}),
		takeovers: prometheus.NewCounter(prometheus.CounterOpts{Name: "herdgate_lead_takeovers_total", Help: "Runs that this lead took over from another one."}),
		ended:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "herdgate_lead_runs_ended_total", Help: "Runs that this lead ended, by status."}, []string{"status"}),
	}
	if r == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.active, m.takeovers, m.ended} {
		if err := r.Register(c); err != nil {
			return m, fmt.Errorf("run: metrics: %w", err)
		}
	}
	return m, nil
}
