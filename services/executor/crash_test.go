package executor

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// letter is the newest dead letter of the executor, or its absence.
func (w *world) letter() (body, reason string) {
	w.Helper()
	m, err := w.bus.Last(w.ctx, w.bus.Names.DeadStream(), w.bus.Names.Dead("executor"))
	if err != nil {
		return "", err.Error()
	}
	return string(m.Data), m.Header.Get(bus.HeaderReason)
}

// panicky is a tool that panics as soon as somebody asks what it is.
type panicky struct{ tool.Tool }

func (panicky) Spec() model.ToolSpec { panic("no spec") }

// EXEC-03, STATUS-08, F-058: a panic anywhere in an attempt ends that attempt as
// an internal failure and touches no other one. What the panic said is told
// without secrets.
func TestPanicInAnAttempt(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		set    func(w *world)
		events string
		text   string
	}{
		{"model", func(w *world) {
			w.model.answers(func(context.Context, int) (model.Response, error) {
				panic("POST https://bob:hunter2@provider.example/v1")
			})
		}, "started failed", "provider.example"},
		{"tools are opened", func(w *world) {
			w.svc.deps.Tools = func(contract.TaskRequest) ([]tool.Tool, func(), error) { panic(fmt.Errorf("no workspace")) }
		}, "failed", "no workspace"},
		{"a tool is described", func(w *world) { w.tools = []tool.Tool{panicky{}} }, "failed", "no spec"},
		{"tools are closed", func(w *world) {
			w.svc.deps.Tools = func(contract.TaskRequest) ([]tool.Tool, func(), error) { return nil, func() { panic("no close") }, nil }
		}, "started running failed", "no close"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			started, release := make(chan struct{}), make(chan struct{})
			w.model.answers(func(context.Context, int) (model.Response, error) {
				close(started)
				<-release
				return model.Response{Message: model.Message{Text: "done"}}, nil
			})
			wait := w.background(w.begin(w.granted("t_other", 1)))
			<-started
			w.model.answers(func(context.Context, int) (model.Response, error) {
				return model.Response{Message: model.Message{Text: "done"}}, nil
			})
			c.set(w)
			w.background(w.begin(w.granted("t_1", 1)))()
			rec, _ := w.record("t_1")
			if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, c.text) || strings.Contains(rec.Error, "hunter2") {
				t.Errorf("record = %+v", rec)
			}
			if got := w.events("t_1"); got != c.events {
				t.Errorf("events = %s, want %s", got, c.events)
			}
			if n := w.svc.running(); n != 1 || w.count(w.svc.metrics.panics) != 1 {
				t.Errorf("%d attempts are left, want the other one; %v panics counted", n, w.count(w.svc.metrics.panics))
			}
			close(release)
			wait()
			if rec, _ := w.record("t_other"); rec.State != contract.StateCompleted {
				t.Errorf("the other attempt: %+v", rec)
			}
		})
	}
}

// F-058, I8: a grant whose handling panics is tried once more. After the second
// time it is kept among the dead letters with the reason, its task ends, and those
// behind it are run.
func TestGrantWhoseHandlingPanics(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		panics int
		state  contract.State
	}{
		{"once", 1, contract.StateCompleted},
		{"always", 1000, contract.StateFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			left := c.panics
			w.svc.decode = func(b []byte) (contract.Grant, error) {
				if strings.Contains(string(b), `"t_bad"`) && left > 0 {
					left--
					panic("api_key=hunter2 cannot be read")
				}
				return contract.DecodeGrant(b)
			}
			bad := w.granted("t_bad", 1)
			w.send(bad)
			w.send(w.granted("t_good", 1))
			for range 3 { // the bad one, the good one, the bad one again
				if run := w.svc.take(w.ctx, w.next()); run != nil {
					w.background(run)()
				}
			}
			w.dealtWith()
			if rec, _ := w.record("t_good"); rec.State != contract.StateCompleted {
				t.Errorf("the grant behind it: %+v", rec)
			}
			rec, _ := w.record("t_bad")
			if rec.State != c.state {
				t.Fatalf("record = %+v", rec)
			}
			if c.state != contract.StateFailed {
				return
			}
			body, reason := w.letter()
			if rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "crashed executors 2 times") || strings.Contains(rec.Error+reason, "hunter2") {
				t.Errorf("record = %+v, reason %q", rec, reason)
			}
			if body != string(w.json(bad)) || !strings.Contains(reason, "cannot be read") || c.panics-left != 2 {
				t.Errorf("dead letter %q: %q; %d panics, want 2", reason, body, c.panics-left)
			}
			if w.svc.running() != 0 || w.count(w.svc.metrics.panics) != 2 || w.count(w.svc.metrics.dead) != 1 {
				t.Errorf("%d attempts are left; %v panics, %v dead letters", w.svc.running(), w.count(w.svc.metrics.panics), w.count(w.svc.metrics.dead))
			}
		})
	}
}

// again makes the server deliver a grant once more, as it does when whoever had it
// said nothing.
func (w *world) again(msg jetstream.Msg) jetstream.Msg {
	w.Helper()
	if err := msg.Nak(); err != nil {
		w.Fatal(err)
	}
	return w.next()
}

// F-058, I8: a grant that ends its executors before they have claimed the task is
// not opened for ever.
func TestGrantThatEndsExecutors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.granted("t_1", 1)
	w.send(g)
	msg := w.next()
	for i := range 3 {
		if _, ok := w.svc.open(w.ctx, msg); !ok {
			t.Fatalf("it was not opened for the %d. time", i+1)
		}
		msg = w.again(msg) // nobody lived to say anything
	}
	if run := w.svc.take(w.ctx, msg); run != nil {
		t.Fatal("it was begun once more")
	}
	w.dealtWith()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "crashed executors 2 times") {
		t.Errorf("record = %+v", rec)
	}
	if body, reason := w.letter(); body != string(w.json(g)) || !strings.Contains(reason, "crashed executors") {
		t.Errorf("dead letter %q: %q", reason, body)
	}
	// The next task of the same name, or the next attempt of this one, begins anew.
	g = w.granted("t_1", 2)
	w.send(g)
	w.background(w.svc.take(w.ctx, w.again(w.next())))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted || rec.Attempt != 2 {
		t.Errorf("the next attempt: %+v", rec)
	}
}

// F-058: a grant that comes again for innocent reasons is no grant that crashes:
// it was given back, or it never reached the one to whom it was sent.
func TestGrantThatComesAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.send(w.granted("t_1", 1))
	msg := w.next()
	for range 5 {
		msg = w.again(msg) // it was lost on the way, or its receiver was paused
		o, ok := w.svc.open(w.ctx, msg)
		if !ok {
			t.Fatal("it was not opened")
		}
		w.svc.giveBack(msg, o) // as after a claim that got no answer, or in a drain
		msg = w.next()
	}
	w.background(w.svc.take(w.ctx, msg))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateCompleted {
		t.Errorf("record = %+v", rec)
	}
	if _, reason := w.letter(); !strings.Contains(reason, "no message") {
		t.Errorf("a dead letter: %s", reason)
	}
}
