package eventsink

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/telemetry"
)

// trace makes one span for a batch, with a link to the newest event of each trace in
// it. It is in a trace of its own, for a batch belongs to no run. It is recorded where
// one of those traces is; a batch without any has no span.
func (ss *session) trace(ctx context.Context, batch []item, start time.Time) {
	newest := map[trace.TraceID]trace.Link{}
	var order []trace.TraceID
	events := 0
	for i := range batch {
		it := &batch[i]
		if it.verdict != store {
			continue
		}
		events++
		link, ok := telemetry.LinkTo(it.traceParent, it.traceState)
		if !ok || !link.SpanContext.IsSampled() {
			continue
		}
		id := link.SpanContext.TraceID()
		if _, known := newest[id]; !known {
			order = append(order, id)
		}
		newest[id] = link
	}
	if len(order) == 0 {
		return
	}
	links := make([]trace.Link, len(order))
	for i, id := range order {
		links[i] = newest[id]
	}
	template := telemetry.EventTemplate(ss.bus.Names.Prefix())
	_, span := ss.tracer.Start(ctx, "process "+template,
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer), trace.WithTimestamp(start), trace.WithLinks(links...),
		trace.WithAttributes(
			telemetry.AttrMessagingSystem.String(telemetry.MessagingSystem),
			telemetry.AttrMessagingTemplate.String(template),
			telemetry.AttrMessagingOperation.String("process"),
			telemetry.AttrMessagingOperationType.String("process"),
			telemetry.AttrMessagingConsumer.String(ss.bus.Names.SinkConsumer()),
			telemetry.AttrMessagingBatchCount.Int(events),
		))
	span.End()
}

// metrics are the sink's figures.
type metrics struct {
	stored, duplicates, skipped, dead, redelivered, retries, restarts prometheus.Counter
	batch, duration                                                   prometheus.Histogram
	pruned                                                            prometheus.Counter
	lag                                                               prometheus.Collector
}

func newMetrics(lag func() (events, seconds float64, ok bool)) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: "herdgate", Subsystem: "eventsink", Name: name, Help: help})
	}
	return &metrics{
		stored:      counter("events_stored_total", "Events that were stored, each counted once."),
		duplicates:  counter("events_duplicate_total", "Events that were stored already."),
		skipped:     counter("events_skipped_total", "Events of types that this version does not know."),
		dead:        counter("events_dead_total", "Events that cannot be stored."),
		redelivered: counter("redeliveries_total", "Messages that came again while they were being stored."),
		retries:     counter("store_retries_total", "Writes that failed and were tried again."),
		restarts:    counter("restarts_total", "How often reading the event stream was interrupted."),
		batch: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "herdgate", Subsystem: "eventsink", Name: "batch_events", Help: "Events in a batch.",
			Buckets: []float64{1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000},
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "herdgate", Subsystem: "eventsink", Name: "batch_seconds", Help: "Time to store a batch.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}),
		pruned: counter("events_pruned_total", "Stored events that were deleted because of their age."),
		lag: &lagGauge{
			events:  prometheus.NewDesc("herdgate_eventsink_pending", "Events in the stream that are not stored yet. Missing while the server cannot be asked.", nil, nil),
			seconds: prometheus.NewDesc("herdgate_eventsink_lag_seconds", "Age of the oldest event that is not stored yet; 0 if all are.", nil, nil),
			ask:     lag,
		},
	}
}

func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.stored, m.duplicates, m.skipped, m.dead, m.redelivered, m.retries, m.restarts, m.batch, m.duration, m.pruned, m.lag}
}

// lagGauge asks the server when metrics are read.
type lagGauge struct {
	events, seconds *prometheus.Desc
	ask             func() (events, seconds float64, ok bool)
}

func (g *lagGauge) Describe(ch chan<- *prometheus.Desc) {
	ch <- g.events
	ch <- g.seconds
}

func (g *lagGauge) Collect(ch chan<- prometheus.Metric) {
	if events, seconds, ok := g.ask(); ok {
		ch <- prometheus.MustNewConstMetric(g.events, prometheus.GaugeValue, events)
		ch <- prometheus.MustNewConstMetric(g.seconds, prometheus.GaugeValue, seconds)
	}
}
