package run

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// fill makes the event stream refuse what is new; room ends that.
func (w *world) fill() (room func()) {
	w.t.Helper()
	stream, err := w.conn.JS.Stream(w.t.Context(), w.conn.Names.EventStream())
	if err != nil {
		w.t.Fatal(err)
	}
	was := stream.CachedInfo().Config
	if stream.CachedInfo().State.Msgs == 0 {
		w.publish(bus.Write{Subject: w.conn.Names.Event(contract.EventSubject{Tenant: "default", Thread: "t", Run: "r", Type: contract.EventRunMessage})})
	}
	full := was
	full.Discard, full.MaxMsgs = jetstream.DiscardNew, 1
	if _, err := w.conn.JS.UpdateStream(w.t.Context(), full); err != nil {
		w.t.Fatal(err)
	}
	return func() {
		w.t.Helper()
		if _, err := w.conn.JS.UpdateStream(w.t.Context(), was); err != nil {
			w.t.Error(err)
		}
	}
}

// F-146: an event stream that is full refuses a run while its caller can still be
// told what to do; nothing of it is left. With room again it begins.
func TestStartWhileEventsAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	room := w.fill()
	l := w.lead("lead-a", &scripted{answer: func(context.Context, int, model.Request) (model.Response, error) { return say("done") }})
	in := runapi.RunInput{Tenant: contract.DefaultTenant, Input: "go"}
	_, err := l.Start(t.Context(), in)
	if !errors.Is(err, leaderr.ErrUnavailable) || !strings.Contains(err.Error(), "HG_EVENTS refuses events") || !strings.Contains(err.Error(), "herdgate provision") {
		t.Errorf("Start = %v, want unavailable, and what to do", err)
	}
	if page, err := l.List(t.Context(), runapi.RunQuery{Tenant: contract.DefaultTenant, Limit: 10}); err != nil || len(page.Runs) != 0 {
		t.Errorf("runs = %+v, %v; want none", page.Runs, err)
	}
	if err := l.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "HG_EVENTS refuses events") {
		t.Errorf("Check = %v, want the refusal", err)
	}
	room()
	if rec := l.wait(l.start(in).RunID); rec.Status != contract.RunCompleted {
		t.Errorf("with room: %s %s", rec.Status, rec.Error)
	}
	if err := l.Check(t.Context()); err != nil {
		t.Errorf("Check with room = %v", err)
	}
}

// F-146: a run that goes on while the stream is full waits until there is room, and
// loses nothing. A lead that drains meanwhile hands it over.
func TestRunWaitsForRoom(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	var room func()
	filled := make(chan struct{})
	l := w.lead("lead-a", &scripted{answer: func(context.Context, int, model.Request) (model.Response, error) {
		room = w.fill()
		close(filled)
		return call("", model.ToolCall{ID: "a", Name: "nothing", Args: "{}"})
	}})
	rec := l.start(runapi.RunInput{Tenant: contract.DefaultTenant, Input: "go"})
	for _, ch := range []<-chan struct{}{filled, l.done} {
		select {
		case <-ch:
		case <-time.After(patience):
			t.Fatal("the run does not get on, or is not handed over")
		}
		l.drain()
	}
	if got, err := l.Get(t.Context(), contract.DefaultTenant, rec.RunID); err != nil || got.Status != contract.RunRunning {
		t.Errorf("while the stream is full: %s %s, %v; want running", got.Status, got.Error, err)
	}
	other := w.lead("lead-b", &scripted{answer: func(context.Context, int, model.Request) (model.Response, error) { return say("done") }})
	room()
	if rec := other.wait(rec.RunID); rec.Status != contract.RunCompleted || rec.Output != "done" {
		t.Errorf("with room: %s %q %s", rec.Status, rec.Output, rec.Error)
	}
}
