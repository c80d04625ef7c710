package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/external"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Headers of a run's record, so that a watcher knows what it needs without the
// record's body.
const (
	headerStatus = "Herdgate-Run-Status"
	headerTenant = "Herdgate-Tenant"
	headerThread = "Herdgate-Thread" // the token, see contract.ThreadID.Token
)

// Reasons for which a drive ends before its run does. They are causes of the
// run's context.
var (
	// errCancelled: somebody asked for the run's end.
	errCancelled = errors.New("the run was cancelled")
	// errLost: another process drives the run, or might do so by now.
	errLost = errors.New("the run is no longer ours to drive")
	// errDraining: this process stops; another one shall go on.
	errDraining = errors.New("the lead is stopping")
	// errTooLarge: the run's state cannot be stored any more.
	errTooLarge = errors.New("run state is too large")
)

// drive is one process driving one run. All writes of the run's record and
// lease go through its mutex: one is in flight at a time.
type drive struct {
	e   *Engine
	id  contract.RunID
	log zerolog.Logger

	// life ends with the drive, ctx with the run's work; ctx is a child of life.
	// They are fields because hooks and tools of the run share them.
	life   context.Context //nolint:containedctx // the drive's own lifetime
	ctx    context.Context //nolint:containedctx // the run's work
	cancel context.CancelCauseFunc
	end    context.CancelFunc

	// trusted is until when the lease surely holds, in nanoseconds since the
	// engine's start; 0 before the first lease.
	trusted atomic.Int64

	mu     sync.Mutex
	rec    contract.RunRecord
	conv   conversation
	rev    uint64 // of the record
	closed bool   // no more renewals

	// unreadable is why the stored conversation could not be read at take-over.
	unreadable error
	limits     contract.AdmissionLimits

	// guards watch over the lead's own loop.
	guards guard.Set
	// skills are those of the run, external its tools of MCP servers; setUp makes them.
	skills   *skill.Session
	external *external.Offer
	// delegates: the run may use the `task` tool.
	delegates bool
	// resumed: an earlier driver may have told something already.
	resumed bool
	started uint64 // sequence of run_started
	teller  teller

	ends *ends

	// spent is what the lead had spent when its loop began.
	spent *contract.Usage
}

// newDrive returns a drive of the run as rec and conv say, at revision rev of
// its record; 0 for one that is not stored yet.
func newDrive(e *Engine, rec contract.RunRecord, conv conversation, rev uint64) *drive {
	d := &drive{e: e, id: rec.RunID, rec: rec, conv: conv, rev: rev}
	d.log = e.deps.Log.With().Str("run", string(rec.RunID)).Logger()
	d.life, d.end = context.WithCancel(e.hard)
	d.ctx, d.cancel = context.WithCancelCause(d.life)
	return d
}

// stop ends the run's work for a reason; the first one counts.
func (d *drive) stop(reason error) { d.cancel(reason) }

// snapshot returns the record as it was last stored, without the messages.
func (d *drive) snapshot() contract.RunRecord {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec := d.rec
	rec.Delegations = append([]contract.Delegation(nil), rec.Delegations...)
	rec.Messages = nil
	return rec
}

// gate is asked before every effect.
func (d *drive) gate() error {
	if until := d.trusted.Load(); until != 0 && d.e.clock() >= time.Duration(until) {
		d.stop(errLost)
		return errLost
	}
	return nil
}

// write changes the record by compare-and-set. change works on copies; what it
// did counts once the server has accepted it. errLost when the record has moved
// on without us: somebody else drives the run.
func (d *drive) write(ctx context.Context, change func(rec *contract.RunRecord, conv *conversation)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	rec, conv := d.rec, d.conv.clone()
	rec.Delegations = append([]contract.Delegation(nil), rec.Delegations...)
	change(&rec, &conv)
	rec.Writer = d.e.writer.Next()
	rec.Usage = totalUsage(conv.Usage, rec.Delegations)
	body, err := encodeRecord(&rec, &conv, maxRecordBytes)
	if err != nil {
		return err
	}
	w := bus.Write{
		Subject: d.e.c.RunKV(contract.RunKey(d.id)),
		Data:    body,
		Header: nats.Header{
			headerStatus: {string(rec.Status)}, headerTenant: {string(rec.Tenant)}, headerThread: {rec.ThreadID.Token()},
		},
		Expect: bus.Seq(d.rev),
	}
	if rec.Status.Terminal() {
		w.TTL = d.e.cfg.Retention
	}
	rev, err := d.put(ctx, w, rec.Writer)
	if err != nil {
		return err
	}
	d.rec, d.conv, d.rev = rec, conv, rev
	return nil
}

