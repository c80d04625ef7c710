package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// twoTasks delegates twice in its first answer and quotes the results after.
func twoTasks(_ context.Context, _ int, req model.Request) (model.Response, error) {
	if got := results(req); len(got) > 0 {
		return say("got " + got[0].Text + " / " + got[len(got)-1].Text)
	}
	return call("", taskCall("a", "Oslo"), taskCall("b", "Quito"))
}

// CANCEL-08, CANCEL-02, CANCEL-04, CANCEL-05, USAGE-04, F-016: cancelling a run, from a
// replica that does not drive it, cancels its tasks, counts what they spent and
// leaves the thread usable.
func TestCancelRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	m := &scripted{answer: func(ctx context.Context, turn int, req model.Request) (model.Response, error) {
		if last := req.Messages[len(req.Messages)-1]; last.Text == "and now?" {
			return say("nothing runs")
		}
		return twoTasks(ctx, turn, req)
	}}
	l := w.lead("lead-a", m)
	other := w.lead("lead-b", &scripted{answer: twoTasks})
	rec := l.start(runapi.RunInput{ThreadID: "t"})
	w.gate.await(2)
	if err := other.Cancel(t.Context(), "acme", rec.RunID); !errors.Is(err, leaderr.ErrNotFound) {
		t.Errorf("another tenant's cancel: %v, want not found", err)
	}
	began := time.Now()
	if err := other.Cancel(t.Context(), contract.DefaultTenant, rec.RunID); err != nil {
		t.Fatal(err)
	}
	rec = other.wait(rec.RunID)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the cancellation took %v", took)
	}
	if rec.Status != contract.RunCancelled || rec.Usage == nil || rec.Usage.TotalTokens != 12+2*8 {
		t.Errorf("run ended %s with usage %+v, want cancelled and %d", rec.Status, rec.Usage, 12+2*8)
	}
	for _, d := range rec.Delegations {
		if d.Status != "cancelled" {
			t.Errorf("delegation %s is %s", d.Description, d.Status)
		}
	}
	var ends []string
	for _, ev := range w.events(rec.RunID) {
		if ev.Type.Terminal() {
			ends = append(ends, string(ev.Type))
		}
	}
	if fmt.Sprint(ends) != "[task_cancelled task_cancelled run_cancelled]" {
		t.Errorf("ends = %v", ends)
	}
	var finished *leaderr.FinishedError
	if err := l.Cancel(t.Context(), contract.DefaultTenant, rec.RunID); !errors.As(err, &finished) || finished.Status != "cancelled" {
		t.Errorf("a second cancel: %v, want already finished", err)
	}
	// paired() in the model checks that the open calls were closed.
	next := l.wait(l.start(runapi.RunInput{ThreadID: "t", Input: "and now?"}).RunID)
	if next.Output != "nothing runs" || len(next.Delegations) != 0 {
		t.Errorf("the next run = %q, %+v", next.Output, next.Delegations)
	}
}

// CANCEL-01: a model call that hangs is cut by a cancellation.
func TestCancelDuringAModelCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	asked := make(chan struct{})
	m := &scripted{answer: func(ctx context.Context, _ int, _ model.Request) (model.Response, error) {
		close(asked)
		<-ctx.Done()
		return model.Response{}, context.Cause(ctx)
	}}
	l := w.lead("lead-a", m)
	rec := l.start(runapi.RunInput{})
	<-asked
	if err := l.Cancel(t.Context(), contract.DefaultTenant, rec.RunID); err != nil {
		t.Fatal(err)
	}
	if rec = l.wait(rec.RunID); rec.Status != contract.RunCancelled {
		t.Errorf("run ended %s: %s", rec.Status, rec.Error)
	}
}

