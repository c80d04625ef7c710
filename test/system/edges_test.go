package system

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Scripted answers with the next of its turns, by the number of assistant
// messages so far.
type Scripted struct {
	Turns []model.Message
	Usage *contract.Usage
	Err   error
}

// Name implements model.Model.
func (*Scripted) Name() string { return "scripted" }

// ModelName implements model.Model.
func (*Scripted) ModelName() string { return "scripted-1" }

// Generate implements model.Model.
func (s *Scripted) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	if s.Err != nil {
		return model.Response{}, s.Err
	}
	n := 0
	for _, m := range req.Messages {
		if m.Role == model.RoleAssistant {
			n++
		}
	}
	return model.Response{Message: s.Turns[min(n, len(s.Turns)-1)], Model: "scripted-1", Usage: s.Usage}, nil
}

func call(name, args string) model.Message {
	return model.Message{FinishReason: "tool_calls", ToolCalls: []model.ToolCall{{ID: "c", Name: name, Args: args}}}
}

// shell offers real tools in a workspace of the test.
func shell(t *testing.T) (string, func(contract.TaskRequest) ([]tool.Tool, func(), error)) {
	dir := t.TempDir()
	box := sandbox.New(sandbox.None, nil)
	return dir, func(contract.TaskRequest) ([]tool.Tool, func(), error) {
		ws, err := tool.NewWorkspace(dir)
		if err != nil {
			return nil, nil, err
		}
		return tool.Tools(ws, tool.Options{Bash: true, Sandbox: box}), func() { _ = ws.Close() }, nil
	}
}

func (f *Feed) started(n int) {
	f.t.Helper()
	f.Until(fmt.Sprint(n, " starts"), func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskStarted)) >= n })
}

// ADM-04, I3: what does not fit is refused at the door and leaves no trace.
func TestBound(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, MaxQueued: 2, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	accepted, full := 0, 0
	for i := range 10 {
		switch err := s.TrySubmit(Request(fmt.Sprint("hold ", i))); {
		case err == nil:
			accepted++
		case errors.Is(err, bus.ErrFull):
			full++
		default:
			t.Fatal(err)
		}
	}
	if accepted != 3 || full != 7 {
		t.Fatalf("%d accepted, %d refused; want 3 and 7", accepted, full)
	}
	held.LetAllGo()
	feed.Ended(3)
	// F-032: the room comes back.
	natstest.Eventually(t, Timeout, func() (bool, string) {
		info, err := s.Bus.JS.Stream(context.Background(), s.Bus.Names.WorkStream())
		if err != nil {
			return false, err.Error()
		}
		st, err := info.Info(context.Background())
		return err == nil && st.State.Msgs == 0, fmt.Sprint("requests left: ", err)
	})
	for i := range 3 {
		s.Submit(Request(fmt.Sprint("again ", i)))
	}
	feed.Ended(6)
}

// F-058, STATUS-10: a request that cannot be used ends as failed, is kept among
// the dead letters, and blocks nobody.
func TestInvalidRequest(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	bad := Request("x")
	ctx := context.Background()
	if _, err := s.Bus.Publish(ctx, bus.Write{Subject: s.Bus.Names.TaskRequest(bad.Tenant, bad.TaskID), Data: []byte(`{"contract_version":`)}); err != nil {
		t.Fatal(err)
	}
	s.Submit(Request("y"))
	feed.Ended(2)
	rec, _ := s.Record(bad.TaskID)
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrInvalidRequest || rec.Error == "" {
		t.Errorf("record = %+v", rec)
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		m, err := s.Bus.Last(ctx, s.Bus.Names.DeadStream(), s.Bus.Names.Dead("admission"))
		return err == nil && m.Header.Get("Herdgate-Reason") != "" && string(m.Data) == `{"contract_version":`, fmt.Sprintf("dead letter = %+v, %v", m, err)
	})
}

// F-030: a task that fails before its first step frees its slot at once.
func TestUnknownModel(t *testing.T) {
	t.Parallel()
	s := New(t, Options{MaxRunning: 1})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	bad := Request("x")
	bad.Subagent.Model = "no-such-model"
	s.Submit(bad)
	s.Submit(Request("y"))
	feed.Ended(2)
	rec, _ := s.Record(bad.TaskID)
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrInvalidRequest || !strings.Contains(rec.Error, "no-such-model") {
		t.Errorf("record = %+v", rec)
	}
}

