package executor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// EXEC-03, protocol W8, W9, W11, W15: what one attempt writes, and in what order.
func TestOneAttempt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.granted("t_1", 1)
	g.LastEventSeq = w.told(w.admitted(g.Record))
	run := w.begin(g)
	claimed, _ := w.record("t_1")
	if claimed.State != contract.StateRunning || claimed.Executor != "ex-1" || claimed.StartedAt == nil || claimed.Writer == "gate/1" {
		t.Errorf("claimed record = %+v", claimed)
	}
	if m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.LeaseKey("t_1"))); err != nil || m.Seq < g.Revision {
		t.Errorf("no lease: %v", err)
	}
	w.dealtWith()
	w.background(run)()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateCompleted || rec.Result != "done" || rec.Usage.TotalTokens != 5 || rec.ModelName != "fake-1" || rec.Writer == claimed.Writer {
		t.Errorf("record = %+v", rec)
	}
	if got := w.events("t_1"); got != "admitted started running completed" {
		t.Errorf("events = %s", got)
	}
}

// F-056, protocol W8, W9, section 6: a grant whose record has moved, even to an end
// that was never acknowledged, is void. It is acknowledged, nothing is written, and
// the model is not asked.
func TestVoidGrant(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		move func(*contract.TaskRecord)
	}{
		{"claimed by somebody else", func(r *contract.TaskRecord) { r.State, r.Executor = contract.StateRunning, "ex-2" }},
		{"handed back and granted again", func(r *contract.TaskRecord) { r.Attempt = 2 }},
		{"cancelled", func(r *contract.TaskRecord) { r.State, r.FinishedAt = contract.StateCancelled, r.GrantedAt }},
		{"completed", func(r *contract.TaskRecord) {
			r.State, r.Result, r.StartedAt, r.FinishedAt = contract.StateCompleted, "done", r.GrantedAt, r.GrantedAt
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			g := w.granted("t_1", 1)
			rec := g.Record
			c.move(&rec)
			rec.Writer = "gate/2"
			rev := w.put(rec, g.Revision)
			if run := w.begin(g); run != nil {
				t.Fatal("a void grant was taken")
			}
			w.dealtWith()
			if _, now := w.record("t_1"); now != rev || w.model.asked() != 0 || w.events("t_1") != "" {
				t.Errorf("record at %d, want %d; %d model calls; events %s", now, rev, w.model.asked(), w.events("t_1"))
			}
			if _, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.LeaseKey("t_1"))); !errors.Is(err, bus.ErrNotFound) {
				t.Errorf("a lease was written: %v", err)
			}
		})
	}
}

// CANCEL-01, CANCEL-02, I7, protocol section 3, rule 2: a cancellation that was
// written before the claim is seen before the first effect.
func TestCancelledBeforeTheClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.granted("t_1", 1)
	if _, err := w.bus.Publish(w.ctx, bus.Write{Subject: w.bus.KV(contract.CancelKey("t_1")), Data: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	w.background(w.begin(g))()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateCancelled || w.model.asked() != 0 || w.events("t_1") != "cancelled" {
		t.Errorf("record = %+v after %d model calls, events %s", rec, w.model.asked(), w.events("t_1"))
	}
}

// STATUS-08: an end before the first model call is written like any other.
func TestNoWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.noWS = errors.New("disk is full")
	w.background(w.begin(w.granted("t_1", 1)))()
	if rec, _ := w.record("t_1"); rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "disk is full") {
		t.Errorf("record = %+v", rec)
	}
}

// Protocol W9: the claim landed and its answer was lost; it is read back as ours,
// not taken for somebody else's.
func TestWriteLosesItsAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, natstest.Listen())
	proxy := w.srv.Proxy()
	w.svc = w.service(w.srv.Connect(bus.Config{Name: "ex-1", URL: proxy.URL()}))
	g := w.granted("t_1", 1)
	a := &attempt{s: w.svc, grant: g, rec: g.Record, rev: g.Revision, log: w.svc.log, span: noop.Span{}}
	rec := g.Record
	rec.State, rec.Writer = contract.StateRunning, "ex-1/1"
	proxy.LoseAnswers()
	type result struct {
		rev uint64
		ok  bool
		err error
	}
	done := make(chan result, 1)
	go func() {
		rev, ok, err := a.write(w.ctx, rec, g.Revision)
		done <- result{rev, ok, err}
	}()
	natstest.Eventually(t, patience, func() (bool, string) { r, _ := w.record("t_1"); return r.State == contract.StateRunning, "not landed" })
	proxy.Cut()
	r := <-done
	if _, rev := w.record("t_1"); r.err != nil || !r.ok || r.rev != rev {
		t.Errorf("write = %+v, stored at %d", r, rev)
	}
	// The same of somebody else is a refusal.
	rec.Writer = "ex-1/2"
	if rev, ok, err := a.write(w.ctx, rec, g.Revision); ok || err != nil || rev != r.rev {
		t.Errorf("write over a moved record = %d, %v, %v", rev, ok, err)
	}
}

