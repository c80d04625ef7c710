package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/mutant"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// errDeposed ends a reign: somebody else holds the key, or may.
var errDeposed = errors.New("deposed: the leader key is not ours any more")

// errExpired ends a reign whose key has run out.
var errExpired = fmt.Errorf("%w: it ran out before it could be renewed", errDeposed)

// fence owns the leader key. It renews it, and makes every write that carries
// its revision, one at a time, so that a write can never carry a revision that a
// renewal of ours has outdated.
type fence struct {
	s       *Service
	rev     uint64
	trusted time.Time   // until then nobody else can have won the key
	expiry  *time.Timer // ends run when the key has expired; nil while it does not run
	writes  chan gate.FirstWrite
	tell    func(context.Context, gate.Event)
	// inherited is the last request that an earlier leader may have written a
	// record for; look tells the gate of a message of the task bucket.
	inherited uint64
	look      func(contract.KeyKind, contract.TaskID, bus.Message) gate.Event
	// bury keeps a request among the dead letters.
	bury func(context.Context, contract.TaskID, uint64, error)
	requests
}

// requests reads requests by sequence; see [bodies].
type requests interface {
	get(ctx context.Context, seq uint64) (body, error)
}

// margin is how much earlier than the server we stop believing in the key.
func (s *Service) margin() time.Duration { return min(time.Second, s.cfg.LeaderTTL/4) }

// run returns errDeposed when the reign is over, or nil when ctx is done.
func (f *fence) run(ctx context.Context) error {
	// Whatever is waited for on a line that carries nothing: a leader whose key has
	// expired is none.
	own, end := context.WithCancelCause(ctx)
	defer end(nil)
	f.expiry = time.AfterFunc(f.left(), func() { end(errExpired) })
	defer f.expiry.Stop()
	err := f.serve(own)
	if errors.Is(context.Cause(own), errExpired) {
		return errExpired
	}
	return err
}

func (f *fence) serve(ctx context.Context) error {
	renew := time.NewTimer(0)
	defer renew.Stop()
	for {
		renew.Reset(f.s.cfg.LeaderTTL / 3)
		select {
		case <-ctx.Done():
			return nil
		case <-renew.C:
			if err := f.renew(ctx); err != nil {
				return err
			}
		case w := <-f.writes:
			if err := f.tryWrite(ctx, w); err != nil {
				return err
			}
			// Writes must not starve the renewal.
			if f.trusted.Sub(f.s.now()) < f.s.cfg.LeaderTTL/2 {
				if err := f.renew(ctx); err != nil {
					return err
				}
			}
		}
	}
}