// F-020, CAP-16, EXEC-02: a lead is killed while tasks and another tool run. Another
// one takes over: the tasks are awaited and not asked for again, the other call
// is answered as interrupted and not run again, nothing is told twice.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	stuck := make(chan struct{}, 8)
	hang := &funcTool{name: "write_file", call: func(ctx context.Context, _ tool.Call) (tool.Result, error) {
		stuck <- struct{}{}
		<-ctx.Done()
		return tool.Result{}, context.Cause(ctx)
	}}
	answer := func(_ context.Context, _ int, req model.Request) (model.Response, error) {
		if got := results(req); len(got) > 0 {
			return say(got[0].Text + "\n" + got[1].Text + "\n" + got[2].Text)
		}
		return call("", taskCall("a", "Oslo"), model.ToolCall{ID: "w", Name: "write_file", Args: "{}"}, taskCall("b", "Quito"))
	}
	a := w.lead("lead-a", &scripted{answer: answer}, withTools(hang))
	b := w.lead("lead-b", &scripted{answer: answer}, withTools(hang))
	rec := a.start(runapi.RunInput{})
	w.gate.await(2)
	<-stuck
	// One of the two ends while nobody is there.
	reqs := w.gate.requests()
	slices.SortFunc(reqs, func(x, y contract.TaskRequest) int { return strings.Compare(x.ToolCallID, y.ToolCallID) })
	a.die()
	w.gate.end(t.Context(), reqs[0].TaskID, *completed("fact about Oslo"))
	natstest.Eventually(t, patience, func() (bool, string) {
		now, err := b.Get(t.Context(), contract.DefaultTenant, rec.RunID)
		if err != nil {
			return false, err.Error()
		}
		return now.Owner != rec.Owner, "owner is " + now.Owner
	})
	w.gate.end(t.Context(), reqs[1].TaskID, *completed("fact about Quito"))
	end := b.wait(rec.RunID)
	if end.Status != contract.RunCompleted || !strings.Contains(end.Output, "fact about Oslo") || !strings.Contains(end.Output, "fact about Quito") {
		t.Errorf("run ended %s: %q %s", end.Status, end.Output, end.Error)
	}
	if !strings.Contains(end.Output, "interrupted") {
		t.Errorf("the open call was not answered as interrupted: %q", end.Output)
	}
	if len(stuck) != 0 {
		t.Error("a call with unknown effects was made again")
	}
	if n := len(w.gate.requests()); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
	if end.Usage.TotalTokens != 2*12+2*120 {
		t.Errorf("usage %+v", end.Usage)
	}
	count := map[string]int{}
	for _, ev := range w.events(rec.RunID) {
		count[ev.ID]++
	}
	for id, n := range count {
		if n != 1 {
			t.Errorf("event %s is stored %d times", id, n)
		}
	}
	// run_started, 5 messages, 2 task ends, run_completed.
	if len(count) != 9 {
		t.Errorf("%d events: %v", len(count), count)
	}
}

// A lead that is asked to stop hands its run over; the next one goes on at once,
// not after the lease.
func TestHandOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	slow := func(c *Config, _ *Deps) { c.LeaseTTL = 60 * time.Second }
	a := w.lead("lead-a", &scripted{answer: twoTasks}, slow)
	b := w.lead("lead-b", &scripted{answer: twoTasks}, slow)
	rec := a.start(runapi.RunInput{})
	w.gate.await(2)
	a.drain()
	<-a.done
	if _, err := a.Start(t.Context(), runapi.RunInput{Tenant: "default", Input: "x"}); !errors.Is(err, leaderr.ErrUnavailable) {
		t.Errorf("start while stopping: %v, want unavailable", err)
	}
	for _, r := range w.gate.requests() {
		w.gate.end(t.Context(), r.TaskID, *completed("fact"))
	}
	if end := b.wait(rec.RunID); end.Status != contract.RunCompleted || !strings.HasPrefix(end.Owner, "lead-b") {
		t.Errorf("run ended %s with %s", end.Status, end.Owner)
	}
	if n := len(w.gate.requests()); n != 2 {
		t.Errorf("%d requests, want 2: a hand-over cancels and repeats nothing", n)
	}
}

// A run that ends within the drain time is not handed over.
func TestDrainWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	a := w.lead("lead-a", &scripted{answer: twoTasks}, func(c *Config, _ *Deps) { c.DrainTimeout = time.Minute })
	rec := a.start(runapi.RunInput{})
	w.gate.await(2)
	a.drain()
	for _, r := range w.gate.requests() {
		w.gate.end(t.Context(), r.TaskID, *completed("fact"))
	}
	select {
	case <-a.done:
	case <-time.After(patience):
		t.Fatal("the engine did not stop")
	}
	if evs := w.events(rec.RunID); evs[len(evs)-1].Type != contract.EventRunCompleted {
		t.Errorf("events = %v", types(evs))
	}
}

