package eventsink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Headers of a dead letter. Its body is the message as it came, unless it is
// too large to be sent on; the stream still has it for a while.
const (
	HeaderReason        = "Herdgate-Reason"
	HeaderOriginSubject = "Herdgate-Origin-Subject"
	HeaderOriginStream  = "Herdgate-Origin-Stream"
	HeaderOriginSeq     = "Herdgate-Origin-Seq"
	HeaderDeliveries    = "Herdgate-Deliveries"
	// HeaderOmitted is the size of a body that was left out, in bytes.
	HeaderOmitted = "Herdgate-Body-Omitted"
)

// maxReason bounds the reason of a dead letter, in bytes.
const maxReason = 1000

// buryTimeout bounds the attempts to send one dead letter.
const buryTimeout = 10 * time.Second

// bury sends a message to the dead letters. The message is still in the event
// stream, so a dead letter that cannot be sent for a while is told in the log
// and does not hold up the events behind it; only a lost connection does.
func (ss *session) bury(ctx context.Context, it *item) error {
	ctx, cancel := context.WithTimeout(ctx, buryTimeout)
	defer cancel()
	w := bus.Write{
		Subject: ss.bus.Names.Dead("eventsink"),
		Data:    it.msg.Data(),
		Header: nats.Header{
			HeaderReason:        {headerText(it.reason, maxReason)},
			HeaderOriginSubject: {headerText(it.subject, maxReason)},
			HeaderOriginStream:  {ss.bus.Names.EventStream()},
			HeaderOriginSeq:     {strconv.FormatUint(it.seq, 10)},
			HeaderDeliveries:    {strconv.FormatUint(it.deliveries, 10)},
		},
		MsgID: fmt.Sprintf("eventsink/%s/%d", ss.bus.Names.EventStream(), it.seq),
	}
	for _, h := range []string{envelope.HeaderTraceParent, envelope.HeaderTraceState, envelope.HeaderContentType} {
		if v := it.msg.Headers().Get(h); v != "" {
			w.Header.Set(h, v)
		}
	}
	log := ss.log.Warn().Str("subject", clip(it.subject, 300)).Uint64("seq", it.seq).Str("reason", headerText(it.reason, maxReason))
	retry := newBackOff()
	for {
		_, err := ss.bus.Publish(ctx, w)
		switch {
		case err == nil:
			ss.metrics.dead.Inc()
			log.Msg("an event cannot be stored and went to the dead letters")
			return nil
		case errors.Is(err, bus.ErrTooLarge) && len(w.Data) > 0:
			w.Header.Set(HeaderOmitted, strconv.Itoa(len(w.Data)))
			w.Data = nil
			continue
		case !ss.bus.NC.IsConnected() || ss.bus.NC.Stats().Reconnects != ss.reconnects:
			return errReconnected
		}
		if errors.Is(err, bus.ErrTooLarge) || !sleep(ctx, retry.NextBackOff()) {
			ss.metrics.dead.Inc()
			log.AnErr("dead_letter_error", err).Msg("an event cannot be stored, and not be sent to the dead letters; it stays in the event stream")
			return nil
		}
	}
}

// headerText makes s fit into one header line.
func headerText(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	return strings.TrimSpace(clip(s, limit))
}

// record collects the records of items.
func record(rows []*item) []contract.EventRecord {
	out := make([]contract.EventRecord, len(rows))
	for i, it := range rows {
		out[i] = it.record
	}
	return out
}
