package bus

import (
	"context"
	"errors"
	"sync"
)

// errCut is why nobody waits any longer for an answer.
var errCut = errors.New("the connection to NATS was lost before the answer came")

// line tells those who wait for an answer that it cannot come any more: the
// connection on which they asked is gone. Without it every request that is under
// way when a server restarts would wait for its whole time, and with it a lease
// that has to be renewed.
type line struct {
	mu    sync.Mutex
	ctx   context.Context //nolint:containedctx // the life of one connection
	close context.CancelCauseFunc
}

func newLine() *line {
	l := &line{}
	l.ctx, l.close = context.WithCancelCause(context.Background())
	return l
}

// cut ends the waits on the connection that was lost. What is asked from here on
// is asked on the next one, or refused at once while there is none.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close(errCut)
	l.ctx, l.close = context.WithCancelCause(context.Background())
}

// whole returns a context that ends with ctx, or when the line is cut. hangUp
// must be called.
func (l *line) whole(ctx context.Context) (whole context.Context, hangUp func()) {
	if l == nil {
		return ctx, func() {}
	}
	l.mu.Lock()
	connection := l.ctx
	l.mu.Unlock()
	whole, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(connection, func() { cancel(errCut) })
	return whole, func() { stop(); cancel(nil) }
}
