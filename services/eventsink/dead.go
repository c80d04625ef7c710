package eventsink

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
)

// buryTimeout bounds the attempts to send one dead letter.
const buryTimeout = 10 * time.Second

// bury sends a message to the dead letters. The message is still in the event
// stream, so a dead letter that cannot be sent for a while is told in the log
// and does not hold up the events behind it; only a lost connection does.
func (ss *session) bury(ctx context.Context, it *item) error {
	ctx, cancel := context.WithTimeout(ctx, buryTimeout)
	defer cancel()
	m := bus.Message{Subject: it.subject, Seq: it.seq, Data: it.msg.Data(), Header: maps.Clone(it.msg.Headers())}
	if m.Header == nil {
		m.Header = nats.Header{}
	}
	m.Header.Set(bus.HeaderDeliveries, strconv.FormatUint(it.deliveries, 10))
	log := ss.log.Warn().Str("subject", clip(it.subject, 300)).Uint64("seq", it.seq).Str("reason", bus.HeaderText(it.reason))
	retry := newBackOff()
	for {
		err := ss.bus.Bury(ctx, "eventsink", ss.bus.Names.EventStream(), m, errors.New(it.reason))
		switch {
		case err == nil:
			ss.metrics.dead.Inc()
			log.Msg("an event cannot be stored and went to the dead letters")
			return nil
		case !ss.bus.NC.IsConnected() || ss.bus.NC.Stats().Reconnects != ss.reconnects:
			return errReconnected
		}
		if errors.Is(err, bus.ErrTooLarge) || pause.For(ctx, retry.NextBackOff()) != nil {
			ss.metrics.dead.Inc()
			log.AnErr("dead_letter_error", err).Msg("an event cannot be stored, and not be sent to the dead letters; it stays in the event stream")
			return nil
		}
	}
}

// record collects the records of items.
func record(rows []*item) []contract.EventRecord {
	out := make([]contract.EventRecord, len(rows))
	for i, it := range rows {
		out[i] = it.record
	}
	return out
}