// Protocol section 2: on a cluster a write can be refused although nothing has
// moved. The record is read, and the write sent again. One server never does so,
// therefore the test answers in its place.
func TestRefusedAlthoughUnmoved(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	w := &world{T: t, srv: s, bus: s.Conn("test"), clock: &clock{}, ctx: t.Context(), model: &fakeModel{}}
	w.svc = w.service(s.Conn("ex-1"))
	const rev = 41
	var writes atomic.Int32
	server := func(subject string, answer func(n int32) string) {
		t.Helper()
		if _, err := w.bus.NC.Subscribe(subject, func(m *nats.Msg) { _ = m.Respond([]byte(answer(writes.Add(1)))) }); err != nil {
			t.Fatal(err)
		}
	}
	refuseOnce := func(n int32) string {
		if n == 1 {
			return `{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}`
		}
		return fmt.Sprintf(`{"stream":"KV_HG_TASKS","seq":%d}`, rev+1)
	}
	server(w.bus.KV("*.t_1"), refuseOnce)
	if _, err := w.bus.NC.Subscribe("$JS.API.STREAM.MSG.GET."+w.bus.TaskStream(), func(m *nats.Msg) {
		_ = m.Respond(w.json(map[string]any{"message": map[string]any{"subject": w.bus.KV("task.t_1"), "seq": rev, "data": []byte("{}"), "time": time.Now()}}))
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.bus.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	a := &attempt{s: w.svc, grant: contract.Grant{TaskID: "t_1", Attempt: 1}, ttl: leaseTTL, base: w.svc.now(), log: w.svc.log, span: noop.Span{}}
	if ok, err := a.heartbeat(w.ctx, rev); !ok || err != nil || writes.Load() != 2 {
		t.Errorf("heartbeat = %v, %v after %d writes, want the second to count", ok, err, writes.Load())
	}
	writes.Store(0)
	if got, ok, err := a.write(w.ctx, contract.TaskRecord{TaskID: "t_1"}, rev); !ok || err != nil || got != rev+1 || writes.Load() != 2 {
		t.Errorf("write = %d, %v, %v after %d writes", got, ok, err, writes.Load())
	}
}

// EXEC-03, I5, protocol section 3, rule 3: when the lease is over by the
// attempt's own clock, its work is stopped and nothing is written any more,
// although the server would still take it.
func TestLeaseOverByOwnClock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	started := w.model.holds()
	wait := w.background(w.begin(w.granted("t_1", 1)))
	<-started
	w.clock.jump(leaseTTL)
	wait()
	if rec, _ := w.record("t_1"); rec.State != contract.StateRunning || w.fenced() != 1 || w.events("t_1") != "started" {
		t.Errorf("record = %+v, fenced %v, events %s", rec, w.fenced(), w.events("t_1"))
	}
}

// I5: the gate before each effect asks the clock, and so does each event.
func TestGateAsksTheClock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, ctx := w.attempt(w.granted("t_1", 1))
	if err := a.gate(); err != nil {
		t.Fatal(err)
	}
	w.clock.jump(a.ttl - margin(a.ttl)) // the server keeps the lease a moment longer
	if err := a.gate(); !errors.Is(err, errLeaseOver) || !errors.Is(context.Cause(ctx), errLeaseOver) {
		t.Errorf("gate = %v, cause %v", err, context.Cause(ctx))
	}
	err := a.publish(ctx, event.Running(a.rec, 1, contract.Step{Kind: contract.StepAI}, "m", nil, "s", w.clock.now()))
	if !errors.Is(err, errLeaseOver) || w.events("t_1") != "" {
		t.Errorf("publish = %v, events %s", err, w.events("t_1"))
	}
	for ttl, want := range map[time.Duration]time.Duration{time.Second: 250 * time.Millisecond, 15 * time.Second: 2 * time.Second} {
		if got := margin(ttl); got != want {
			t.Errorf("margin(%v) = %v, want %v", ttl, got, want)
		}
	}
}