// put publishes w until the server has accepted or refused it, and returns the
// new revision. Caller must hold mu.
func (d *drive) put(ctx context.Context, w bus.Write, writer string) (uint64, error) {
	retry := newBackOff()
	for {
		ack, err := d.e.c.Publish(ctx, w)
		switch {
		case err == nil:
			return ack.Seq, nil
		case errors.Is(err, bus.ErrConflict):
			seq, mine, readErr := d.last(ctx, writer)
			switch {
			case readErr != nil:
				err = readErr
			case mine:
				return seq, nil // an earlier try of this very write had landed
			case seq != *w.Expect:
				d.stop(errLost)
				return 0, fmt.Errorf("%w: its record moved on to revision %d", errLost, seq)
			}
		case errors.Is(err, bus.ErrTooLarge):
			return 0, fmt.Errorf("%w: %w", errTooLarge, err)
		case !errors.Is(err, bus.ErrDoubt):
			return 0, err
		}
		if lost := d.gate(); lost != nil {
			return 0, lost
		}
		if pause.For(ctx, retry.NextBackOff()) != nil {
			return 0, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// last reads the revision of the run's record and whether writer wrote it.
func (d *drive) last(ctx context.Context, writer string) (seq uint64, mine bool, err error) {
	m, err := d.e.c.Last(ctx, d.e.c.RunStream(), d.e.c.RunKV(contract.RunKey(d.id)))
	if errors.Is(err, bus.ErrNotFound) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	var w struct {
		Writer string `json:"writer"`
	}
	if !m.Deleted() {
		if err := json.Unmarshal(m.Data, &w); err != nil {
			return 0, false, fmt.Errorf("run %s: record: %w", d.id, err)
		}
	}
	return m.Seq, w.Writer == writer, nil
}

// lease writes the heartbeat once. It is refused as soon as the record has
// moved on, which ends the drive.
func (d *drive) lease(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	sent := d.e.clock()
	body, err := json.Marshal(contract.Lease{Executor: d.e.cfg.Name})
	if err != nil {
		return err
	}
	_, err = d.e.c.Publish(ctx, bus.Write{
		Subject: d.e.c.RunKV(contract.RunLeaseKey(d.id)), Data: body, TTL: d.e.cfg.LeaseTTL,
		Expect: bus.Seq(d.rev), ExpectSubject: d.e.c.RunKV(contract.RunKey(d.id)),
	})
	if errors.Is(err, bus.ErrConflict) {
		if seq, _, readErr := d.last(ctx, ""); readErr == nil && seq != d.rev {
			d.stop(errLost)
			return fmt.Errorf("%w: its record moved on to revision %d", errLost, seq)
		}
	}
	if err != nil {
		return err
	}
	d.trusted.Store(int64(sent + d.e.cfg.LeaseTTL - d.e.cfg.leaseMargin()))
	return nil
}

// keepLease renews the lease until the drive is over, and ends the run's work
// when the lease has run out.
func (d *drive) keepLease() {
	tick := time.NewTicker(d.e.cfg.LeaseTTL / 3)
	defer tick.Stop()
	for {
		// The clock is watched beside the renewal, which may hang as long as a
		// write may.
		left := time.Duration(d.trusted.Load()) - d.e.clock()
		expiry := time.NewTimer(max(left, 0))
		select {
		case <-d.life.Done():
			expiry.Stop()
			return
		case <-expiry.C:
			if d.gate() != nil {
				d.log.Warn().Msg("the run's lease ran out before it could be renewed; another lead may go on with it")
				return
			}
		case <-tick.C:
			expiry.Stop()
			ctx, cancel := context.WithTimeout(d.life, max(left, time.Millisecond))
			err := d.lease(ctx)
			cancel()
			if errors.Is(err, errLost) {
				d.log.Warn().Err(err).Msg("another lead drives the run")
				return
			}
			if err != nil && d.life.Err() == nil {
				d.log.Warn().Err(err).Msg("the run's lease could not be renewed; trying again")
			}
		}
	}
}

// giveUp closes the lease of a run that has not ended, so that another lead
// takes it over at once. If it fails, the lease's expiry comes to the same a
// little later.
func (d *drive) giveUp(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	return d.e.closeLease(ctx, d.id, d.rev)
}

// closeLease leaves a mark on the lease key of a run whose record is at rev.
func (e *Engine) closeLease(ctx context.Context, id contract.RunID, rev uint64) error {
	_, err := e.c.Publish(ctx, bus.Write{
		Subject: e.c.RunKV(contract.RunLeaseKey(id)),
		Header:  nats.Header{"KV-Operation": {"DEL"}},
		// The mark outlives the record, so that a run without it is one that
		// still needs care.
		TTL:    e.cfg.Retention + 24*time.Hour,
		Expect: bus.Seq(rev), ExpectSubject: e.c.RunKV(contract.RunKey(id)),
	})
	if err != nil {
		return fmt.Errorf("run %s: close the lease: %w", id, err)
	}
	return nil
}

func newBackOff() *backoff.ExponentialBackOff {
	return pause.Growing(20*time.Millisecond, 500*time.Millisecond)
}
