package system

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/lead"
)

// Watched is a Delegator that remembers what it was asked.
type Watched struct {
	Delegator
	mu       sync.Mutex
	requests []model.Request
}

// Generate implements model.Model.
func (w *Watched) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	w.mu.Lock()
	w.requests = append(w.requests, req)
	w.mu.Unlock()
	return w.Delegator.Generate(ctx, req, onDelta)
}

// Of returns what agents of a type were asked.
func (w *Watched) Of(agent string) []model.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []model.Request
	for _, r := range w.requests {
		if r.Agent == agent {
			out = append(out, r)
		}
	}
	return out
}

func tools(r model.Request) []string {
	var names []string
	for _, t := range r.Tools {
		names = append(names, t.Name)
	}
	return names
}

// ARCH-04, ARCH-06: nothing splits work but the model: one call is one task,
// whatever the limit and however long its prompt; a long one is no batch.
func TestNothingSplitsWork(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}})
	feed := s.Follow()
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: strings.Repeat("many independent items; ", 2000)})
	if err != nil {
		t.Fatal(err)
	}
	if len(run.Delegations) != 1 {
		t.Errorf("%d delegations, want 1", len(run.Delegations))
	}
	if n := Count(feed.Ended(1), Is(contract.EventTaskQueued)); n != 1 {
		t.Errorf("%d tasks, want 1", n)
	}
}

// ARCH-08, ISO-09, TOOL-01, CTX-03, CTX-04, CTX-09: a child is narrower than its
// lead — it can never delegate —, its tools work on the same thread's files, and
// its conversation is its own: siblings see nothing of each other.
func TestChildIsNarrowAndFresh(t *testing.T) {
	t.Parallel()
	w := &Watched{}
	_, offer := shell(t)
	s := New(t, Options{Model: w, Tools: offer})
	c := s.Whole()
	if _, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "alpha\nbeta"}); err != nil {
		t.Fatal(err)
	}
	lead, children := w.Of("lead"), w.Of("general-purpose")
	if len(children) != 2 {
		t.Fatalf("%d requests of children, want 2", len(children))
	}
	if !slices.Contains(tools(lead[0]), "task") {
		t.Errorf("the lead's tools are %v, without task", tools(lead[0]))
	}
	for i, r := range children {
		if slices.Contains(tools(r), "task") || slices.Contains(tools(r), "list_uploaded_files") {
			t.Errorf("a child's tools are %v", tools(r))
		}
		if !slices.Contains(tools(r), "read_file") {
			t.Errorf("a child's tools are %v, without files", tools(r))
		}
		var roles []model.Role
		for _, m := range r.Messages {
			roles = append(roles, m.Role)
			for j, other := range []string{"alpha", "beta"} {
				mine := strings.Contains(r.Messages[len(r.Messages)-1].Text, other)
				if !mine && strings.Contains(m.Text, other) {
					t.Errorf("child %d sees %q of its sibling %d: %q", i, other, j, m.Text)
				}
			}
		}
		if !slices.Equal(roles, []model.Role{model.RoleSystem, model.RoleUser}) {
			t.Errorf("a child begins with %v", roles)
		}
	}
}

// ISO-02, ISO-05, ISO-08, ISO-10: what a child publishes says so in its subject, and what reads
// the root only sees nothing of it.
func TestChildEventsAreBelowTheRun(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}})
	feed := s.Follow()
	c := s.Whole()
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "alpha"})
	if err != nil {
		t.Fatal(err)
	}
	root := s.Bus.Names.Events(contract.EventSubject{Run: run.RunID, Task: contract.NoTask})
	seen := 0
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = s.Bus.Watch(ctx, bus.Watch{Stream: s.Bus.Names.EventStream(), StartSeq: 1, Subjects: []string{root}}, func(m bus.Message, _ uint64) error {
		ev, err := envelope.Decode(m.Data)
		if err != nil {
			return err
		}
		if ev.TaskID != "" || strings.HasPrefix(string(ev.Type), "task_") {
			t.Errorf("%s of %s among the run's own events", ev.Type, ev.TaskID)
		}
		seen++
		if ev.Type.RunTerminal() {
			cancel()
		}
		return nil
	})
	if err != nil || seen < 4 {
		t.Errorf("%d events of the run itself, %v", seen, err)
	}
	for _, e := range feed.Events() {
		if sub, err := s.Bus.Names.ParseEvent(e.NATSSubject(s.Bus.Names)); err != nil || sub.Run != run.RunID || sub.Task != e.TaskID {
			t.Errorf("%s lies on %s", e.Type, e.NATSSubject(s.Bus.Names))
		}
	}
}