// CAP-16, I5: a driver whose record was taken from it is refused its reservation and
// runs no tool.
func TestStaleDriverRunsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("x") })
	asked, move := make(chan struct{}), make(chan struct{})
	m := &scripted{answer: func(_ context.Context, _ int, _ model.Request) (model.Response, error) {
		close(asked)
		<-move
		return call("", taskCall("a", "Oslo"), model.ToolCall{ID: "l", Name: "ls", Args: "{}"})
	}}
	ran := make(chan struct{}, 1)
	ls := &funcTool{name: "ls", call: func(context.Context, tool.Call) (tool.Result, error) {
		ran <- struct{}{}
		return tool.Result{}, nil
	}}
	l := w.lead("lead-a", m, withTools(ls), func(c *Config, _ *Deps) { c.LeaseTTL = time.Minute })
	rec := l.start(runapi.RunInput{})
	<-asked
	stored, err := w.conn.Last(t.Context(), w.conn.RunStream(), w.conn.RunKV(contract.RunKey(rec.RunID)))
	if err != nil {
		t.Fatal(err)
	}
	stored.Header.Del("Nats-Expected-Last-Subject-Sequence")
	w.publish(bus.Write{
		Subject: stored.Subject, Data: []byte(strings.Replace(string(stored.Data), rec.Owner, "lead-z", 1)), Expect: bus.Seq(stored.Seq),
		Header: nats.Header{headerStatus: {"running"}, headerTenant: {"default"}},
	})
	close(move)
	natstest.Eventually(t, patience, func() (bool, string) {
		return l.drives(rec.RunID) == nil, "the run is still driven"
	})
	if len(ran) != 0 || len(w.gate.requests()) != 0 {
		t.Errorf("a stale driver ran %d tools and asked for %d tasks", len(ran), len(w.gate.requests()))
	}
}

// A run that ended whose driver died before it told so is told of and closed,
// once, by whoever starts next.
func TestForgottenEndIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	conv := conversation{History: 0, Messages: []model.Message{{Role: model.RoleUser, Text: "hi"}, {Role: model.RoleAssistant, Text: "hello"}}}
	now := time.Now().UTC()
	rec := contract.RunRecord{
		RunID: "r_lost", ThreadID: "t", Tenant: "default", Status: contract.RunCompleted, Input: "hi", Output: "hello", Model: "main",
		Owner: "dead", Writer: "dead/1", CreatedAt: now, FinishedAt: &now,
	}
	body, err := encodeRecord(&rec, &conv, maxRecordBytes)
	if err != nil {
		t.Fatal(err)
	}
	w.publish(bus.Write{Subject: w.conn.RunKV(contract.RunKey(rec.RunID)), Data: body, Header: nats.Header{headerStatus: {"completed"}, headerTenant: {"default"}}})
	short := func(c *Config, _ *Deps) { c.LeaseTTL = time.Second }
	l := w.lead("lead-a", &scripted{answer: twoTasks}, short)
	if got := types(w.events(rec.RunID)); fmt.Sprint(got) != "[run_started run_message run_completed]" {
		t.Errorf("events = %v", got)
	}
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := w.conn.Last(t.Context(), w.conn.RunStream(), w.conn.RunKV(contract.RunLeaseKey(rec.RunID)))
		return err == nil && m.Deleted(), fmt.Sprintf("lease: %v", err)
	})
	if got, err := l.history(t.Context(), "default", "t"); err != nil || len(got.Messages) != 2 {
		t.Errorf("history = %v, %v", got, err)
	}
}