// renew moves the key on (protocol W4).
func (f *fence) renew(ctx context.Context) error {
	for {
		writer := f.s.writer.Next()
		sent := f.s.now()
		ack, err := f.s.bus.Publish(ctx, f.s.leaderWrite(writer, f.rev))
		switch {
		case err == nil:
			f.won(ack.Seq, sent)
			return nil
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, bus.ErrConflict):
			// An earlier try of ours may have landed although we never heard of it. The
			// clock counts from the send that we know of.
			if rev, ours, rerr := f.held(ctx); rerr == nil && !ours {
				f.s.metrics.fenced.Inc()
				return errDeposed
			} else if rerr == nil {
				f.rev = rev
			}
		}
		if !f.s.now().Before(f.trusted) {
			return fmt.Errorf("%w: it could not be renewed in time: %w", errDeposed, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// held reads the revision of the leader key and whether it is ours.
func (f *fence) held(ctx context.Context) (rev uint64, ours bool, err error) {
	last, err := f.s.bus.Last(ctx, f.s.bus.TaskStream(), f.s.bus.KV(contract.LeaderKey))
	if err != nil {
		return 0, false, err
	}
	v, err := contract.Decode[contract.Leader](last.Data)
	return last.Seq, err == nil && !last.Deleted() && v.Holder == f.s.writer.ID(), nil
}

func (f *fence) won(rev uint64, sent time.Time) {
	f.rev, f.trusted = rev, sent.Add(f.s.cfg.LeaderTTL-f.s.margin())
	if f.expiry != nil {
		f.expiry.Reset(f.left())
	}
}

// left is how long the key lives by our own clock unless it is renewed.
func (f *fence) left() time.Duration { return f.trusted.Add(f.s.margin()).Sub(f.s.now()) }

// write makes a first write (protocol W5, W6) and settles it.
func (f *fence) write(ctx context.Context, w gate.FirstWrite) error {
	if !f.s.now().Before(f.trusted) {
		return fmt.Errorf("%w: its time is over by our own clock", errDeposed)
	}
	b, err := f.get(ctx, w.RequestSeq)
	if errors.Is(err, bus.ErrNotFound) {
		// Somebody took the request away; there is nothing to grant or to end.
		f.tell(ctx, gate.RequestRemoved{TaskID: w.TaskID})
		f.tell(ctx, gate.FirstWritten{TaskID: w.TaskID, Outcome: gate.Absent})
		return nil
	}
	if err != nil {
		return f.retryLater(ctx, w, err)
	}
	if w.RequestSeq <= f.inherited {
		taken, err := f.taken(ctx, w)
		if taken || err != nil {
			return err
		}
	}
	rec := b.fill(w.Record)
	rec.Epoch, rec.Writer = f.rev, f.s.writer.Next()
	if rec.GrantedAt != nil {
		rec.GrantedAt = ptr(rec.GrantedAt.UTC())
	}
	data, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode the record of task %s: %w", rec.TaskID, err)
	}
	key := f.s.bus.KV(contract.TaskKey(rec.TaskID))
	write := bus.Write{Subject: key, Data: data, Expect: bus.Seq(f.rev), ExpectSubject: f.s.bus.KV(contract.LeaderKey)}
	if mutant.SkipFence {
		write.Expect = nil
	}
	ack, err := f.s.bus.Publish(ctx, write)
	switch {
	case err == nil:
		f.tell(ctx, gate.FirstWritten{TaskID: rec.TaskID, Outcome: gate.Stored, Revision: ack.Seq, Record: rec})
		return nil
	case ctx.Err() != nil:
		return nil
	case errors.Is(err, bus.ErrConflict) && !bus.Racing(err):
		f.s.metrics.fenced.Inc()
		return fmt.Errorf("%w: the server refused the first write of task %s: %w", errDeposed, rec.TaskID, err)
	case errors.Is(err, bus.ErrConflict), errors.Is(err, bus.ErrDoubt):
		return f.settle(ctx, rec, key)
	}
	return fmt.Errorf("first write of task %s: %w", rec.TaskID, err)
}

// taken looks for a record of a task that an earlier leader may have granted or
// ended. The write that follows expects nothing of the record, and would go over an
// end without complaint; but what is absent now stays so until we write, because
// first writes of earlier leaders are refused since our key was written. The view
// says the same; it alone is not trusted with this.
func (f *fence) taken(ctx context.Context, w gate.FirstWrite) (bool, error) {
	last, err := f.s.bus.Last(ctx, f.s.bus.TaskStream(), f.s.bus.KV(contract.TaskKey(w.TaskID)))
	switch {
	case ctx.Err() != nil:
		return true, nil
	case errors.Is(err, bus.ErrNotFound):
		return false, nil
	case err != nil:
		return true, f.retryLater(ctx, w, err)
	}
	f.s.log.Error().Str("task_id", string(w.TaskID)).Uint64("revision", last.Seq).Msg("a task that counted as never granted has a record; taking that over")
	f.tell(ctx, gate.FirstWritten{TaskID: w.TaskID, Outcome: gate.Refused})
	f.tell(ctx, f.look(contract.KeyTask, w.TaskID, last))
	return true, nil
}

// settle finds out whether a write in doubt landed. The write may still be under
// way: so the leader key is moved on first, after which it can only be refused,
// and only then the record is read.
func (f *fence) settle(ctx context.Context, rec contract.TaskRecord, key string) error {
	f.s.log.Warn().Str("task_id", string(rec.TaskID)).Msg("a first write is in doubt; moving the leader key on before reading")
	if err := f.renew(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	for {
		last, err := f.s.bus.Last(ctx, f.s.bus.TaskStream(), key)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, bus.ErrNotFound), err == nil && last.Deleted():
			f.tell(ctx, gate.FirstWritten{TaskID: rec.TaskID, Outcome: gate.Absent})
			return nil
		case err == nil:
			out := gate.FirstWritten{TaskID: rec.TaskID, Outcome: gate.Refused}
			if got, derr := contract.DecodeTaskRecord(last.Data); derr == nil && got.Writer == rec.Writer {
				out.Outcome, out.Revision, out.Record = gate.Stored, last.Seq, rec
			} else if derr == nil && got.RequestSeq == rec.RequestSeq {
				// Ours landed and has moved since.
				out.Outcome, out.Revision, out.Record = gate.Stored, last.Seq, got
			}
			f.tell(ctx, out)
			return nil
		}
		if err := f.renew(ctx); err != nil {
			return err
		}
	}
}

// retryLater gives a write back that could not be tried: nothing was sent.
func (f *fence) retryLater(ctx context.Context, w gate.FirstWrite, err error) error {
	f.s.log.Warn().Err(err).Str("task_id", string(w.TaskID)).Msg("the request could not be read; trying again")
	if err := f.renew(ctx); err != nil {
		return err
	}
	f.tell(ctx, gate.FirstWritten{TaskID: w.TaskID, Outcome: gate.Absent})
	return nil
}

// abdicate hands the key back, so that a standby takes over at once.
func (f *fence) abdicate() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := f.deleteKey(ctx)
	if errors.Is(err, bus.ErrConflict) {
		// The renewal that our stop cut short has landed.
		if rev, ours, rerr := f.held(ctx); rerr == nil && ours {
			f.rev = rev
			err = f.deleteKey(ctx)
		}
	}
	if err != nil {
		f.s.log.Warn().Err(err).Msg("the leader key could not be handed back; a standby takes over when it expires")
		return
	}
	f.s.log.Info().Msg("handed the gate back")
}

func (f *fence) deleteKey(ctx context.Context) error {
	_, err := f.s.bus.Publish(ctx, bus.Write{
		Subject: f.s.bus.KV(contract.LeaderKey), Header: nats.Header{"KV-Operation": {"DEL"}}, Expect: bus.Seq(f.rev),
	})
	return err
}

func ptr[T any](v T) *T { return &v }