// ADM-01, ARCH-05: one gate for all: tasks of a lead and tasks of other programs
// share its slots.
func TestOneGateForAll(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}, MaxRunning: 1})
	feed := s.Follow()
	c := s.Whole()
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() {
			if _, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: fmt.Sprint("run ", i)}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if _, err := c.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: fmt.Sprint("task ", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	running := 0
	for _, e := range feed.Ended(10) {
		switch {
		case e.Type == contract.EventTaskStarted:
			if running++; running > 1 {
				t.Fatal("two tasks hold the one slot")
			}
		case e.Type.TaskTerminal():
			running--
		}
	}
}

// ADM-12: a leader with a lower cap takes over while more is running: nothing is
// taken away, and nothing is granted until there is room under its own cap.
func TestLowerCapTakesOver(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 2, Model: held})
	feed := s.Follow()
	first := s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	for _, name := range []string{"a", "b", "c", "d"} {
		s.Submit(Request("hold " + name))
	}
	feed.started(2)
	first.Stop()
	s.Admission("adm-2", func(c *admission.Config) { c.MaxRunning = 1 })
	held.LetGo("hold a")
	feed.Ended(1)
	// b still runs, so that c has to wait, although two slots were promised once.
	held.LetGo("hold c")
	held.LetGo("hold d")
	held.LetGo("hold b")
	running, peak := map[contract.TaskID]bool{}, 0
	over := false
	for _, e := range feed.Ended(4) {
		switch {
		case e.Type == contract.EventTaskStarted:
			running[e.TaskID] = true
			if over {
				peak = max(peak, len(running))
			}
		case e.Type.TaskTerminal():
			delete(running, e.TaskID)
			over = true
		}
	}
	if peak > 1 {
		t.Errorf("%d tasks ran under a cap of 1", peak)
	}
}

// EXEC-01: an executor opens nothing per task: its connections to NATS stay the
// same, however many tasks it runs.
func TestNothingIsOpenedPerTask(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	s.Admission("adm-1")
	ex := s.Executor("ex-1", 4, time.Second)
	s.Submit(Request("warm up"))
	feed.Ended(1)
	id, err := ex.Conn.NC.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	subs := ex.Conn.NC.NumSubscriptions()
	for i := range 20 {
		s.Submit(Request(fmt.Sprint("task ", i)))
	}
	feed.Ended(21)
	if now, err := ex.Conn.NC.GetClientID(); err != nil || now != id || ex.Conn.NC.Stats().Reconnects != 0 {
		t.Errorf("the connection was %d and is %d, %v", id, now, err)
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		now := ex.Conn.NC.NumSubscriptions()
		return now <= subs+2, fmt.Sprintf("%d subscriptions, %d before", now, subs)
	})
}

// EXEC-04, EXEC-02: the record alone tells a task's whole story; its id is ours,
// not the provider's.
func TestRecordTellsAll(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hello")
	req.ToolCallID = "call_1"
	s.Submit(req)
	feed.Ended(1)
	rec, _ := s.Record(req.TaskID)
	switch {
	case rec.TaskID != req.TaskID, rec.RunID != req.RunID, rec.ThreadID != req.ThreadID, rec.Tenant != req.Tenant:
		t.Errorf("ids: %+v", rec)
	case rec.State != contract.StateCompleted, rec.Result == "", rec.Attempt != 1, rec.Slot != 1, rec.Epoch == 0, rec.Executor != "ex-1":
		t.Errorf("state: %+v", rec)
	case rec.GrantedAt == nil, rec.StartedAt == nil, rec.FinishedAt == nil, rec.QueuedAt.IsZero():
		t.Errorf("times: %+v", rec)
	case rec.Usage == nil, rec.ModelName == "", rec.SubagentType == "", rec.Writer == "":
		t.Errorf("facts: %+v", rec)
	}
}

