package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/pkg/envelope"
)

// Headers of a dead letter. Its body is the message as it came.
const (
	HeaderReason        = "Herdgate-Reason"
	HeaderOriginSubject = "Herdgate-Origin-Subject"
	HeaderOriginStream  = "Herdgate-Origin-Stream"
	HeaderOriginSeq     = "Herdgate-Origin-Seq"
	// HeaderOmitted is the size of a body that was left out because the letter
	// would be too large, in bytes.
	HeaderOmitted = "Herdgate-Body-Omitted"
	// HeaderDeliveries is how often the message had been delivered, where a
	// consumer delivered it.
	HeaderDeliveries = "Herdgate-Deliveries"
)

// kept are the headers of a message that its dead letter has as well.
var kept = []string{envelope.HeaderTraceParent, envelope.HeaderTraceState, envelope.HeaderContentType, HeaderDeliveries}

// maxReasonBytes bounds the reason of a dead letter.
const maxReasonBytes = 1000

// Bury keeps a message of stream that origin, a service, can never use, with the
// reason and its trace. Burying it again soon stores nothing.
func (c *Conn) Bury(ctx context.Context, origin, stream string, m Message, reason error) error {
	seq := strconv.FormatUint(m.Seq, 10)
	w := Write{
		Subject: c.Names.Dead(origin), Data: m.Data, MsgID: origin + "/" + stream + "/" + seq,
		Header: nats.Header{
			HeaderReason: {HeaderText(reason.Error())}, HeaderOriginSubject: {HeaderText(m.Subject)},
			HeaderOriginStream: {stream}, HeaderOriginSeq: {seq},
		},
	}
	for _, h := range kept {
		if v := HeaderText(m.Header.Get(h)); v != "" { // anybody's, and as long as they like
			w.Header.Set(h, v)
		}
	}
	_, err := c.Publish(ctx, w)
	if errors.Is(err, ErrTooLarge) && len(w.Data) > 0 {
		w.Header.Set(HeaderOmitted, strconv.Itoa(len(w.Data)))
		w.Data = nil
		_, err = c.Publish(ctx, w)
	}
	if err != nil {
		return fmt.Errorf("dead letter: %w", err)
	}
	return nil
}

// HeaderText makes text fit for a header: one line, bounded.
func HeaderText(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\ufffd"))
	if len(s) > maxReasonBytes {
		s = strings.ToValidUTF8(s[:maxReasonBytes], "") + "…"
	}
	return strings.TrimSpace(s)
}
