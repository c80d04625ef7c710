package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/jsm.go/api/jetstream/advisory"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/herdgate/herdgate/internal/bus"
)

// JetStream tells of deliveries that it gave up, and of such that a consumer ended
// by hand. Nobody else notices the first kind: the message stays in its stream and
// is never delivered again. The leader makes both visible. It keeps no place in
// the stream: the metric counts what happened while this process led.

// Kinds of stuck deliveries, as the metric names them.
const (
	stuckMaxDeliveries = "max_deliveries"
	stuckTerminated    = "msg_terminated"
)

const (
	// maxStuckSeries bounds the pairs of stream and consumer that the metric tells
	// apart: a consumer's name is anybody's to choose.
	maxStuckSeries = 64
	otherConsumer  = "other"
	maxReasonChars = 500
)

// stuckDeliveries counts stuck deliveries. One goroutine uses it at a time.
type stuckDeliveries struct {
	total *prometheus.CounterVec
	known map[[2]string]bool
}

func newStuckDeliveries() *stuckDeliveries {
	return &stuckDeliveries{
		known: map[[2]string]bool{},
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "herdgate", Subsystem: "admission", Name: "stuck_deliveries_total",
			Help: "messages whose delivery JetStream gave up (max_deliveries) or a consumer ended (msg_terminated), while this process led",
		}, []string{"stream", "consumer", "kind"}),
	}
}

func (d *stuckDeliveries) count(s stuck) {
	consumer := s.consumer
	if pair := [2]string{s.stream, consumer}; !d.known[pair] {
		if len(d.known) < maxStuckSeries {
			d.known[pair] = true
		} else {
			consumer = otherConsumer
		}
	}
	d.total.WithLabelValues(s.stream, consumer, s.kind).Inc()
}

// stuck is what an advisory says.
type stuck struct {
	kind, stream, consumer, reason string
	seq, deliveries                uint64
}

// readAdvisory reads an advisory; false is one of another kind.
func readAdvisory(data []byte) (stuck, bool, error) {
	var head struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return stuck{}, false, fmt.Errorf("not an advisory: %w", err)
	}
	switch head.Type {
	case "io.nats.jetstream.advisory.v1.max_deliver":
		var a advisory.ConsumerDeliveryExceededAdvisoryV1
		if err := json.Unmarshal(data, &a); err != nil {
			return stuck{}, false, fmt.Errorf("advisory of type %s: %w", head.Type, err)
		}
		return stuck{stuckMaxDeliveries, a.Stream, a.Consumer, "", a.StreamSeq, a.Deliveries}, true, nil
	case "io.nats.jetstream.advisory.v1.terminated":
		var a advisory.JSConsumerDeliveryTerminatedAdvisoryV1
		if err := json.Unmarshal(data, &a); err != nil {
			return stuck{}, false, fmt.Errorf("advisory of type %s: %w", head.Type, err)
		}
		return stuck{stuckTerminated, a.Stream, a.Consumer, cut(a.Reason, maxReasonChars), a.StreamSeq, a.Deliveries}, true, nil
	}
	return stuck{}, false, nil
}

func cut(s string, chars int) string {
	if r := []rune(s); len(r) > chars {
		return string(r[:chars]) + "…"
	}
	return s
}

// watchAdvisories counts and logs stuck deliveries until ctx is done. Whatever is
// wrong with the stream of advisories, the gate goes on without it.
func (r *reign) watchAdvisories(ctx context.Context) error {
	for {
		err := r.followAdvisories(ctx, r.s.bus.Names.AdvisoryStream())
		if ctx.Err() != nil {
			return nil
		}
		r.s.log.Warn().Err(err).Msg("stuck deliveries cannot be seen; the gate works without that, and looks again in a minute")
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Minute):
		}
	}
}

// followAdvisories reads what comes from now on.
func (r *reign) followAdvisories(ctx context.Context, stream string) error {
	look, done := context.WithTimeout(ctx, bus.WriteTimeout)
	defer done()
	info, err := r.s.bus.JS.Stream(look, stream)
	if err != nil {
		return fmt.Errorf("stream %s: %w", stream, bus.Classify(err))
	}
	return r.s.bus.Watch(ctx, bus.Watch{Stream: stream, StartSeq: info.CachedInfo().State.LastSeq + 1}, func(m bus.Message, _ uint64) error {
		s, ok, err := readAdvisory(m.Data)
		switch {
		case err != nil:
			r.s.log.Warn().Err(err).Str("stream", stream).Uint64("seq", m.Seq).Str("subject", m.Subject).Msg("an advisory cannot be read; ignored")
		case ok:
			r.s.metrics.stuck.count(s)
			r.s.log.Error().Str("kind", s.kind).Str("stream", s.stream).Str("consumer", s.consumer).Uint64("seq", s.seq).
				Uint64("deliveries", s.deliveries).Str("reason", s.reason).Msg("a delivery is stuck: the message is not delivered again")
		}
		return nil
	})
}