// EXEC-07: which model runs is decided once, and told while it runs.
func TestModelIsToldWhileRunning(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hold a")
	s.Submit(req)
	feed.started(1)
	if rec, _ := s.Record(req.TaskID); rec.State != contract.StateRunning || rec.ModelName != "held-1" {
		t.Errorf("record = %+v", rec)
	}
	held.LetAllGo()
	feed.Ended(1)
}

// EXEC-05: a delegation that cannot be handed over leaves nothing behind.
func TestRefusedLeavesNothing(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	c := s.Whole()
	_, err := c.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: strings.Repeat("x", contract.MaxPromptBytes+1)})
	var e *client.Error
	if !errors.As(err, &e) || e.Status != 413 && e.Status != 400 && e.Status != 422 {
		t.Fatalf("error = %v", err)
	}
	page, err := c.ListTasks(timeout(t), client.TaskQuery{})
	if err != nil || len(page.Tasks) != 0 {
		t.Errorf("tasks = %v, %v", page.Tasks, err)
	}
}

// EXEC-06: a record goes when it has ended and its retention is over, never
// before; asking for one that is gone is "not found".
func TestRetention(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{Model: held})
	feed := s.Follow()
	s.Admission("adm-1", func(c *admission.Config) { c.Retention = time.Second })
	s.Executor("ex-1", 2, time.Second)
	a, b := Request("hold a"), Request("b")
	s.Submit(a)
	feed.started(1)
	s.Submit(b)
	feed.Ended(1)
	natstest.Eventually(t, Timeout, func() (bool, string) {
		_, there := s.Record(b.TaskID)
		return !there, "the ended task's record is still there"
	})
	if _, there := s.Record(a.TaskID); !there {
		t.Error("the running task's record is gone")
	}
	held.LetAllGo()
	feed.Ended(2)
	// The same request again, by a lead that comes late, is not run a second time.
	s.Submit(b)
	natstest.Eventually(t, Timeout, func() (bool, string) {
		_, err := s.Bus.Last(context.Background(), s.Bus.Names.WorkStream(), s.Bus.Names.TaskRequest(b.Tenant, b.TaskID))
		return errors.Is(err, bus.ErrNotFound), fmt.Sprint("the request is still there: ", err)
	})
	if n := Count(feed.Events(), Is(contract.EventTaskStarted)); n != 2 {
		t.Errorf("%d starts, want 2", n)
	}
}

// ADM-13: a program that starts a lead of its own brings its own limit of
// delegations per run; one outside 1 to 50 is refused, not brought into range.
func TestLimitsOfACaller(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	models, err := model.NewRegistry(Delegator{})
	if err != nil {
		t.Fatal(err)
	}
	types, err := subagent.NewRegistry(subagent.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for total, ok := range map[int]bool{0: false, 1: true, 50: true, 51: false} {
		_, err := lead.New(lead.Config{Name: "lead-1", MaxTotal: &total, HTTP: lead.HTTPConfig{Addr: "127.0.0.1:0"}},
			lead.Deps{Bus: s.Bus, Models: models, Subagents: types})
		if (err == nil) != ok {
			t.Errorf("a limit of %d: %v", total, err)
		}
	}
}

// CAP-17, LEDGER-13: only a run's own delegations are in its ledger and count against its
// limit; tasks that come another way, in the same thread, neither use nor widen it.
func TestOtherTasksDoNotCount(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: Delegator{}})
	feed := s.Follow()
	c := s.Whole()
	for i := range 4 {
		if _, err := c.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: fmt.Sprint("other ", i), ThreadID: "shared"}); err != nil {
			t.Fatal(err)
		}
	}
	feed.Ended(4)
	two := 2
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "a\nb\nc", ThreadID: "shared", MaxTotalSubagents: &two})
	if err != nil {
		t.Fatal(err)
	}
	if len(run.Delegations) != 2 {
		t.Errorf("%d delegations, want the 2 that the run may make", len(run.Delegations))
	}
	for _, d := range run.Delegations {
		if d.RunID != run.RunID || strings.HasPrefix(d.Description, "other") {
			t.Errorf("the ledger has a task that is not the run's: %+v", d)
		}
	}
}
