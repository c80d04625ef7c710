package eventsink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/semaphore"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/pause"
)

const (
	// heartbeat is how often the server must give a sign of life while there is
	// nothing to deliver. Twice that without one ends a session.
	heartbeat = 2 * time.Second
	// pullExpiry ends a request for messages, so that one that the server has
	// forgotten is soon made again.
	pullExpiry = 10 * time.Second
)

var (
	// errGap: a delivery is missing.
	errGap = errors.New("a delivery is missing: it was lost on the way, or another sink with another database reads from the same consumer")
	// errReconnected: the connection was lost, and with it perhaps deliveries.
	errReconnected = errors.New("the connection to NATS was lost")
	// errStopped: the database refuses for a reason that time does not heal.
	errStopped = errors.New("the sink stores nothing")
)

// session is the state of reading from one reset of the consumer to the next.
type session struct {
	*Service
	store      Store
	batchSize  int
	reconnects uint64 // of the connection, when the session began
	held       *semaphore.Weighted

	// Where the sink is alone:
	next     uint64 // the server's number of the next delivery
	received uint64 // the newest sequence that was read
	// committed is the newest sequence that was committed. Where sinks share the
	// work it is the cursor as it was seen last.
	committed uint64
	reader    jetstream.Consumer

	batch []item
	bytes int
}

// session reads until ctx is done or something went wrong. began reports whether
// it got as far as reading. ctx is for taking work, work for finishing what was
// taken, serve for answering requests.
func (s *Service) session(ctx, work, serve context.Context, st Store, api *api) (began bool, err error) {
	// Before anything is asked of the server, so that a connection that breaks
	// from here on is noticed and no answer is waited for that cannot come.
	lost := s.bus.NC.StatusChanged(nats.RECONNECTING, nats.CLOSED)
	ss := &session{Service: s, store: st, reconnects: s.bus.NC.Stats().Reconnects, held: semaphore.NewWeighted(maxHeldBytes)}
	alive, end := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-lost:
			end(errReconnected)
		case <-alive.Done():
		}
	})
	defer func() {
		end(nil)
		watch.Wait()
		s.bus.NC.RemoveStatusListener(lost)
	}()

	consumer, err := ss.begin(alive)
	if err != nil {
		if errors.Is(context.Cause(alive), errReconnected) {
			err = errReconnected
		}
		return false, err
	}
	if err := api.start(serve); err != nil {
		return false, err
	}

	failed := make(chan error, 1)
	items := make(chan item, ss.batchSize)
	// Messages are read here while the batch before them is written.
	reading, err := consumer.Consume(func(m jetstream.Msg) {
		if ss.held.Acquire(alive, weight(m)) != nil {
			ss.giveBack(m) // the session is over
			return
		}
		select {
		case items <- ss.prepare(m):
		case <-alive.Done():
			ss.giveBack(m)
		}
	},
		jetstream.PullMaxMessagesWithBytesLimit(max(2*ss.batchSize, 50), maxPullBytes),
		jetstream.PullExpiry(pullExpiry),
		jetstream.PullHeartbeat(heartbeat),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			select {
			case failed <- err:
			default:
			}
		}))
	if err != nil {
		return false, fmt.Errorf("read %s: %w", s.bus.Names.EventStream(), err)
	}
	closed := reading.Closed()
	defer func() {
		end(nil)
		if s.cfg.Shared {
			reading.Drain() // what is here already is given back
		} else {
			reading.Stop()
		}
		<-closed
		for _, it := range ss.batch {
			ss.giveBack(it.msg)
		}
		for {
			select {
			case it := <-items:
				ss.giveBack(it.msg)
			default:
				return
			}
		}
	}()
	s.setReady(nil)
	return true, ss.collect(alive, work, items, failed)
}

