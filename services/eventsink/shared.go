package eventsink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Sinks that share the work read from one consumer, and each gets some of the
// events. None of them knows whether the others have stored what came before its
// own, but the server does: an event is acknowledged after it was stored, so all up
// to the consumer's acknowledgement floor are. That is where the cursor may go, and
// readers see nothing beyond the cursor.

const (
	// settleTries and settlePause bound the wait of a sink that joins for the
	// others to write down what they have acknowledged.
	settleTries = 10
	settlePause = 100 * time.Millisecond
)

// behind compares the cursor with what the consumer takes for stored. A database
// that does not have it, because it is new or was restored from a backup, gets it
// again from the stream. It returns the cursor.
func (ss *session) behind(ctx context.Context, consumer jetstream.Consumer, cursor uint64) (uint64, error) {
	for range settleTries {
		info, err := consumer.Info(ctx)
		if err != nil {
			return 0, fmt.Errorf("consumer %s: %w", ss.bus.Names.SinkConsumer(), bus.Classify(err))
		}
		if info.AckFloor.Stream <= cursor {
			return cursor, nil
		}
		// Another sink may have acknowledged and not yet written so.
		if err := pause.For(ctx, settlePause); err != nil {
			return 0, err
		}
		if cursor, err = ss.store.LastSeq(ctx); err != nil {
			return 0, err
		}
	}
	ss.log.Info().Uint64("cursor", cursor).Msg("the database is behind what was acknowledged: its events are read again")
	// What other sinks have in hand meanwhile comes twice, and is stored once.
	if _, err := ss.bus.JS.ResetConsumerToSequence(ctx, ss.bus.Names.EventStream(), ss.bus.Names.SinkConsumer(), cursor+1); err != nil {
		return 0, fmt.Errorf("set consumer %s to %d: %w", ss.bus.Names.SinkConsumer(), cursor+1, bus.Classify(err))
	}
	return cursor, nil
}

// giveBack lets another sink have a message at once. Where a sink is alone, what it
// has not stored is read again anyway.
func (ss *session) giveBack(m jetstream.Msg) {
	if ss.cfg.Shared {
		ss.settle(m.Nak())
	}
}

// confirm acknowledges a message and waits until the server has seen it.
func (ss *session) confirm(ctx context.Context, m jetstream.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, bus.WriteTimeout)
	defer cancel()
	if err := m.DoubleAck(ctx); err != nil {
		return fmt.Errorf("acknowledge to consumer %s: %w", ss.bus.Names.SinkConsumer(), bus.Classify(err))
	}
	return nil
}

// catchUp moves the cursor to the acknowledgement floor and tells the other sinks.
func (ss *session) catchUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, bus.WriteTimeout)
	defer cancel()
	info, err := ss.reader.Info(ctx)
	if err != nil {
		return fmt.Errorf("consumer %s: %w", ss.bus.Names.SinkConsumer(), bus.Classify(err))
	}
	floor := info.AckFloor.Stream
	if floor <= ss.committed {
		return nil
	}
	if err := ss.store.Advance(ctx, ss.committed, floor); err != nil {
		return err
	}
	ss.committed = floor
	ss.progress.advance(floor)
	if err := ss.bus.NC.Publish(cursorSubject(ss.bus.Names), strconv.AppendUint(nil, floor, 10)); err != nil {
		ss.log.Debug().Err(err).Msg("tell the other sinks of the cursor")
	}
	return nil
}

// cursorSubject is where sinks that share the work tell each other how far all is
// stored, for readers that wait for it. A lost one costs such a reader its wait.
func cursorSubject(n contract.Names) string { return n.Service("eventsink", "cursor") }

// hear follows what the other sinks tell until the returned function is called.
func (s *Service) hear() (func(), error) {
	sub, err := s.bus.NC.Subscribe(cursorSubject(s.bus.Names), func(m *nats.Msg) {
		if seq, err := strconv.ParseUint(string(m.Data), 10, 64); err == nil {
			s.progress.advance(seq)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("hear of the other sinks: %w", err)
	}
	return func() {
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			s.log.Debug().Err(err).Msg("stop hearing of the other sinks")
		}
	}, nil
}
