package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/nats-io/nats.go"
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
)

// maxReasonBytes bounds the reason of a dead letter.
const maxReasonBytes = 1000

// Bury keeps a message of stream that origin, a service, can never use, with the
// reason. Burying it again soon stores nothing.
func (c *Conn) Bury(ctx context.Context, origin, stream string, m Message, reason error) error {
	seq := strconv.FormatUint(m.Seq, 10)
	w := Write{
		Subject: c.Names.Dead(origin), Data: m.Data, MsgID: origin + "/" + stream + "/" + seq,
		Header: nats.Header{
			HeaderReason: {headerText(reason.Error())}, HeaderOriginSubject: {headerText(m.Subject)},
			HeaderOriginStream: {stream}, HeaderOriginSeq: {seq},
		},
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

// headerText makes text fit for a header: one line, bounded.
func headerText(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\ufffd"))
	if len(s) > maxReasonBytes {
		s = strings.ToValidUTF8(s[:maxReasonBytes], "") + "…"
	}
	return s
}
