// Package pause waits between the tries of something that failed.
package pause

import (
	"context"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// For waits for d. When ctx is done first it returns ctx's cause.
func For(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// Growing gives pauses that begin at about first and grow to about most.
func Growing(first, most time.Duration) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = first, most
	b.Reset()
	return b
}