// CANCEL-01, CANCEL-03, protocol W10, W11: the gate's mark is read when the
// renewal is refused; the end is written on the marked revision, with what was
// spent.
func TestCancelMark(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	started := w.model.holds()
	wait := w.background(w.begin(w.granted("t_1", 1)))
	<-started
	rec, rev := w.record("t_1")
	rec.CancelRequested, rec.Writer = true, "gate/2"
	w.put(rec, rev)
	wait()
	rec, _ = w.record("t_1")
	if rec.State != contract.StateCancelled || rec.Usage == nil || rec.Usage.TotalTokens != 7 || w.events("t_1") != "started cancelled" || w.fenced() != 0 {
		t.Errorf("record = %+v, fenced %v, events %s", rec, w.fenced(), w.events("t_1"))
	}
}

// I5, protocol W10: a record that has moved on ends the attempt without a word.
func TestMovedOn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		move func(*contract.TaskRecord)
	}{
		{"ended", func(r *contract.TaskRecord) { r.State, r.FinishedAt = contract.StateFailed, r.GrantedAt }},
		{"granted again", func(r *contract.TaskRecord) { r.State, r.Attempt = contract.StateGranted, 2 }},
		{"another attempt with a mark", func(r *contract.TaskRecord) { r.Attempt, r.CancelRequested = 2, true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			started := w.model.holds()
			wait := w.background(w.begin(w.granted("t_1", 1)))
			<-started
			rec, rev := w.record("t_1")
			c.move(&rec)
			rec.Writer = "gate/2"
			rev = w.put(rec, rev)
			wait()
			if _, now := w.record("t_1"); now != rev || w.fenced() != 1 || w.events("t_1") != "started" {
				t.Errorf("record at %d, want %d; fenced %v, events %s", now, rev, w.fenced(), w.events("t_1"))
			}
		})
	}
}

// CANCEL-04, CANCEL-05, protocol W11: what becomes of an end whose record has moved.
func TestEndMeetsAnotherWrite(t *testing.T) {
	t.Parallel()
	end := outcome.Map(outcome.Outcome{Kind: outcome.StreamFinished, LastAnswer: &outcome.Answer{Text: "late"}})
	for _, c := range []struct {
		name  string
		move  func(*contract.TaskRecord)
		state contract.State
		event string
	}{
		{"a mark", func(r *contract.TaskRecord) { r.CancelRequested = true }, contract.StateCancelled, "cancelled"},
		{"the backstop", func(r *contract.TaskRecord) { r.State, r.FinishedAt = contract.StateTimedOut, r.GrantedAt }, contract.StateTimedOut, ""},
		{"another attempt", func(r *contract.TaskRecord) { r.Attempt = 2 }, contract.StateRunning, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a, ctx := w.attempt(w.granted("t_1", 1))
			rec := a.rec
			c.move(&rec)
			rec.Writer = "gate/2"
			w.put(rec, a.rev)
			a.finish(ctx, end)
			if rec, _ := w.record("t_1"); rec.State != c.state || rec.Result != "" || w.events("t_1") != c.event {
				t.Errorf("record = %+v, events %q", rec, w.events("t_1"))
			}
		})
	}
}

// F-178, protocol W12: a hand-back says whether an effect had begun.
func TestHandBackTellsWhetherItStarted(t *testing.T) {
	t.Parallel()
	for _, begun := range []bool{false, true} {
		w := newWorld(t)
		a, ctx := w.attempt(w.granted("t_1", 1))
		a.begun.Store(begun)
		a.handBack(ctx, outcome.End{})
		if rec, _ := w.record("t_1"); rec.State != contract.StateReleased || rec.Started != begun || rec.Attempt != 1 || rec.Slot != 1 || w.events("t_1") != "" {
			t.Errorf("begun %v: record = %+v", begun, rec)
		}
	}
}

// CANCEL-01, protocol W12 "as W11": a hand-back that meets the mark of a
// cancellation ends the task as cancelled instead of leaving it to its lease.
func TestHandBackMeetsAnotherWrite(t *testing.T) {
	t.Parallel()
	for _, mark := range []bool{true, false} {
		w := newWorld(t)
		a, ctx := w.attempt(w.granted("t_1", 1))
		rec := a.rec
		rec.Writer = "gate/2"
		want := contract.StateCancelled
		if mark {
			rec.CancelRequested = true
		} else {
			rec.State, rec.Attempt, want = contract.StateGranted, 2, contract.StateGranted
		}
		w.put(rec, a.rev)
		a.handBack(ctx, outcome.End{Usage: &contract.Usage{TotalTokens: 9}})
		rec, _ = w.record("t_1")
		if rec.State != want || mark && (rec.Usage == nil || rec.Usage.TotalTokens != 9 || w.events("t_1") != "cancelled") {
			t.Errorf("mark %v: record = %+v, events %s", mark, rec, w.events("t_1"))
		}
	}
}

