package tool

import (
	"context"
	"sync"
)

// Sequenced is a tool whose calls in one answer begin in the order in which the
// model wrote them, although they run side by side: what they hand over is
// queued somewhere, and first come is first served there.
type Sequenced interface {
	Tool
	// Sequenced marks the tool; it is never called. Its Call must ask
	// [AwaitTurn] before it begins, and should tell [EndTurn] once it has begun.
	Sequenced()
}

type turnKey struct{}

type turn struct {
	before *turn
	done   chan struct{}
	once   sync.Once
}

// Turns gives the sequenced calls of one answer their turns. The zero value is
// ready; it is used by one goroutine.
type Turns struct{ last *turn }

// Next returns the context of the next sequenced call. The caller must call end
// when that call has returned.
func (t *Turns) Next(ctx context.Context) (_ context.Context, end func()) {
	mine := &turn{before: t.last, done: make(chan struct{})}
	t.last = mine
	ctx = context.WithValue(ctx, turnKey{}, mine)
	return ctx, func() { EndTurn(ctx) }
}

// AwaitTurn waits until the sequenced calls before this one have begun. It
// returns ctx's cause when ctx is done first. A call outside of an answer never
// waits.
func AwaitTurn(ctx context.Context) error {
	t, ok := ctx.Value(turnKey{}).(*turn)
	if !ok {
		return nil
	}
	// All of them, not only the one before: a call that fails at once, its
	// arguments being no JSON, is over before those ahead of it have begun.
	for b := t.before; b != nil; b = b.before {
		select {
		case <-b.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// EndTurn tells that this call has begun, so that the next one may.
func EndTurn(ctx context.Context) {
	if t, ok := ctx.Value(turnKey{}).(*turn); ok {
		t.once.Do(func() { close(t.done) })
	}
}