// EVT-18, I6: what is told again after the server has forgotten the ids is not
// stored again.
func TestToldOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed(req.Description) })
	l := w.lead("lead-a", &scripted{answer: twoTasks})
	rec := l.wait(l.start(runapi.RunInput{}).RunID)
	before := w.events(rec.RunID)
	s, err := w.conn.JS.Stream(t.Context(), w.conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.Duplicates = 100 * time.Millisecond
	if _, err := w.conn.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	probe := bus.Write{Subject: w.conn.Names.Event(contract.EventSubject{Tenant: "default", Thread: "t", Run: "r_probe", Type: "probe"}), MsgID: "probe"}
	w.publish(probe) // younger than all others: forgotten after them
	natstest.Eventually(t, patience, func() (bool, string) {
		// Each change makes the server look at what it remembers.
		cfg.Duplicates = 250*time.Millisecond - cfg.Duplicates
		if _, err := w.conn.JS.UpdateStream(t.Context(), cfg); err != nil {
			return false, err.Error()
		}
		return !w.publish(probe).Duplicate, "the id is remembered"
	})
	conv, err := decodeConversation(rec.Messages)
	if err != nil {
		t.Fatal(err)
	}
	_, rev, err := l.read(t.Context(), rec.RunID)
	if err != nil {
		t.Fatal(err)
	}
	var again teller
	if err := again.tell(t.Context(), l.Engine, rec, conv, func() error { return nil }); err != nil {
		t.Error(err)
	}
	if err := l.conclude(t.Context(), rec, rev); err != nil {
		t.Error(err)
	}
	info, err := w.conn.JS.Stream(t.Context(), w.conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if n := int(info.CachedInfo().State.Msgs); n != len(before)+2 {
		t.Errorf("%d events are stored, want the %d of before and two probes", n, len(before))
	}
}

// CANCEL-08, I7: a run that was cancelled while nobody drove it is ended by its
// take-over, and so are the tasks that its dead driver had submitted.
func TestCancelWithoutADriver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	a := w.lead("lead-a", &scripted{answer: twoTasks})
	rec := a.start(runapi.RunInput{})
	w.gate.await(2)
	a.die()
	b := w.lead("lead-b", &scripted{answer: twoTasks})
	if err := b.Cancel(t.Context(), contract.DefaultTenant, rec.RunID); err != nil {
		t.Fatal(err)
	}
	end := b.wait(rec.RunID)
	if end.Status != contract.RunCancelled || end.Usage == nil || end.Usage.TotalTokens != 12+2*8 {
		t.Errorf("run ended %s with usage %+v: %s", end.Status, end.Usage, end.Error)
	}
	ended := 0
	for _, ev := range w.events(rec.RunID) {
		if ev.Type == contract.EventTaskCancelled {
			ended++
		}
	}
	if ended != 2 {
		t.Errorf("%d of the run's 2 tasks were cancelled", ended)
	}
}

// A run that kills whoever drives it is given up.
func TestDeadlyRunIsGivenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	conv := conversation{Crashes: maxCrashes, Messages: []model.Message{{Role: model.RoleUser, Text: "hi"}}}
	rec := contract.RunRecord{RunID: "r_deadly", ThreadID: "t", Tenant: "default", Status: contract.RunRunning, Input: "hi", Model: "main", Owner: "dead", CreatedAt: time.Now()}
	body, err := encodeRecord(&rec, &conv, maxRecordBytes)
	if err != nil {
		t.Fatal(err)
	}
	w.publish(bus.Write{Subject: w.conn.RunKV(contract.RunKey(rec.RunID)), Data: body, Header: nats.Header{headerStatus: {"running"}, headerTenant: {"default"}}})
	m := &scripted{answer: twoTasks}
	l := w.lead("lead-a", m, func(c *Config, _ *Deps) { c.LeaseTTL = time.Second })
	if end := l.wait(rec.RunID); end.Status != contract.RunFailed || end.ErrorCode != contract.ErrInternal || len(m.requests()) != 0 {
		t.Errorf("run ended %s %s after %d model calls", end.Status, end.ErrorCode, len(m.requests()))
	}
}

