package admission

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

type metrics struct {
	since                                         time.Time
	leader, oldest                                prometheus.Gauge
	running, queued, capacity                     *prometheus.GaugeVec
	refusals                                      *prometheus.CounterVec
	grants, lost, fenced, takeovers, dead, panics prometheus.Counter
	grantSeconds                                  prometheus.Histogram
	stuck                                         *stuckDeliveries
}

func newMetrics(reg prometheus.Registerer, now time.Time) *metrics {
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: "herdgate", Subsystem: "admission", Name: name, Help: help}
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "admission", Name: name, Help: help})
	}
	m := &metrics{
		since:     now,
		leader:    prometheus.NewGauge(gauge("leader", "1 while this process leads the gate")),
		oldest:    prometheus.NewGauge(gauge("oldest_queued_timestamp_seconds", "when the task that waits longest was queued; 0 when none waits")),
		running:   prometheus.NewGaugeVec(gauge("slots_in_use", "slots held by tasks"), []string{"pool"}),
		capacity:  prometheus.NewGaugeVec(gauge("slots", "slots there are"), []string{"pool"}),
		queued:    prometheus.NewGaugeVec(gauge("queue_length", "tasks waiting for a slot"), []string{"pool"}),
		grants:    counter("grants_total", "grants sent"),
		lost:      counter("executor_lost_total", "attempts whose lease ran out"),
		fenced:    counter("fence_rejections_total", "writes refused because the leader key had moved"),
		takeovers: counter("takeovers_total", "reigns begun"),
		dead:      counter("dead_letters_total", "messages that could not be used"),
		panics:    counter("panics_total", "panics that were caught while a request was handled"),
		stuck:     newStuckDeliveries(),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "herdgate", Subsystem: "admission", Name: "refusals_total", Help: "tasks ended instead of granted, by error code",
		}, []string{"code"}),
		grantSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "herdgate", Subsystem: "admission", Name: "grant_seconds", Help: "time from the record of a grant to its message",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}),
	}
	if reg != nil {
		reg.MustRegister(m.leader, m.oldest, m.running, m.capacity, m.queued, m.grants, m.lost, m.fenced, m.takeovers, m.dead, m.panics, m.refusals, m.grantSeconds, m.stuck.total)
	}
	return m
}

// observe sets the gauges to what the leader's gate holds; nil is a standby.
func (m *metrics) observe(g *gate.Gate) {
	if g == nil {
		m.leader.Set(0)
		m.oldest.Set(0)
		m.running.Reset()
		m.capacity.Reset()
		m.queued.Reset()
		return
	}
	m.leader.Set(1)
	oldest := time.Time{}
	for p := range g.Use() {
		pool := string(p.Name)
		m.running.WithLabelValues(pool).Set(float64(p.Running))
		m.capacity.WithLabelValues(pool).Set(float64(p.MaxRunning))
		m.queued.WithLabelValues(pool).Set(float64(p.Queued))
		if p.Oldest != nil && (oldest.IsZero() || p.Oldest.QueuedAt.Before(oldest)) {
			oldest = p.Oldest.QueuedAt
		}
	}
	if oldest.IsZero() {
		m.oldest.Set(0)
		return
	}
	m.oldest.Set(float64(oldest.UnixMilli()) / 1e3)
}

// totals are the counters as the status tells them.
func (m *metrics) totals() admissionapi.Totals {
	value := func(c prometheus.Counter) int {
		var d dto.Metric
		if err := c.Write(&d); err != nil {
			return 0 // a counter can always be read
		}
		return int(d.GetCounter().GetValue())
	}
	t := admissionapi.Totals{
		Since: m.since.UTC(), Grants: value(m.grants), Expiries: value(m.lost), FenceRejections: value(m.fenced), Takeovers: value(m.takeovers),
	}
	for _, code := range refusalCodes {
		if n := value(m.refusals.WithLabelValues(string(code))); n > 0 {
			if t.Refusals == nil {
				t.Refusals = map[contract.ErrorCode]int{}
			}
			t.Refusals[code] = n
		}
	}
	return t
}

// refusalCodes are what a task can end with instead of a grant.
var refusalCodes = []contract.ErrorCode{contract.ErrQueueFull, contract.ErrQueueTimeout, contract.ErrInvalidRequest, contract.ErrPolicyDenied, contract.ErrInternal}
