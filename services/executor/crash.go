package executor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/pkg/contract"
)

// A grant that makes executors crash before they have claimed its task would go
// from one to the next for ever, because its record never expires. How often it was
// delivered does not tell: a grant also comes again after it was given back in
// order, after a pause, or because a delivery was lost. So whoever opens one that
// was delivered before notes that first, and takes the note back when it gives the
// grant back. What is left in the note are openings after which nobody said
// anything any more. After two of them nobody opens it again, and its task ends. See
// docs/adr/0009-grants-that-crash.md.

// maxCrashes is how many crashes of its handler a grant may cause.
const maxCrashes = 2

// trialTTL is how long a note is kept: far longer than a grant takes to come again.
const trialTTL = time.Hour

// noteTimeout bounds the write that takes a note back.
const noteTimeout = 2 * time.Second

var errCrashes = fmt.Errorf("its handling crashed executors %d times before the task could be claimed", maxCrashes)

// opening is one opening of a grant. Of a first delivery nothing is noted, so that
// it costs nothing.
type opening struct {
	id    contract.TaskID
	note  contract.Trial
	rev   uint64 // of the note
	noted bool
	turn  *turn
}

// open notes that a grant is about to be opened, if it was delivered before. False:
// it must not be opened; whatever is to be done with it is done.
func (s *Service) open(ctx context.Context, msg jetstream.Msg) (opening, bool) {
	meta, err := msg.Metadata()
	if err != nil {
		return opening{}, true // it is buried with the reason
	}
	id, attempt, ok := s.grantOf(msg)
	o := opening{id: id, note: contract.Trial{Attempt: attempt}}
	if !ok || meta.NumDelivered <= 1 {
		return o, true
	}
	if err := s.readNote(ctx, &o); err == nil && o.note.Times < maxCrashes {
		err = s.noteOpened(ctx, &o)
		if err == nil {
			return o, true
		}
		s.log.Warn().Err(err).Str("task_id", string(id)).Msg("the opening of a grant that was delivered before could not be noted; giving it back")
	} else if err == nil {
		s.bury(ctx, msg, errCrashes)
		return o, false
	} else {
		s.log.Warn().Err(err).Str("task_id", string(id)).Msg("it cannot be read how often a grant crashed its executors; giving it back")
	}
	_ = msg.NakWithDelay(time.Second)
	return o, false
}

// grantOf tells task and attempt of a grant without opening it.
func (s *Service) grantOf(msg jetstream.Msg) (contract.TaskID, int, bool) {
	_, id, err := s.bus.Names.ParseTaskGrant(msg.Subject())
	if err != nil {
		return "", 0, false
	}
	text, ok := strings.CutPrefix(msg.Headers().Get(nats.MsgIdHdr), string(id)+"/")
	attempt, err := strconv.Atoi(text)
	return id, attempt, ok && err == nil
}

func (s *Service) readNote(ctx context.Context, o *opening) error {
	last, err := s.bus.Last(ctx, s.bus.TaskStream(), s.bus.KV(contract.TrialKey(o.id)))
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	o.rev = last.Seq
	note, err := contract.Decode[contract.Trial](last.Data)
	if err == nil && !last.Deleted() && note.Attempt == o.note.Attempt {
		o.note = note
	}
	return nil
}

// noteOpened adds one to the note.
func (s *Service) noteOpened(ctx context.Context, o *opening) error {
	o.note.Times++
	o.note.Executor = s.cfg.Name
	if err := s.writeNote(ctx, o); err != nil {
		return err
	}
	o.noted = true
	return nil
}

func (s *Service) writeNote(ctx context.Context, o *opening) error {
	data, err := json.Marshal(o.note)
	if err != nil {
		return err
	}
	ack, err := s.bus.Publish(ctx, bus.Write{Subject: s.bus.KV(contract.TrialKey(o.id)), Data: data, TTL: trialTTL, Expect: bus.Seq(o.rev)})
	o.rev = ack.Seq
	return err
}

// giveBack lets a grant come again: nothing was wrong with it.
func (s *Service) giveBack(msg jetstream.Msg, o opening) {
	if o.noted {
		ctx, cancel := context.WithTimeout(context.Background(), noteTimeout)
		defer cancel()
		o.note.Times--
		if err := s.writeNote(ctx, &o); err != nil {
			s.log.Debug().Err(err).Str("task_id", string(o.id)).Msg("a grant that is given back counts as one that crashed its executor")
		}
	}
	_ = msg.Nak()
}

// crashed deals with a grant whose handling panicked: it comes again once, to
// whoever is free, and is then put aside.
func (s *Service) crashed(ctx context.Context, msg jetstream.Msg, o opening, f *fault.Error) {
	s.metrics.panics.Inc()
	f.Log(s.log.Error()).Str("subject", msg.Subject()).Msg("the handling of a grant panicked before the task was claimed")
	if o.id == "" {
		s.bury(ctx, msg, f)
		return
	}
	if !o.noted {
		err := s.readNote(ctx, &o)
		if err == nil {
			err = s.noteOpened(ctx, &o)
		}
		if err != nil {
			s.log.Warn().Err(err).Str("task_id", string(o.id)).Msg("the panic could not be noted; the grant comes again")
		}
	}
	if o.note.Times >= maxCrashes {
		s.bury(ctx, msg, fmt.Errorf("%w; the last time: %w", errCrashes, f))
		return
	}
	_ = msg.NakWithDelay(time.Second)
}

// guarded runs a part of an attempt. A panic of it is logged and comes back as an
// error: the process has other attempts.
func (a *attempt) guarded(part string, f func() error) (err error) {
	defer func() {
		if p := fault.Of(recover()); p != nil {
			p.Log(a.log.Error()).Str("part", part).Msg("an attempt panicked; its task ends as failed")
			err = p
		}
	}()
	return f()
}

// guardedEnd ends an attempt. Where even that panics, a plain failure is tried; if
// that fails as well, the lease runs out and the gate ends the task.
func (a *attempt) guardedEnd(end func(error), err error) {
	if p := a.guarded("end", func() error { end(err); return nil }); p != nil {
		_ = a.guarded("end", func() error { end(p); return nil })
	}
}