// F-178, protocol section 3, rule 6: a process that drains hands back what still
// runs, and leaves grants that it has not claimed to others.
func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	started := w.model.holds()
	w.send(w.granted("t_1", 1))
	ctx, stop := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- w.svc.Run(ctx) }()
	<-started
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if rec, _ := w.record("t_1"); rec.State != contract.StateReleased || !rec.Started || w.events("t_1") != "started" {
		t.Errorf("record = %+v, events %s", rec, w.events("t_1"))
	}
	// A grant that comes while it stops is not taken, and not kept from others.
	w.send(w.granted("t_2", 1))
	err := w.svc.pull(w.ctx, func(grants *bus.Puller) error {
		p := places{room: 1}
		if msg, err := p.next(ctx, grants); msg != nil {
			t.Error("a process that drains has taken a grant")
		} else {
			return err
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if n := w.unacked(); n != 1 {
		t.Errorf("%d grants are left, want 1", n)
	}
}

// Protocol W18: what an event is chained to after a refusal.
func TestChainOn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		last   func(w *world, a *attempt, mine envelope.Event) // what stands there
		stored bool
		err    error
	}{
		{"nothing: it has aged out", func(*world, *attempt, envelope.Event) {}, false, nil},
		{"admitted, of this attempt", func(w *world, a *attempt, _ envelope.Event) { w.told(w.admitted(a.rec)) }, false, nil},
		{"a step of an earlier attempt", func(w *world, a *attempt, mine envelope.Event) {
			mine.ID, mine.Attempt = "earlier", 1
			w.told(mine)
		}, false, nil},
		{"our own", func(w *world, _ *attempt, mine envelope.Event) { w.told(mine) }, true, nil},
		{"a later attempt", func(w *world, a *attempt, _ envelope.Event) {
			rec := a.rec
			rec.Attempt = 3
			w.told(w.admitted(rec))
		}, false, errFenced},
		{"the end", func(w *world, a *attempt, _ envelope.Event) {
			rec, now := a.rec, time.Now()
			rec.State, rec.FinishedAt = contract.StateFailed, &now
			ev, err := event.Terminal(rec, "s")
			if err != nil {
				w.Fatal(err)
			}
			w.told(ev)
		}, false, errFenced},
		{"what nobody can read", func(w *world, _ *attempt, mine envelope.Event) {
			if _, err := w.bus.Publish(w.ctx, bus.Write{Subject: mine.NATSSubject(w.bus.Names), Data: []byte("{")}); err != nil {
				w.Fatal(err)
			}
		}, false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a, ctx := w.attempt(w.granted("t_1", 2))
			a.last = 999 // whatever stands there, it is not this
			mine := event.Running(a.rec, 1, contract.Step{Kind: contract.StepAI, Text: "x"}, "m", nil, "s", time.Now())
			c.last(w, a, mine)
			before := strings.Fields(w.events("t_1"))
			stored, err := a.chainOn(ctx, mine.ID, w.bus.Names.TaskEvents(a.rec.Tenant, a.rec.ThreadID, a.rec.RunID, a.rec.TaskID))
			if stored != c.stored || !errors.Is(err, c.err) {
				t.Fatalf("chainOn = %v, %v", stored, err)
			}
			if fenced := errors.Is(context.Cause(ctx), errFenced); fenced != (c.err != nil) {
				t.Errorf("the work is stopped: %v", fenced)
			}
			// The whole: stored once, or not at all.
			a.last = 999
			err = a.publish(ctx, mine)
			after := strings.Fields(w.events("t_1"))
			grown := len(after) - len(before)
			if want := map[bool]int{true: 0, false: 1}[c.stored || c.err != nil]; grown != want || c.err == nil && err != nil {
				t.Errorf("publish = %v, events %v then %v", err, before, after)
			}
		})
	}
}

