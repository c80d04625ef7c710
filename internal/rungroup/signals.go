package rungroup

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// SignalError is the cause of a context that ended because of a signal.
type SignalError struct{ Signal os.Signal }

func (e *SignalError) Error() string { return "signal: " + e.Signal.String() }

// Interrupted returns the signal that ended ctx, or nil if it has not ended or
// for another reason.
func Interrupted(ctx context.Context) os.Signal {
	var e *SignalError
	if errors.As(context.Cause(ctx), &e) {
		return e.Signal
	}
	return nil
}

// Signals returns two contexts. The first SIGINT or SIGTERM ends soft, the
// second ends hard; a third kills the process as if nobody listened. The end of
// ctx ends soft alone, and a signal after that ends hard. [Hard] finds hard
// from soft, so soft alone need be passed to [Run].
//
// The caller must call stop when it is done: it gives the signals back to the
// system and ends both contexts.
func Signals(ctx context.Context) (soft, hard context.Context, stop func()) {
	hard, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	soft, end := context.WithCancelCause(withHard(ctx, hard))
	// Room for two: neither may be lost while this goroutine is not scheduled.
	caught := make(chan os.Signal, 2)
	signal.Notify(caught, syscall.SIGINT, syscall.SIGTERM)

	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case s := <-caught:
				if soft.Err() == nil {
					end(&SignalError{s})
					continue
				}
				signal.Stop(caught)
				cut(&SignalError{s})
				return
			case <-quit:
				return
			}
		}
	})
	var once sync.Once
	return soft, hard, func() {
		once.Do(func() {
			signal.Stop(caught)
			close(quit)
			wg.Wait()
			end(context.Canceled)
			cut(context.Canceled)
		})
	}
}
