package run

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// leaseState is what the watch last heard of a run's lease.
type leaseState int

const (
	leaseUnknown leaseState = iota // never heard of
	leaseLive
	leaseExpired
	leaseClosed // by its holder, in order
)

// entry is what is known of a run that needs somebody: it runs, or it has ended
// and is not closed.
type entry struct {
	status contract.RunStatus // "" until the record is seen
	lease  leaseState
	// heard is when anything of the run was last seen, on our own clock.
	heard time.Duration
	// notBefore delays the next attempt at the run after one that failed.
	notBefore time.Duration
}

// view is this replica's picture of the run bucket, made from headers alone. It
// holds only runs that are not done with, so that it does not grow with the
// past.
type view struct {
	mu       sync.Mutex
	complete bool
	entries  map[contract.RunID]*entry
	waiting  map[contract.RunID]map[chan struct{}]struct{}
	kick     chan struct{}
}

func newView() *view {
	return &view{
		entries: map[contract.RunID]*entry{},
		waiting: map[contract.RunID]map[chan struct{}]struct{}{},
		kick:    make(chan struct{}, 1),
	}
}

// poke lets the sweep look at once.
func (v *view) poke() {
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// await returns a channel that is closed when the run is seen to have ended and
// to be done with, its last event stored; and what gives the wait up.
func (v *view) await(id contract.RunID) (<-chan struct{}, func()) {
	ch := make(chan struct{})
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.waiting[id] == nil {
		v.waiting[id] = map[chan struct{}]struct{}{}
	}
	v.waiting[id][ch] = struct{}{}
	return ch, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if set := v.waiting[id]; set != nil {
			delete(set, ch)
			if len(set) == 0 {
				delete(v.waiting, id)
			}
		}
	}
}

// caughtUp marks the picture as complete: from now on what is missing is
// missing.
func (v *view) caughtUp() {
	v.mu.Lock()
	v.complete = true
	for id, en := range v.entries {
		if en.status == "" && en.lease != leaseLive {
			delete(v.entries, id) // a lease without a run
		}
	}
	v.mu.Unlock()
	v.poke()
}

// record notes a run's record, or its removal.
func (v *view) record(id contract.RunID, status contract.RunStatus, gone bool, now time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if gone {
		v.forget(id)
		return
	}
	en := v.entries[id]
	if en == nil {
		en = &entry{}
		v.entries[id] = en
	}
	en.status, en.heard, en.notBefore = status, now, 0
}

// forget drops a run that is done with and tells those who wait for it. Caller
// must hold mu.
func (v *view) forget(id contract.RunID) {
	delete(v.entries, id)
	for ch := range v.waiting[id] {
		close(ch)
	}
	delete(v.waiting, id)
}

// lease notes what became of a run's lease.
func (v *view) lease(id contract.RunID, state leaseState, now time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	en := v.entries[id]
	switch {
	case en == nil && state == leaseLive:
		// The record comes later in the stream: it was written again after it.
		v.entries[id] = &entry{lease: state, heard: now}
		return
	case en == nil:
		return
	case en.status.Terminal() && state == leaseClosed, en.status == "" && state != leaseLive:
		v.forget(id)
		return
	}
	en.lease, en.notBefore = state, 0
	if state == leaseLive {
		en.heard = now
	} else {
		v.poke()
	}
}

// due lists the runs that may need somebody: their lease is gone, or nothing
// was heard of them for patience.
func (v *view) due(now, patience time.Duration) []contract.RunID {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.complete {
		return nil
	}
	var out []contract.RunID
	for id, en := range v.entries {
		if en.status == "" || now < en.notBefore {
			continue
		}
		if en.lease == leaseExpired || en.lease == leaseClosed || now-en.heard > patience {
			out = append(out, id)
		}
	}
	return out
}

// tried notes an attempt at a run that did not settle it.
func (v *view) tried(id contract.RunID, now, pause time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if en := v.entries[id]; en != nil {
		en.notBefore = now + pause
	}
}

