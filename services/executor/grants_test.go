package executor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// serve runs the executor until the test ends.
func (w *world) serve(s *Service) {
	w.Helper()
	ctx, stop := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	w.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			w.Error(err)
		}
	})
}

// I2, ADM-05: tasks are claimed side by side, but begin in the order of their grants,
// also when the first of them takes longest to get ready.
func TestGrantsBeginInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.holds()
	s := w.service(w.srv.Conn("ex-2"), func(c *Config) { c.MaxTasks = 4 })
	var ready sync.WaitGroup
	ready.Add(3)
	s.deps.Tools = func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
		if req.TaskID == "t_0" {
			ready.Wait()
		} else {
			ready.Done()
		}
		return nil, func() {}, nil
	}
	var want []string
	for i := range 4 {
		id := fmt.Sprint("t_", i)
		w.send(w.granted(id, 1))
		want = append(want, id)
	}
	w.serve(s)
	var got []string
	natstest.Eventually(t, patience, func() (bool, string) {
		got = w.startedInOrder()
		return len(got) == len(want), fmt.Sprint("begun: ", got)
	})
	if !slices.Equal(got, want) {
		t.Errorf("begun in the order %v", got)
	}
}

// startedInOrder returns the tasks of started events.
func (w *world) startedInOrder() []string {
	w.Helper()
	stream, err := w.bus.JS.Stream(w.ctx, w.bus.Names.EventStream())
	if err != nil {
		w.Fatal(err)
	}
	var ids []string
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		m, err := w.bus.Get(w.ctx, w.bus.Names.EventStream(), seq)
		if err != nil {
			w.Fatal(err)
		}
		if e, err := w.bus.Names.ParseEvent(m.Subject); err == nil && e.Type == contract.EventTaskStarted {
			ids = append(ids, string(e.Task))
		}
	}
	return ids
}

// Nobody waits for one who does not get on, and one who is done early does not let
// others pass those before it.
func TestTurns(t *testing.T) {
	t.Parallel()
	q := &turns{}
	first, second, third := q.next(), q.next(), q.next()
	passed := func(t *turn) bool {
		select {
		case <-t.over:
			return true
		default:
			return false
		}
	}
	second.giveWay()
	if passed(second) {
		t.Error("the second gave way before it had its turn")
	}
	done := make(chan struct{})
	go func() { defer close(done); second.pass() }()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	third.await(cancelled) // returns, but has no turn
	if passed(second) {
		t.Error("the second passed before the first")
	}
	first.giveWay()
	first.pass()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("the second waits for the first, who gave way")
	}
	third.await(t.Context())
	third.pass()
	third.pass()
	var none *turn
	none.await(t.Context())
	none.giveWay()
	none.pass()
}

// I2, I8: what an executor has no place for stays for others.
func TestGrantsStayForOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	started := w.model.holds()
	w.send(w.granted("t_0", 1))
	w.serve(w.service(w.srv.Conn("ex-2"), func(c *Config) { c.Name, c.MaxTasks = "ex-2", 1 }))
	<-started
	for i := range 3 {
		w.send(w.granted(fmt.Sprint("t_", i+1), 1))
	}
	// t_0 may be acknowledged a moment after its work began.
	natstest.Eventually(t, patience, func() (bool, string) {
		n := w.unacked()
		return n == 3, fmt.Sprintf("%d grants are open, want 3", n)
	})
	w.serve(w.service(w.srv.Conn("ex-3"), func(c *Config) { c.Name, c.MaxTasks = "ex-3", 8 }))
	natstest.Eventually(t, patience, func() (bool, string) {
		var got []string
		for i := range 4 {
			rec, _ := w.record(fmt.Sprint("t_", i))
			got = append(got, rec.Executor)
		}
		return strings.Join(got, " ") == "ex-2 ex-3 ex-3 ex-3", fmt.Sprint("executors: ", got)
	})
}

// I7: a task that is cancelled while it waits for its turn ends at once, whoever is
// before it.
func TestCancelledBeforeItsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	q := &turns{}
	first, second := q.next(), q.next()
	defer first.pass()
	w.send(w.granted("t_1", 1))
	msg := w.next()
	waiting := make(chan struct{})
	w.svc.deps.Tools = func(contract.TaskRequest) ([]tool.Tool, func(), error) {
		close(waiting)
		return nil, func() {}, nil
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if run := w.svc.takeInTurn(w.ctx, msg, second); run != nil {
			run()
		}
	}()
	<-waiting
	w.svc.heardCancel(&nats.Msg{Subject: w.bus.KV(contract.CancelKey("t_1"))})
	select {
	case <-ended:
	case <-time.After(patience):
		first.pass()
		t.Error("it waits for its turn although it was cancelled")
		<-ended
	}
	if rec, _ := w.record("t_1"); rec.State != contract.StateCancelled {
		t.Errorf("the record is %q, want it cancelled", rec.State)
	}
	if got := w.events("t_1"); got != "cancelled" {
		t.Errorf("events: %s", got)
	}
}