// ADM-04, ADM-10: what does not fit into the queue is a failed result, not tried
// again; nothing of it is stored, and the ledger says why.
func TestQueueFull(t *testing.T) {
	t.Parallel()
	w := newWorldWith(t, provision.Config{MaxRunning: 1, MaxQueued: 0}, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	w.limits(contract.AdmissionLimits{MaxRunning: 3, QueueTimeoutSeconds: 30})
	m := &scripted{answer: twoTasks}
	l := w.lead("lead-a", m)
	rec := l.start(runapi.RunInput{})
	natstest.Eventually(t, patience, func() (bool, string) {
		now, err := l.Get(t.Context(), contract.DefaultTenant, rec.RunID)
		if err != nil {
			return false, err.Error()
		}
		// The gate hears of the one that got in by itself.
		refused := slices.ContainsFunc(now.Delegations, func(d contract.Delegation) bool { return d.ErrorCode == contract.ErrQueueFull })
		return refused && len(w.gate.requests()) > 0, fmt.Sprintf("refused %v, %d requests", refused, len(w.gate.requests()))
	})
	w.gate.end(t.Context(), w.gate.requests()[0].TaskID, *completed("fact"))
	rec = l.wait(rec.RunID)
	if rec.Status != contract.RunCompleted || !strings.Contains(rec.Output, "queue is full") || len(w.gate.requests()) != 1 {
		t.Errorf("run ended %s %q; %d requests", rec.Status, rec.Output, len(w.gate.requests()))
	}
	if n := len(rec.Delegations); n != 2 {
		t.Errorf("the ledger has %d entries, want 2 (CAP-19)", n)
	}
}

// CANCEL-09, STATUS-02, STATUS-09: a task that is not heard of within its limits is
// given up, and asked to stop.
func TestPollingTimeout(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	w.limits(contract.AdmissionLimits{MaxRunning: 3, QueueTimeoutSeconds: 0})
	m := &scripted{answer: func(_ context.Context, _ int, req model.Request) (model.Response, error) {
		if got := results(req); len(got) > 0 {
			return say(got[0].Text)
		}
		return call("", taskCall("a", "Oslo"))
	}}
	l := w.lead("lead-a", m, func(c *Config, d *Deps) {
		c.WaitGrace = time.Millisecond
		d.Catalogue = oneType{timeout: 1}
	})
	rec := l.wait(l.start(runapi.RunInput{}).RunID)
	if rec.Status != contract.RunCompleted || rec.Delegations[0].Status != "polling_timed_out" {
		t.Errorf("run ended %s, ledger %+v", rec.Status, rec.Delegations)
	}
	second := m.requests()[1]
	if got := results(second)[0]; got.Metadata["subagent_status"] != "polling_timed_out" || !strings.Contains(got.Text, "minutes") {
		t.Errorf("result = %q %v", got.Text, got.Metadata)
	}
	if _, err := w.conn.Last(t.Context(), w.conn.TaskStream(), w.conn.KV(contract.CancelKey(rec.Delegations[0].TaskID))); err != nil {
		t.Errorf("the task was not asked to stop: %v", err)
	}
}

// RESULT-03, CAP-16: results that are too large together for the record reach the
// model whole; the record keeps less of them, and all of the ledger.
func TestLargeResults(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("0123456789", 25_000)
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed(req.Description + body) })
	m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		if turn == 2 {
			return say("done")
		}
		return call("", taskCall("a", fmt.Sprint("A", turn)), taskCall("b", fmt.Sprint("B", turn)), taskCall("c", fmt.Sprint("C", turn)))
	}}
	l := w.lead("lead-a", m)
	rec := l.wait(l.start(runapi.RunInput{ThreadID: "t"}).RunID)
	whole := 0
	last := m.requests()[2]
	for _, msg := range last.Messages {
		if msg.Role == model.RoleTool && strings.HasSuffix(msg.Text, body) {
			whole++
		}
	}
	if rec.Status != contract.RunCompleted || whole != 6 || len(rec.Delegations) != 6 {
		t.Errorf("run ended %s (%s); %d whole results, %d entries", rec.Status, rec.Error, whole, len(rec.Delegations))
	}
	if n := len(rec.Messages); n > maxRecordBytes {
		t.Errorf("the record keeps %d bytes of messages", n)
	}
	if got, err := l.history(t.Context(), "default", "t"); err != nil || sizeOf(got.Messages) > maxHistoryBytes || len(got.Messages) == 0 {
		t.Errorf("the next run would take over %d bytes: %v", sizeOf(got.Messages), err)
	}
}

// Events that have aged out do not stop a run that goes on.
func TestEventsAgedOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	l := w.lead("lead-a", &scripted{answer: twoTasks})
	rec := l.start(runapi.RunInput{})
	w.gate.await(2)
	s, err := w.conn.JS.Stream(t.Context(), w.conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, r := range w.gate.requests() {
		w.gate.end(t.Context(), r.TaskID, *completed("fact"))
	}
	if end := l.wait(rec.RunID); end.Status != contract.RunCompleted {
		t.Errorf("run ended %s: %s", end.Status, end.Error)
	}
}

