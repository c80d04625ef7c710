// Package rungroup runs the components of a process together and ends them in
// order.
//
// A component is a function that blocks until it is done. The context it gets
// means "take new work": when it ends, the component stops taking, finishes
// what it has, and returns. The work itself runs under another context,
// [Hard], which ends later: after a grace period, or at once on the second
// signal. The first component to return, with an error or without, stops all
// others, and the group returns when all have.
package rungroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// Component is one long-running part of a process.
type Component struct {
	// Name appears in logs and errors.
	Name string
	// Run blocks until the component has ended and has waited for every
	// goroutine of its own. It must end soon after Hard(ctx) is done.
	Run func(ctx context.Context) error
}

// Errors of a group.
var (
	// ErrGraceOver is the cause of a work context that ended because the grace
	// period was over.
	ErrGraceOver = errors.New("grace period is over")
	// ErrStuck is returned when components did not return although their work
	// context had ended.
	ErrStuck = errors.New("component did not stop")
)

// abandonAfter is how long a group waits for a component whose work context has
// ended. A component that ignores both contexts must not keep the process alive
// past the time that a supervisor gives it.
const abandonAfter = 5 * time.Second

// Run runs the components until ctx is done or one of them returns, then waits
// for all of them; see the package comment. The components' work context ends
// grace after they were asked to stop. Run returns the errors of the
// components, joined, each with its component's name; context.Canceled from a
// component that was asked to stop is not one. With no components it returns
// nil at once.
func Run(ctx context.Context, log zerolog.Logger, grace time.Duration, components ...Component) error {
	return Stages{components}.Run(ctx, log, grace)
}

// Stages are groups of components that run at the same time but stop one after
// the other: the components of a stage are asked to stop when all of the stage
// before have returned. What others lean on, such as an embedded server,
// belongs in the last stage.
type Stages [][]Component

// Run is like the function [Run]. The grace period counts anew for each stage,
// so that a last stage is not cut off for what the first one took.
func (s Stages) Run(ctx context.Context, log zerolog.Logger, grace time.Duration) error {
	return s.run(ctx, log, grace, abandonAfter)
}

func (s Stages) run(ctx context.Context, log zerolog.Logger, grace, abandon time.Duration) error {
	// first is closed when a component of any stage returns.
	var (
		once  sync.Once
		first = make(chan struct{})
	)
	var running []*stage
	for _, components := range s {
		if len(components) > 0 {
			running = append(running, start(ctx, log, components, func() { once.Do(func() { close(first) }) }))
		}
	}
	if len(running) == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		log.Info().AnErr("reason", context.Cause(ctx)).Dur("grace", grace).Msg("stopping")
	case <-first:
	}
	var errs []error
	for _, st := range running {
		errs = append(errs, st.end(parentHard(ctx), grace, abandon)...)
	}
	return errors.Join(errs...)
}

// stage is a started group of components.
type stage struct {
	log      zerolog.Logger
	soft     context.Context
	hard     context.Context
	stop     context.CancelFunc
	cut      context.CancelCauseFunc
	finished chan struct{}

	mu    sync.Mutex
	alive []string
	errs  []error
}

func start(ctx context.Context, log zerolog.Logger, components []Component, returned func()) *stage {
	st := &stage{log: log, finished: make(chan struct{})}
	// Neither context follows ctx by itself: a later stage must outlive it.
	base := context.WithoutCancel(ctx)
	st.hard, st.cut = context.WithCancelCause(base)
	st.soft, st.stop = context.WithCancel(withHard(base, st.hard))
	var wg sync.WaitGroup
	for _, c := range components {
		st.alive = append(st.alive, c.Name)
	}
	for _, c := range components {
		wg.Go(func() {
			err := c.Run(st.soft)
			st.ended(c.Name, err)
			returned()
		})
	}
	go func() {
		wg.Wait()
		close(st.finished)
	}()
	return st
}

func (st *stage) ended(name string, err error) {
	stopping := st.soft.Err() != nil
	st.mu.Lock()
	defer st.mu.Unlock()
	if i := slices.Index(st.alive, name); i >= 0 {
		st.alive = slices.Delete(st.alive, i, i+1)
	}
	switch {
	case stopping && (err == nil || errors.Is(err, context.Canceled)):
		st.log.Debug().Str("component", name).Msg("stopped")
	case err == nil:
		st.log.Info().Str("component", name).Msg("component is done; stopping the others")
	default:
		// Not logged here: the caller of Run gets it.
		st.errs = append(st.errs, fmt.Errorf("%s: %w", name, err))
	}
}

// end asks the stage to stop and waits for it.
func (st *stage) end(outer context.Context, grace, abandon time.Duration) []error {
	defer st.cut(context.Canceled)
	st.stop()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-st.finished:
		return st.result()
	case <-outer.Done():
		st.cutOff(context.Cause(outer))
	case <-timer.C:
		st.cutOff(ErrGraceOver)
	}
	last := time.NewTimer(abandon)
	defer last.Stop()
	select {
	case <-st.finished:
		return st.result()
	case <-last.C:
		return append(st.result(), fmt.Errorf("%w within %s of being cut off: %s", ErrStuck, abandon, strings.Join(st.left(), ", ")))
	}
}

// cutOff ends the work that is left. It tells whose before it does: afterwards
// they may be gone.
func (st *stage) cutOff(reason error) {
	st.log.Warn().Strs("components", st.left()).AnErr("reason", reason).Msg("cutting off the work that is left")
	st.cut(reason)
}

func (st *stage) left() []string {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Clone(st.alive)
}

func (st *stage) result() []error {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Clone(st.errs)
}

type hardKey struct{}

func withHard(ctx, hard context.Context) context.Context {
	return context.WithValue(ctx, hardKey{}, hard)
}

// parentHard is the work context around a group. A ctx that has none only ever
// means "stop taking work", so the group's grace period alone counts.
func parentHard(ctx context.Context) context.Context {
	if hard, ok := ctx.Value(hardKey{}).(context.Context); ok {
		return hard
	}
	return context.WithoutCancel(ctx)
}

// Hard returns the work context that belongs to ctx, the context of a component
// or one derived from it: it goes on when ctx has ended, and ends when work must
// stop too. Values that were added to ctx later are not in it. For any other
// ctx, Hard returns ctx itself, so that a component works outside a group as
// well.
func Hard(ctx context.Context) context.Context {
	if hard, ok := ctx.Value(hardKey{}).(context.Context); ok {
		return hard
	}
	return ctx
}
