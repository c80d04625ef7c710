package executor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
)

// takeGrants takes grants while there is room for a task, until ctx is done. Each
// is claimed and worked on in a goroutine of its own; turns see to it that the
// tasks begin in the order of their grants all the same.
func (s *Service) takeGrants(ctx, work context.Context, tasks *sync.WaitGroup) {
	p := places{room: s.cfg.MaxTasks, freed: make(chan struct{}, s.cfg.MaxTasks)}
	queue := &turns{}
	for ctx.Err() == nil {
		began := time.Now()
		err := s.pull(ctx, func(grants *bus.Puller) error {
			for {
				msg, err := p.next(ctx, grants)
				if err != nil || msg == nil {
					return err
				}
				turn := queue.next()
				tasks.Go(func() {
					defer p.free()
					defer turn.pass()
					if run := s.takeInTurn(work, msg, turn); run != nil {
						run()
					}
				})
			}
		})
		lost := errors.Is(err, bus.ErrPullLost)
		switch {
		case ctx.Err() != nil:
			return
		case lost:
			s.log.Debug().Err(err).Msg("asking for grants anew")
		default:
			s.ready("executor", err)
			s.log.Warn().Err(err).Msg("cannot take grants; trying again")
		}
		if !lost || time.Since(began) < time.Second {
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// pull lets fn take grants. What came and was not taken is given back when it
// returns.
func (s *Service) pull(ctx context.Context, fn func(*bus.Puller) error) error {
	setup, cancel := context.WithTimeout(ctx, bus.WriteTimeout)
	defer cancel()
	name := s.bus.Names.GrantConsumer(s.cfg.Pool)
	grants, err := s.bus.Pull(setup, s.bus.Names.GrantStream(), name)
	if err != nil {
		return fmt.Errorf("grants of pool %s: consumer %s of stream %s: %w", s.cfg.Pool, name, s.bus.Names.GrantStream(), bus.Classify(err))
	}
	defer grants.Close()
	s.ready("executor", nil)
	return fn(grants)
}

// places are those that no task is in. One goroutine takes them, any may free one.
type places struct {
	room  int
	freed chan struct{} // with room for all
}

func (p *places) free() { p.freed <- struct{}{} }

// next waits for a grant and takes a place for it; nothing when ctx is done. Never
// more is asked for than there are places: what could not run at once stays for
// others.
func (p *places) next(ctx context.Context, grants *bus.Puller) (jetstream.Msg, error) {
	for ctx.Err() == nil {
		for len(p.freed) > 0 {
			<-p.freed
			p.room++
		}
		msg, ok, err := grants.Next(ctx, p.room, p.freed)
		switch {
		case err != nil:
			return nil, err
		case ok && ctx.Err() != nil:
			_ = msg.Nak() // it came while we were about to leave
			return nil, nil
		case ok:
			p.room--
			return msg, nil
		case ctx.Err() == nil:
			p.room++
		}
	}
	return nil, nil
}

// turns is a queue of tasks that are about to begin. They are claimed side by side,
// but what tells of their beginning is sent in the order of their grants.
type turns struct{ last chan struct{} }

func (q *turns) next() *turn {
	t := &turn{before: q.last, over: make(chan struct{})}
	q.last = t.over
	return t
}

// turn is a place in the queue; nil is always first.
type turn struct {
	before <-chan struct{} // nil when there is nobody
	over   chan struct{}
	once   sync.Once
}

// await waits for the turn, or until ctx is done.
func (t *turn) await(ctx context.Context) {
	if t == nil || t.before == nil {
		return
	}
	select {
	case <-t.before:
	case <-ctx.Done():
	}
}

// pass lets the next one go, once it is our turn.
func (t *turn) pass() {
	if t == nil {
		return
	}
	t.await(context.Background())
	t.once.Do(func() { close(t.over) })
}

// giveWay lets the next one go if it is our turn: beginning takes longer than it
// should.
func (t *turn) giveWay() {
	if t == nil {
		return
	}
	if t.before != nil {
		select {
		case <-t.before:
		default:
			return
		}
	}
	t.once.Do(func() { close(t.over) })
}