// watch keeps the view until ctx is done. It fails only when the bucket is gone.
func (e *Engine) watch(ctx context.Context) error {
	bucket := contract.KVSubject(e.c.Names.RunBucket(), "")
	err := e.c.Watch(ctx, bus.Watch{
		// All keys by one pattern: with several the server searches all keys again for
		// each message.
		Stream: e.c.RunStream(), Subjects: []string{bucket + ">"}, LastPerSubject: true, HeadersOnly: true,
		OnStart: func(pending uint64) {
			if pending == 0 {
				e.view.caughtUp()
			}
		},
	}, func(m bus.Message, pending uint64) error {
		e.note(strings.TrimPrefix(m.Subject, bucket), m)
		if pending == 0 {
			e.view.caughtUp()
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("watch runs: %w", err)
	}
	return nil
}

func (e *Engine) note(key string, m bus.Message) {
	kind, id, err := contract.ParseKey(key)
	if err != nil {
		e.deps.Log.Debug().Err(err).Msg("a key of the run bucket is not one of ours")
		return
	}
	run := contract.RunID(id)
	switch kind {
	case contract.KeyRun:
		e.view.record(run, contract.RunStatus(m.Header.Get(headerStatus)), m.Deleted(), e.clock())
	case contract.KeyLease:
		state := leaseLive
		switch {
		case m.Header.Get("KV-Operation") == "DEL":
			state = leaseClosed
		case m.Deleted():
			state = leaseExpired
		}
		e.view.lease(run, state, e.clock())
	case contract.KeyCancel:
		if m.Deleted() {
			return
		}
		if d := e.drives(run); d != nil {
			d.stop(errCancelled)
		}
	}
}

// sweep takes care of runs whose lead is gone, as soon as it hears of one, and
// now and then of those that nothing is heard of.
func (e *Engine) sweep(ctx context.Context) {
	patience := e.cfg.LeaseTTL + e.cfg.leaseMargin()
	tick := time.NewTicker(e.cfg.LeaseTTL / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.view.kick:
		case <-tick.C:
		}
		for _, id := range e.view.due(e.clock(), patience) {
			if ctx.Err() != nil {
				return
			}
			if e.drives(id) != nil {
				continue
			}
			if err := e.adopt(ctx, id); err != nil {
				if !errors.Is(err, errHeld) && !errors.Is(err, leaderr.ErrUnavailable) {
					e.deps.Log.Warn().Err(err).Str("run", string(id)).Msg("a run without a lead could not be taken over; trying again")
				}
				e.view.tried(id, e.clock(), e.cfg.LeaseTTL/2)
			}
		}
	}
}

// errHeld: the run's lease is there after all.
var errHeld = errors.New("the run is held by another lead")

// adopt takes over a run whose lease is gone, or finishes what is left of one
// that has ended.
func (e *Engine) adopt(ctx context.Context, id contract.RunID) error {
	rec, rev, err := e.read(ctx, id)
	if errors.Is(err, leaderr.ErrNotFound) {
		e.view.record(id, "", true, 0)
		return nil
	}
	if err != nil {
		return err
	}
	lease, err := e.c.Last(ctx, e.c.RunStream(), e.c.RunKV(contract.RunLeaseKey(id)))
	switch {
	case errors.Is(err, bus.ErrNotFound):
	case err != nil:
		return err
	case !lease.Deleted():
		return errHeld
	}
	handedOver := err == nil && lease.Header.Get("KV-Operation") == "DEL"
	if rec.Status.Terminal() {
		if handedOver {
			e.view.lease(id, leaseClosed, 0)
			return nil
		}
		return e.conclude(ctx, rec, rev)
	}
	return e.takeOver(ctx, rec, rev, handedOver)
}

// takeOver makes this process the run's owner and drives it on.
func (e *Engine) takeOver(ctx context.Context, rec contract.RunRecord, rev uint64, handedOver bool) error {
	if err := e.place(); err != nil {
		return err
	}
	conv, convErr := decodeConversation(rec.Messages)
	d := newDrive(e, rec, conv, rev)
	err := d.write(ctx, func(rec *contract.RunRecord, conv *conversation) {
		rec.Owner = e.owner
		if !handedOver {
			conv.Crashes++
		}
	})
	if err == nil {
		err = d.lease(ctx)
	}
	if err != nil {
		d.end()
		e.release()
		if errors.Is(err, errLost) {
			return errHeld // another replica was first
		}
		return fmt.Errorf("take over: %w", err)
	}
	e.metrics.takeovers.Inc()
	d.log.Info().Str("from", rec.Owner).Bool("handed_over", handedOver).Msg("took over a run")
	d.unreadable = convErr
	e.resume(d)
	return nil
}