// begin makes sure that database, stream and consumer belong together, and sets
// the consumer to what follows the last committed message.
func (ss *session) begin(ctx context.Context) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, bus.WriteTimeout)
	defer cancel()
	if !ss.bus.NC.IsConnected() {
		return nil, errReconnected
	}
	names := ss.bus.Names
	// Before the stream is looked at: sinks that share the work go on meanwhile, and
	// what is stored later may be newer than the end that was seen.
	cursor, err := ss.store.LastSeq(ctx)
	if err != nil {
		return nil, err
	}
	newest, id, err := ss.store.Newest(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := ss.bus.JS.Stream(ctx, names.EventStream())
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", names.EventStream(), bus.Classify(err))
	}
	consumer, err := stream.Consumer(ctx, names.SinkConsumer())
	if err != nil {
		return nil, fmt.Errorf("consumer %s of %s: %w", names.SinkConsumer(), names.EventStream(), bus.Classify(err))
	}
	ss.consumer.Store(&consumer)

	info := stream.CachedInfo()
	if err := ss.store.Bind(ctx, Origin{Stream: info.Config.Name, Created: info.Created}); err != nil {
		if errors.Is(err, ErrForeign) {
			return nil, fmt.Errorf("%w: %w", errStopped, err)
		}
		return nil, err
	}
	// Rows may be there beyond the cursor, where sinks share the work.
	if filled := max(cursor, newest); filled > info.State.LastSeq {
		return nil, fmt.Errorf("%w: %w: it was filled up to %d, but stream %s ends at %d, so that new events would get numbers that are taken; "+lostEnd,
			errStopped, ErrForeign, filled, info.Config.Name, info.State.LastSeq)
	}
	if err := ss.compare(ctx, info.Config.Name, newest, id); err != nil {
		return nil, err
	}
	if ss.cfg.Shared {
		if cursor, err = ss.behind(ctx, consumer, cursor); err != nil {
			return nil, err
		}
	} else if _, err := ss.bus.JS.ResetConsumerToSequence(ctx, names.EventStream(), names.SinkConsumer(), cursor+1); err != nil {
		return nil, fmt.Errorf("set consumer %s to %d: %w", names.SinkConsumer(), cursor+1, bus.Classify(err))
	}
	ss.next, ss.received, ss.committed, ss.reader = 1, cursor, cursor, consumer
	ss.batchSize = ss.cfg.BatchSize
	// A batch that the server never lets become full would wait for its time.
	if limit := consumer.CachedInfo().Config.MaxAckPending; limit > 0 {
		ss.batchSize = min(ss.batchSize, limit)
	}
	ss.progress.advance(cursor)
	return consumer, nil
}

// lostEnd says how a stream comes to have other events than the database, and what
// to do.
const lostEnd = "the stream was restored from a backup or lost its end in a power failure: move the database away and restart, then a new one is made from what the stream has"

// compare looks whether the stream has the newest event that is stored, under the
// same sequence. A stream that has lost its end and was filled again since has other
// events there, which would be taken for stored.
func (ss *session) compare(ctx context.Context, stream string, seq uint64, id string) error {
	if seq == 0 {
		return nil
	}
	m, err := ss.bus.Get(ctx, stream, seq)
	if errors.Is(err, bus.ErrNotFound) {
		return nil // too old for the stream
	}
	if err != nil {
		return fmt.Errorf("event %d of stream %s: %w", seq, stream, err)
	}
	if it := ss.judge(m.Subject, m.Data, seq, read); it.verdict == store && it.record.EventID != id {
		return fmt.Errorf("%w: %w: its newest event is %q at %d, but stream %s has %q there; "+lostEnd, errStopped, ErrForeign, id, seq, stream, it.record.EventID)
	}
	return nil
}

// collect gathers batches and writes them until alive is done, because the sink
// stops or the connection was lost.
func (ss *session) collect(alive, work context.Context, items <-chan item, failed <-chan error) error {
	due := time.NewTimer(time.Hour)
	due.Stop()
	defer due.Stop()
	for {
		select {
		case <-alive.Done():
			if err := context.Cause(alive); errors.Is(err, errReconnected) {
				return err
			}
			return ss.flush(work)
		case err := <-failed:
			return fmt.Errorf("read %s: %w", ss.bus.Names.EventStream(), err)
		case <-due.C:
			if err := ss.flush(work); err != nil {
				return err
			}
		case it := <-items:
			first := len(ss.batch) == 0
			urgent, err := ss.take(it)
			if err != nil {
				return err
			}
			// What is here already comes along, so that a burst of last events
			// does not cost a transaction each.
			for waiting := true; waiting && !ss.full(); {
				select {
				case it := <-items:
					u, err := ss.take(it)
					if err != nil {
						return err
					}
					urgent = urgent || u
				default:
					waiting = false
				}
			}
			switch {
			case urgent || ss.full():
				due.Stop()
				if err := ss.flush(work); err != nil {
					return err
				}
			case first && len(ss.batch) > 0:
				due.Reset(ss.cfg.FlushInterval)
			}
		}
	}
}

func (ss *session) full() bool { return len(ss.batch) >= ss.batchSize || ss.bytes >= maxBatchBytes }

// prepare reads a message. What is wrong with the delivery is for take to tell.
func (ss *session) prepare(m jetstream.Msg) item {
	meta, err := m.Metadata()
	if err != nil {
		return item{msg: m, broken: fmt.Errorf("message without delivery data: %w", err)}
	}
	it := ss.judge(m.Subject(), m.Data(), meta.Sequence.Stream, read)
	it.msg, it.delivery, it.deliveries = m, meta.Sequence.Consumer, meta.NumDelivered
	return it
}

// take puts what was read into the batch and reports whether it must be stored at
// once.
func (ss *session) take(it item) (bool, error) {
	switch {
	case it.broken != nil:
		return false, it.broken
	case ss.cfg.Shared:
		if it.deliveries > 1 {
			ss.metrics.redelivered.Inc() // the store knows whether it has it already
		}
	case it.delivery != ss.next:
		return false, fmt.Errorf("%w (delivery %d came, %d was next)", errGap, it.delivery, ss.next)
	default:
		ss.next++
		if it.seq <= ss.received {
			// The server got tired of waiting for the acknowledgement. What is in the
			// batch will be acknowledged with it, what is committed was.
			ss.metrics.redelivered.Inc()
			if it.seq <= ss.committed {
				ss.settle(it.msg.Ack())
			}
			ss.held.Release(weight(it.msg))
			return false, nil
		}
		ss.received = it.seq
	}
	ss.batch = append(ss.batch, it)
	ss.bytes += int(weight(it.msg))
	return it.terminal, nil
}

