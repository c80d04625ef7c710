package httpapi

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	open  prometheus.Gauge
	ended *prometheus.CounterVec
}

func newMetrics() metrics {
	return metrics{
		open: prometheus.NewGauge(prometheus.GaugeOpts{Name: "herdgate_lead_event_streams", Help: "Event streams that are open."}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "herdgate_lead_event_streams_ended_total",
			Help: "Event streams that have ended, by reason: finished, left, slow (the reader took nothing for too long), stopping, unavailable, error.",
		}, []string{"reason"}),
	}
}

// Collectors are its metrics.
func (s *Server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.metrics.open, s.metrics.ended}
}
