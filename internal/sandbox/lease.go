package sandbox

import (
	"context"
	"sync"
	"time"
)

// Lease is the time for which commands may go on without a word from the program
// that started them. A supervisor is told of each extension and keeps the time by
// its own clock, so that a command ends in time also when the program is stopped
// or starved at that moment, and not merely when it is gone.
//
// Where there is no supervisor, the program alone has to stop its commands.
type Lease struct {
	mu    sync.Mutex
	until int64 // on the clock that all processes of this machine share
	procs map[*Process]struct{}
}

// Extend lets the commands under l, and those that will be, go on for left from
// now, whatever was said before.
func (l *Lease) Extend(left time.Duration) {
	now := clock() // before anything else: a pause here makes the lease shorter, never longer
	l.mu.Lock()
	l.until = now + int64(left)
	until := l.until
	procs := make([]*Process, 0, len(l.procs))
	for p := range l.procs {
		procs = append(procs, p)
	}
	l.mu.Unlock()
	for _, p := range procs {
		p.tell(until)
	}
}

// add puts p under l and returns until when it may go on; 0 is for ever.
func (l *Lease) add(p *Process) int64 {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.procs == nil {
		l.procs = map[*Process]struct{}{}
	}
	l.procs[p] = struct{}{}
	return l.until
}

func (l *Lease) remove(p *Process) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.procs, p)
}

type leaseKey struct{}

// WithLease returns a context under which tools start their commands under l.
func WithLease(ctx context.Context, l *Lease) context.Context {
	return context.WithValue(ctx, leaseKey{}, l)
}

// LeaseOf returns the lease of [WithLease], or nil.
func LeaseOf(ctx context.Context) *Lease {
	l, _ := ctx.Value(leaseKey{}).(*Lease)
	return l
}