// Bounds and faults of Start, Get, Wait and List.
func TestEngineLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	hold := make(chan struct{})
	m := &scripted{answer: func(ctx context.Context, _ int, _ model.Request) (model.Response, error) {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return say("done")
	}}
	l := w.lead("lead-a", m, func(c *Config, _ *Deps) { c.MaxActive = 2 })
	for name, in := range map[string]runapi.RunInput{
		"empty input":   {Tenant: "default"},
		"unknown model": {Tenant: "default", Input: "x", Model: "nope"},
		"bad tenant":    {Tenant: "a.b", Input: "x"},
		"bad thread":    {Tenant: "default", Input: "x", ThreadID: "a\nb"},
		"huge input":    {Tenant: "default", Input: strings.Repeat("x", runapi.MaxInputBytes+1)},
		"not UTF-8":     {Tenant: "default", Input: "\xff"},
		"huge metadata": {Tenant: "default", Input: "x", Metadata: map[string]string{"a": strings.Repeat("x", maxExtraBytes+1)}},
	} {
		if _, err := l.Start(t.Context(), in); !errors.Is(err, leaderr.ErrInvalid) {
			t.Errorf("%s: %v, want invalid", name, err)
		}
	}
	first := l.start(runapi.RunInput{ThreadID: "t1", Metadata: map[string]string{"k": "v"}, Tags: []string{"x"}})
	second := l.start(runapi.RunInput{ThreadID: "t2"})
	if _, err := l.Start(t.Context(), runapi.RunInput{Tenant: "default", Input: "x"}); !errors.Is(err, leaderr.ErrUnavailable) {
		t.Errorf("a third run: %v, want unavailable", err)
	}
	for _, id := range []contract.RunID{first.RunID, "r_none", "a.b"} {
		if _, err := l.Get(t.Context(), "acme", id); !errors.Is(err, leaderr.ErrNotFound) {
			t.Errorf("Get of %s for another tenant: %v, want not found", id, err)
		}
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := l.Wait(short, "default", first.RunID); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, leaderr.ErrUnavailable) {
		t.Errorf("Wait beyond its time: %v", err)
	}
	close(hold)
	l.wait(first.RunID)
	l.wait(second.RunID)
	ids := []contract.RunID{second.RunID, first.RunID}
	for range 3 {
		natstest.Eventually(t, patience, func() (bool, string) {
			l.mu.Lock()
			defer l.mu.Unlock()
			return len(l.active) == 0, "a run that has ended holds its place"
		})
		r := l.start(runapi.RunInput{ThreadID: "t1"})
		l.wait(r.RunID)
		ids = append([]contract.RunID{r.RunID}, ids...)
	}
	var got []contract.RunID
	q := runapi.RunQuery{Tenant: "default", Limit: 2}
	for pages := 0; ; pages++ {
		page, err := l.List(t.Context(), q)
		if err != nil || pages > 5 {
			t.Fatalf("page %d: %v", pages, err)
		}
		for _, r := range page.Runs {
			got = append(got, r.RunID)
		}
		if q.Cursor = page.NextCursor; q.Cursor == "" {
			break
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(ids) {
		t.Errorf("List = %v, want %v", got, ids)
	}
	for q, want := range map[*runapi.RunQuery]int{
		{Tenant: "default", ThreadID: "t1"}:                4,
		{Tenant: "default", Status: contract.RunRunning}:   0,
		{Tenant: "default", Status: contract.RunCompleted}: 5,
		{Tenant: "acme"}: 0,
	} {
		if page, err := l.List(t.Context(), *q); err != nil || len(page.Runs) != want {
			t.Errorf("List(%+v) = %d runs, %v; want %d", *q, len(page.Runs), err, want)
		}
	}
	if _, err := l.List(t.Context(), runapi.RunQuery{Tenant: "default", Limit: 1000}); !errors.Is(err, leaderr.ErrInvalid) {
		t.Errorf("a huge page: %v, want invalid", err)
	}
}

// While the server is away the driver stops by its own clock; when it is back
// somebody goes on, and the run ends once.
func TestServerRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return nil })
	l := w.lead("lead-a", &scripted{answer: twoTasks})
	rec := l.start(runapi.RunInput{})
	w.gate.await(2)
	w.srv.Kill()
	natstest.Eventually(t, patience, func() (bool, string) {
		return l.drives(rec.RunID) == nil, "the run is driven without a lease"
	})
	w.srv.Restart()
	for _, c := range []*bus.Conn{w.conn, w.gate.c, l.conn} {
		natstest.Eventually(t, patience, func() (bool, string) {
			_, err := c.Last(t.Context(), c.RunStream(), c.RunKV(contract.RunKey(rec.RunID)))
			return err == nil, fmt.Sprint(err)
		})
	}
	for _, r := range w.gate.requests() {
		w.gate.end(t.Context(), r.TaskID, *completed("fact"))
	}
	if end := l.wait(rec.RunID); end.Status != contract.RunCompleted {
		t.Errorf("run ended %s: %s", end.Status, end.Error)
	}
	if n := len(w.gate.requests()); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}