// ADM-17, STATUS-09, CANCEL-03: the time limit runs from the slot, and its end
// keeps what was spent.
func TestTimeLimit(t *testing.T) {
	t.Parallel()
	dir, tools := shell(t)
	_ = dir
	s := New(t, Options{Tools: tools, Model: &Scripted{Turns: []model.Message{call("bash", `{"command":"sleep 600"}`)}, Usage: &contract.Usage{InputTokens: 7, OutputTokens: 1, TotalTokens: 8}}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("x")
	req.Subagent.TimeoutSeconds = 1
	s.Submit(req)
	feed.Ended(1)
	rec, _ := s.Record(req.TaskID)
	if rec.State != contract.StateTimedOut || !strings.Contains(rec.Error, "1 second") || rec.Usage == nil || rec.Usage.TotalTokens != 8 {
		t.Errorf("record = %+v", rec)
	}
}

// I7, CANCEL-01, F-076: cancelling a task that runs a command kills the command
// before the task is told to be cancelled.
func TestCancelKillsCommand(t *testing.T) {
	t.Parallel()
	dir, tools := shell(t)
	s := New(t, Options{Tools: tools, Model: &Scripted{Turns: []model.Message{call("bash", `{"command":"echo $$ > pid; sleep 600 & sleep 600"}`)}}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("x")
	s.Submit(req)
	feed.started(1)
	var pid string
	natstest.Eventually(t, Timeout, func() (bool, string) {
		b, err := os.ReadFile(filepath.Join(dir, "pid"))
		pid = strings.TrimSpace(string(b))
		return err == nil && pid != "", "the command has not begun"
	})
	began := time.Now()
	s.Cancel(req.TaskID)
	feed.Until("cancelled", func(ev []envelope.Event) bool { return Count(ev, Is(contract.EventTaskCancelled)) == 1 })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %v", d)
	}
	if _, err := os.Stat("/proc/" + pid); err == nil {
		t.Errorf("process %s is alive", pid)
	}
}

// GUARD-11, GUARD-15: turns that run out without a text fail with the reason.
func TestTurnLimit(t *testing.T) {
	t.Parallel()
	_, tools := shell(t)
	s := New(t, Options{Tools: tools, Model: &Scripted{Turns: []model.Message{call("ls", `{}`)}}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("x")
	req.Subagent.MaxTurns = 3
	s.Submit(req)
	ev := feed.Ended(1)
	rec, _ := s.Record(req.TaskID)
	if rec.State != contract.StateFailed || rec.StopReason != contract.StopTurnCapped {
		t.Errorf("record = %+v", rec)
	}
	if n := Count(ev, Is(contract.EventTaskRunning)); n != 6 { // 3 answers, 3 results
		t.Errorf("%d steps, want 6", n)
	}
}

// STATUS-05: a provider's failure is a failed task with llm_error.
func TestProviderFailure(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: &Scripted{Err: &model.Error{Kind: model.KindPermanent, Code: "unauthorized", Message: "the key is not valid"}}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("x")
	s.Submit(req)
	feed.Ended(1)
	rec, _ := s.Record(req.TaskID)
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrLLM || !strings.Contains(rec.Error, "the key is not valid") {
		t.Errorf("record = %+v", rec)
	}
}

// F-140, RESULT-03: a result that is too large for a record is kept whole beside
// it, and the terminal event gets out.
func TestLargeResult(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("long ", 300_000) // 1.5 MB
	s := New(t, Options{Model: &Scripted{Turns: []model.Message{{Text: text, FinishReason: "stop"}}}})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("x")
	s.Submit(req)
	feed.Ended(1)
	rec, _ := s.Record(req.TaskID)
	if rec.State != contract.StateCompleted || rec.ResultRef == nil {
		t.Fatalf("state %s, ref %v", rec.State, rec.ResultRef)
	}
	b, err := s.Bus.GetBlob(context.Background(), *rec.ResultRef)
	if err != nil || string(b) != text {
		t.Errorf("blob has %d bytes, %v; want %d", len(b), err, len(text))
	}
}

// I5, F-054: an attempt whose record has moved on writes nothing more: neither
// the record nor an event.
func TestFencedAttempt(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 1, Model: held})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	req := Request("hold a")
	s.Submit(req)
	feed.started(1)
	// Somebody else ends the task under the executor.
	m, err := s.Bus.Last(context.Background(), s.Bus.TaskStream(), s.Bus.KV(contract.TaskKey(req.TaskID)))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := contract.DecodeTaskRecord(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC()
	rec.State, rec.Error, rec.FinishedAt, rec.Writer = contract.StateFailed, "taken away", &now, "the test"
	s.put(t, rec, m.Seq)
	feed.Ended(1)
	held.LetAllGo()
	ev := s.settled(t, feed)
	if n := Count(ev, contract.EventType.TaskTerminal); n != 1 {
		t.Errorf("%d terminal events", n)
	}
	if n := Count(ev, Is(contract.EventTaskRunning)); n != 0 {
		t.Errorf("%d steps after the end", n)
	}
	if rec, _ := s.Record(req.TaskID); rec.Error != "taken away" {
		t.Errorf("record = %+v", rec)
	}
}

// put writes a record as if by another process.
func (s *System) put(t *testing.T, rec contract.TaskRecord, expect uint64) {
	t.Helper()
	data := mustJSON(t, rec)
	if _, err := s.Bus.Publish(context.Background(), bus.Write{Subject: s.Bus.KV(contract.TaskKey(rec.TaskID)), Data: data, Expect: bus.Seq(expect)}); err != nil {
		t.Fatal(err)
	}
}

// settled runs one more task through the system: what was under way before has
// had its turn then.
func (s *System) settled(t *testing.T, feed *Feed) []envelope.Event {
	t.Helper()
	n := Count(feed.Events(), contract.EventType.TaskTerminal)
	s.Submit(Request("marker"))
	ev := feed.Ended(n + 1)
	var out []envelope.Event
	for _, e := range ev {
		if !strings.Contains(string(e.Data), "marker") && !(e.Type.TaskTerminal() && strings.Contains(string(e.Data), "done: marker")) {
			out = append(out, e)
		}
	}
	// The marker's own events without its text.
	last := ev[len(ev)-1].TaskID
	kept := out[:0]
	for _, e := range out {
		if e.TaskID != last {
			kept = append(kept, e)
		}
	}
	return kept
}

// I2, F-028: 1000 rounds would be better; a few hundred cancels race with grants
// here. Each task ends once, and none is started after its cancellation won.
func TestCancelRacesGrant(t *testing.T) {
	t.Parallel()
	s := New(t, Options{MaxRunning: 2, MaxQueued: 400})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	const n = 300
	var wg sync.WaitGroup
	for i := range n {
		req := Request(fmt.Sprint("task ", i))
		s.Submit(req)
		if i%3 == 0 {
			wg.Go(func() { s.Cancel(req.TaskID) })
		}
	}
	wg.Wait()
	ev := feed.Ended(n)
	ends := map[contract.TaskID]contract.EventType{}
	for _, e := range ev {
		if end, over := ends[e.TaskID]; over {
			t.Errorf("%s: %s after %s", e.TaskID, e.Type, end)
		}
		if e.Type.TaskTerminal() {
			ends[e.TaskID] = e.Type
		}
	}
	if len(ends) != n {
		t.Errorf("%d tasks ended, want %d", len(ends), n)
	}
	s.judge(t)
}

// F-036, F-060: the broker restarts under load; everything goes on by itself.
func TestBrokerRestart(t *testing.T) {
	t.Parallel()
	held := NewHeld()
	s := New(t, Options{MaxRunning: 2, Model: held, LeaseTTL: 6 * time.Second, LeaderTTL: 3 * time.Second, Listen: true})
	feed := s.Follow()
	s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	for i := range 6 {
		s.Submit(Request(fmt.Sprint("hold ", i)))
	}
	feed.started(2)
	s.Server.Restart()
	held.LetAllGo()
	ev := feed.Ended(6)
	if n := Count(ev, Is(contract.EventTaskCompleted)); n != 6 {
		t.Errorf("%d tasks completed, want 6", n)
	}
	s.judge(t)
}

// EXEC-03, I8: the leader stops in order; its standby takes over at once.
func TestCleanHandOver(t *testing.T) {
	t.Parallel()
	s := New(t, Options{LeaderTTL: 10 * time.Second})
	feed := s.Follow()
	first := s.Admission("adm-1")
	s.Executor("ex-1", 2, time.Second)
	s.Submit(Request("a"))
	feed.Ended(1)
	s.Admission("adm-2")
	began := time.Now()
	first.Stop()
	s.Submit(Request("b"))
	feed.Ended(2)
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("took %v although the key was handed back", d)
	}
}

// ADM-18, CONFIG-09: the leader tells the limits that it enforces.
func TestLimitsArePublished(t *testing.T) {
	t.Parallel()
	s := New(t, Options{MaxRunning: 2, MaxQueued: 9})
	s.Admission("adm-1")
	natstest.Eventually(t, Timeout, func() (bool, string) {
		m, err := s.Bus.Last(context.Background(), s.Bus.TaskStream(), s.Bus.KV(contract.LimitsKey))
		if err != nil {
			return false, err.Error()
		}
		l, err := contract.Decode[contract.AdmissionLimits](m.Data)
		return err == nil && reflect.DeepEqual(l, contract.AdmissionLimits{MaxRunning: 2, MaxQueued: 9, AdmissionPolicy: "queue", QueueTimeoutSeconds: 300}), string(m.Data)
	})
}