// F-058, ADM-09, I8: a grant that nobody can read is kept among the dead letters,
// and its task ends, for a granted record never expires. Nothing happens to a task
// that such a grant is not the newest of.
func TestUnreadableGrant(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		data string
		// before changes what is granted and returns the grant that is sent.
		before func(w *world) contract.Grant
		state  contract.State
	}{
		{"cut", `{"task_id":`, func(w *world) contract.Grant { return w.granted("t_1", 1) }, contract.StateFailed},
		{"of another version", `{"task_id":"t_1","attempt":1}`, func(w *world) contract.Grant { return w.granted("t_1", 1) }, contract.StateFailed},
		{"of another revision", "", func(w *world) contract.Grant { g := w.granted("t_1", 1); g.Revision++; return g }, contract.StateFailed},
		{"for another task", "", func(w *world) contract.Grant {
			g := w.granted("t_1", 1)
			g.Request.TaskID, g.Record.TaskID = "t_2", "t_2"
			return g
		}, contract.StateFailed},
		{"with another task's record", "", func(w *world) contract.Grant { g := w.granted("t_1", 1); g.Record.TaskID = "t_2"; return g }, contract.StateFailed},
		{"with a record of another attempt", "", func(w *world) contract.Grant { g := w.granted("t_1", 1); g.Record.Attempt = 2; return g }, contract.StateFailed},
		{"of an earlier attempt", `{`, func(w *world) contract.Grant {
			g := w.granted("t_1", 1)
			w.granted("t_1", 2)
			return g
		}, contract.StateGranted},
		{"of a running task", `{`, func(w *world) contract.Grant {
			g := w.granted("t_1", 1)
			rec := g.Record
			rec.State = contract.StateRunning
			w.put(rec, g.Revision)
			return g
		}, contract.StateRunning},
		{"of no task", `{`, func(*world) contract.Grant { return contract.Grant{TaskID: "t_1", Attempt: 1} }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			g := c.before(w)
			data := []byte(c.data)
			if c.data == "" {
				data = w.json(g)
			}
			w.send(g, data...)
			if run := w.svc.take(w.ctx, w.next()); run != nil {
				t.Fatal("it was taken")
			}
			w.dealtWith()
			rec, _ := w.record("t_1")
			if rec.State != c.state || c.state == contract.StateFailed && (rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "could not read")) {
				t.Errorf("record = %+v", rec)
			}
			m, err := w.bus.Last(w.ctx, w.bus.Names.DeadStream(), w.bus.Names.Dead("executor"))
			if err != nil || string(m.Data) != string(data) || m.Header.Get(bus.HeaderReason) == "" || !strings.HasSuffix(m.Header.Get(bus.HeaderOriginSubject), ".t_1") {
				t.Errorf("dead letter = %+v, %v", m, err)
			}
		})
	}
}

// F-140, RESULT-03: results at and above the bounds.
func TestLargeResults(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, ctx := w.attempt(w.granted("t_1", 1))
	end := func(text string) outcome.End {
		return a.storeLarge(ctx, outcome.Map(outcome.Outcome{Kind: outcome.StreamFinished, LastAnswer: &outcome.Answer{Text: text}}))
	}
	inline := strings.Repeat("x", contract.MaxInlineResultBytes-2) // with its quotes
	if e := end(inline); e.Result != inline || e.ResultRef != nil || e.ResultTruncated {
		t.Errorf("a result at the bound was moved: %+v", e.ResultRef)
	}
	for name, text := range map[string]string{
		"one byte more":     inline + "x",
		"more when encoded": strings.Repeat("\n", contract.MaxInlineResultBytes/2),
	} {
		e := end(text)
		if e.ResultRef == nil || e.ResultTruncated || len(e.Result) != contract.MaxStepChars {
			t.Fatalf("%s: ref %v, %d bytes", name, e.ResultRef, len(e.Result))
		}
		if b, err := w.bus.GetBlob(ctx, *e.ResultRef); err != nil || string(b) != text {
			t.Errorf("%s: blob of %d bytes, %v", name, len(b), err)
		}
	}
	e := end(strings.Repeat("界", contract.MaxResultBytes/3+1))
	if e.ResultRef == nil || !e.ResultTruncated || e.ResultRef.Size > contract.MaxResultBytes || e.ResultRef.Size < contract.MaxResultBytes-3 {
		t.Errorf("a result without end: ref %+v, truncated %v", e.ResultRef, e.ResultTruncated)
	}
	// An end that was reached is not lost to a stop that comes during the transfer.
	a.cancel(errHandBack)
	if e := end(inline + "x"); e.ResultRef == nil {
		t.Error("a result was cut because the work was stopped")
	}
	if err := w.bus.JS.DeleteObjectStore(w.ctx, w.bus.Names.BlobStore()); err != nil {
		t.Fatal(err)
	}
	e = end(inline + "x")
	if e.ResultRef != nil || !e.ResultTruncated || len(e.Result) == 0 {
		t.Errorf("without a blob store: ref %v, truncated %v, %d bytes", e.ResultRef, e.ResultTruncated, len(e.Result))
	}
	if rec, ok, err := a.terminal(w.ctx, a.rec, e, a.rev); err != nil || !ok || rec.State != contract.StateCompleted {
		t.Errorf("terminal = %v, %v", ok, err)
	}
}