// flush writes the open batch and acknowledges it. After an error nothing of it
// is acknowledged and the session must end.
func (ss *session) flush(ctx context.Context) error {
	batch := ss.batch
	if len(batch) == 0 {
		return nil
	}
	start := time.Now()
	var last uint64 // 0 leaves the cursor where it is
	if ss.cfg.Shared {
		slices.SortFunc(batch, func(a, b item) int { return cmp.Compare(a.seq, b.seq) })
	} else {
		last = batch[len(batch)-1].seq
	}
	if err := ss.write(ctx, batch, last); err != nil {
		return err
	}
	if !ss.cfg.Shared {
		ss.committed = last
		ss.progress.advance(last)
	}
	ss.setReady(nil)
	ss.trace(ctx, batch, start)
	ss.metrics.batch.Observe(float64(len(batch)))
	ss.metrics.duration.Observe(time.Since(start).Seconds())
	for i, it := range batch {
		if ss.cfg.Shared && i == len(batch)-1 {
			// The answer to this one says that the server has seen those before it.
			if err := ss.confirm(ctx, it.msg); err != nil {
				return err
			}
		} else if it.verdict == dead {
			ss.settle(it.msg.TermWithReason(bus.HeaderText(it.reason)))
		} else {
			ss.settle(it.msg.Ack())
		}
	}
	ss.held.Release(int64(ss.bytes))
	clear(batch) // lets go of the messages
	ss.batch, ss.bytes = batch[:0], 0
	if ss.cfg.Shared {
		return ss.catchUp(ctx)
	}
	return nil
}

// settle looks at the error of an acknowledgement. One that was not sent is made
// up for when the message comes again.
func (ss *session) settle(err error) {
	if err != nil {
		ss.log.Debug().Err(err).Msg("acknowledge")
	}
}

// write stores what can be stored and sends the rest to the dead letters, in
// stream order, and moves the cursor to upTo.
func (ss *session) write(ctx context.Context, batch []item, upTo uint64) error {
	var rows []*item
	for i := range batch {
		switch it := &batch[i]; it.verdict {
		case store:
			rows = append(rows, it)
		case skip:
			ss.metrics.skipped.Inc()
			ss.log.Debug().Str("subject", it.subject).Uint64("seq", it.seq).Msg(it.reason)
		case dead:
			if err := ss.bury(ctx, it); err != nil {
				return err
			}
		}
	}
	return ss.insert(ctx, rows, upTo)
}

// insert stores rows. When the store refuses them for good it looks for the one
// that is at fault, by halves, and goes on without it.
func (ss *session) insert(ctx context.Context, rows []*item, upTo uint64) error {
	err := ss.commit(ctx, rows, upTo)
	if !errors.Is(err, ErrRejected) {
		return err
	}
	switch n := len(rows); n {
	case 0:
		return fmt.Errorf("%w: the cursor: %w", errStopped, err)
	case 1:
		rows[0].verdict, rows[0].reason = dead, err.Error()
		if err := ss.bury(ctx, rows[0]); err != nil {
			return err
		}
		return ss.insert(ctx, nil, upTo)
	default:
		half := min(upTo, rows[n/2-1].seq)
		if err := ss.insert(ctx, rows[:n/2], half); err != nil {
			return err
		}
		return ss.insert(ctx, rows[n/2:], upTo)
	}
}

// commit writes one transaction and keeps trying while the database is not
// available. It gives up when ctx is done, when the rows are refused, or when
// the connection was lost meanwhile: behind a new one there may be another
// stream.
func (ss *session) commit(ctx context.Context, rows []*item, upTo uint64) error {
	records := record(rows)
	retry := newBackOff()
	var quiet quiet
	for {
		if ss.bus.NC.Stats().Reconnects != ss.reconnects {
			return errReconnected
		}
		n, err := ss.store.Append(ctx, records, upTo)
		if err == nil {
			ss.metrics.stored.Add(float64(n))
			ss.metrics.duplicates.Add(float64(len(records) - n))
			return nil
		}
		if errors.Is(err, ErrRejected) || errors.Is(err, ErrLost) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w; the events will be delivered again", err)
		}
		ss.metrics.retries.Inc()
		ss.setReady(err)
		wait := retry.NextBackOff()
		if quiet.speak() {
			ss.log.Error().Err(err).Int("events", len(records)).Dur("again_in", wait).Msg("events cannot be stored; keeping them and trying again")
		}
		if pause.For(ctx, wait) != nil {
			return fmt.Errorf("%w; the events will be delivered again", err)
		}
	}
}

// weight is what a message counts for in the bounds on memory.
func weight(m jetstream.Msg) int64 { return int64(min(len(m.Data())+1024, maxHeldBytes/2)) }
