package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// Watch says what to read from a stream, in stream order.
type Watch struct {
	Stream   string
	Subjects []string
	// LastPerSubject begins with the newest message of each subject instead of
	// with all of them.
	LastPerSubject bool
	// StartSeq begins with this sequence; 0 with the first there is.
	StartSeq uint64
	// HeadersOnly leaves the bodies out: the header Nats-Msg-Size tells how long
	// they are.
	HeadersOnly bool
	// OnStart is told how many messages there are to begin with; nil ignores it.
	// When it is 0, the past is already complete.
	OnStart func(pending uint64)
}

// Watch delivers messages to fn in stream order, the past first and then what
// comes, until ctx is done (it returns nil then) or fn returns an error. Lost
// connections and servers are bridged without a gap; it only gives up, with an
// error, when the stream itself is gone. pending is how many more messages there
// were when this one was sent.
func (c *Conn) Watch(ctx context.Context, w Watch, fn func(m Message, pending uint64) error) error {
	next := w.StartSeq
	retry := backoff.NewExponentialBackOff()
	retry.InitialInterval, retry.MaxInterval = 50*time.Millisecond, 2*time.Second
	var onStart func(uint64)
	if w.OnStart != nil {
		onStart = func(pending uint64) { onStart = nil; w.OnStart(pending) }
	}
	for ctx.Err() == nil {
		err := c.watchOnce(ctx, w, onStart, next, func(m Message, pending uint64) error {
			retry.Reset()
			if err := fn(m, pending); err != nil {
				return watchError{err}
			}
			next = m.Seq + 1
			return nil
		})
		var mine watchError
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, &mine):
			return mine.err
		case errors.Is(err, jetstream.ErrStreamNotFound):
			return fmt.Errorf("watch %s: %w", w.Stream, Classify(err))
		}
		if next > 0 {
			// What is told as the past was told; from here on it is one sequence.
			w.LastPerSubject = false
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry.NextBackOff()):
		}
	}
	return nil
}

type watchError struct{ err error }

func (e watchError) Error() string { return e.err.Error() }

func (c *Conn) watchOnce(ctx context.Context, w Watch, onStart func(uint64), next uint64, fn func(Message, uint64) error) error {
	cfg := jetstream.OrderedConsumerConfig{
		FilterSubjects: w.Subjects, DeliverPolicy: jetstream.DeliverAllPolicy, InactiveThreshold: time.Minute, HeadersOnly: w.HeadersOnly,
		// By itself the library tries for ever, with pauses of up to 10 s, and never
		// tells that the stream is gone.
		MaxResetAttempts: 1,
	}
	switch {
	case next > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, next
	case w.LastPerSubject:
		cfg.DeliverPolicy = jetstream.DeliverLastPerSubjectPolicy
	}
	setup, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	cons, err := c.JS.OrderedConsumer(setup, w.Stream, cfg)
	if err != nil {
		return err
	}
	if onStart != nil {
		onStart(cons.CachedInfo().NumPending)
	}
	// Pulls are large because small ones over an in-process connection were seen
	// to stall; the heartbeat notices when the server is gone.
	it, err := cons.Messages(jetstream.PullMaxMessages(256), jetstream.PullExpiry(30*time.Second), jetstream.PullHeartbeat(2*time.Second))
	if err != nil {
		return err
	}
	// Stopped from here alone: stopped from beside, while the library replaces the
	// consumer after a silence, it would go on with the new one, and Next wait for
	// ever.
	defer it.Stop()
	// What was read: before the first message, all that is behind the start. With
	// the newest of each subject there is no such place before the first one.
	read := uint64(0)
	if next > 0 {
		read = next - 1
	}
	patient := c.NewPatient(it, w.Stream, w.Subjects)
	for {
		msg, err := patient.Next(ctx, read)
		if errors.Is(err, jetstream.ErrNoHeartbeat) {
			continue
		}
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		read = meta.Sequence.Stream
		m := Message{Subject: msg.Subject(), Seq: meta.Sequence.Stream, Time: meta.Timestamp, Header: msg.Headers(), Data: msg.Data()}
		if err := fn(m, meta.NumPending); err != nil {
			return err
		}
	}
}
