package executor

import (
	"context"
	"fmt"
	"time"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/tool"
)

// A lease says that the process lives; that alone must not hold a slot. So the
// work itself has to move: a piece of a model's answer, a tool's start, output or
// end, a step. Where nothing of that happens for the stall timeout, the attempt
// is stopped like by any other cause, and ends as executor_stalled when all its
// effects have ended. Where they do not end although they were told to, the lease
// is no longer renewed, and the gate moves the task on.

// progressed tells that something has happened in the task.
func (a *attempt) progressed() { a.progress.Store(int64(a.s.now().Sub(a.base))) }

// idle is how long nothing has happened.
func (a *attempt) idle() time.Duration {
	return a.s.now().Sub(a.base) - time.Duration(a.progress.Load())
}

// stallSlack is how much longer than the stall timeout the executor waits, so that
// a tool's own limit of the same length comes first: its model is told of that and
// can go on.
func stallSlack(timeout time.Duration) time.Duration { return min(2*time.Second, timeout/10) }

// watchProgress stops the attempt when nothing happens in it, until the work has
// ended and stop is called.
func (a *attempt) watchProgress() (stop func()) {
	a.progressed()
	over, watched := make(chan struct{}), make(chan struct{})
	watch := func() error {
		limit := a.s.cfg.StallTimeout + stallSlack(a.s.cfg.StallTimeout)
		timer := time.NewTimer(limit)
		defer timer.Stop()
		for {
			select {
			case <-over:
				return nil
			case <-timer.C:
			}
			if left := limit - a.idle(); left > 0 {
				timer.Reset(left)
				continue
			}
			break
		}
		a.cancel(errStalled)
		// If it was stopped before for another cause, that one stands; it should have
		// ended by now all the same.
		timer.Reset(a.ttl)
		select {
		case <-over:
		case <-timer.C:
			a.log.Error().Msg("the task does not end although it was stopped; its lease is not renewed any more")
			a.stopKeeping()
			<-over
		}
		return nil
	}
	go func() {
		defer close(watched)
		if err := a.guarded("watch", watch); err != nil {
			a.cancel(err)
		}
	}()
	return func() { close(over); <-watched }
}

// tellToolProgress tells of the start and the end of every tool.
func (a *attempt) tellToolProgress(next agent.Invoke) agent.Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		a.progressed()
		defer a.progressed()
		return next(ctx, t, call)
	}
}

func (a *attempt) stallText() string {
	return fmt.Sprintf("Nothing happened in the task for %v: no piece of an answer, no output of a tool, no step. It was stopped; its work may have had effects. The limit is executor.stall_timeout_seconds.", a.s.cfg.StallTimeout)
}
