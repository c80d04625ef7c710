package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A reader of a stream that gets nothing cannot tell whether there is nothing.
// Consumers were seen that the server kept alive, heartbeats and all, without
// handing out a message that was stored while they were made. So whoever waits for
// long looks into the stream itself, at growing intervals.
const (
	firstLook = 2 * time.Second
	lastLook  = 30 * time.Second
	lookBound = 5 * time.Second
)

// ErrStalled: the stream has messages that its consumer does not deliver. A new
// consumer does.
var ErrStalled = errors.New("the stream has messages that its consumer does not deliver")

// Patient reads from an ordered consumer of one stream and subjects, and notices
// when it has stalled.
type Patient struct {
	c        *Conn
	it       jetstream.MessagesContext
	stream   string
	subjects []string
	look     time.Duration
}

// NewPatient returns a reader of it, which delivers the messages of stream on
// subjects; no subjects are all of them.
func (c *Conn) NewPatient(it jetstream.MessagesContext, stream string, subjects []string) *Patient {
	if len(subjects) == 0 {
		subjects = []string{">"}
	}
	return &Patient{c: c, it: it, stream: stream, subjects: subjects, look: firstLook}
}

// Next returns the next message. read is the sequence up to which the caller has
// read. Beside the errors of the library it returns [ErrStalled].
func (p *Patient) Next(ctx context.Context, read uint64) (jetstream.Msg, error) {
	missing := false
	for {
		look := p.look
		if missing {
			look = firstLook // it may be on its way
		}
		wait, cancel := context.WithTimeout(ctx, look)
		msg, err := p.it.Next(jetstream.NextContext(wait))
		cancel()
		if err == nil {
			p.look = firstLook
			return msg, nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return nil, err
		}
		switch seq := p.overdue(ctx, read); {
		case seq > 0 && missing:
			return nil, fmt.Errorf("%w: %s at %d", ErrStalled, p.stream, seq)
		case seq > 0:
			missing = true
		default:
			missing, p.look = false, min(2*p.look, lastLook)
		}
	}
}

// overdue returns the sequence of a message after read, or 0 if there is none, as
// far as the server tells.
func (p *Patient) overdue(ctx context.Context, read uint64) uint64 {
	ctx, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	s, err := p.c.JS.Stream(ctx, p.stream)
	if err != nil || s.CachedInfo().State.LastSeq <= read {
		return 0
	}
	for _, subject := range p.subjects {
		if m, err := s.GetMsg(ctx, read+1, jetstream.WithGetMsgSubject(subject)); err == nil && m.Sequence > read {
			return m.Sequence
		}
	}
	return 0
}
