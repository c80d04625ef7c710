package pause

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := For(t.Context(), time.Minute); err != nil || time.Since(start) != time.Minute {
			t.Errorf("waited %v, %v", time.Since(start), err)
		}
		why := errors.New("why")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(why) })
		start = time.Now()
		if err := For(ctx, time.Minute); !errors.Is(err, why) || time.Since(start) != time.Second {
			t.Errorf("waited %v, %v", time.Since(start), err)
		}
		if err := For(ctx, 0); err != nil {
			t.Errorf("no pause: %v", err)
		}
	})
}

func TestGrowing(t *testing.T) {
	t.Parallel()
	b := Growing(10*time.Millisecond, time.Second)
	first, last := b.NextBackOff(), time.Duration(0)
	for range 50 {
		last = b.NextBackOff()
		if last > 2*time.Second {
			t.Errorf("a pause of %v", last)
		}
	}
	if first > 20*time.Millisecond || last < 400*time.Millisecond {
		t.Errorf("pauses from %v to %v", first, last)
	}
}
