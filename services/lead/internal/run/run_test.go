package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// ARCH-03, ARCH-05, ISO-08, CTX-01, CTX-02, CTX-11, EXEC-02, RESULT-01,
// RESULT-03, RESULT-06, STATUS-11, USAGE-04, TOOL-08, EVT-12: three calls of one
// answer run side by side; the lead reads their final texts, and no more.
func TestParallelTasks(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789", 3000)
	var w *world
	w = newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord {
		// Nobody is answered before all three are there.
		if reqs := w.gate.requests(); len(reqs) == 3 {
			for _, r := range reqs {
				w.gate.end(t.Context(), r.TaskID, *completed("fact about " + r.Description + " " + long))
			}
		}
		return nil
	})
	m := &scripted{answer: func(_ context.Context, turn int, req model.Request) (model.Response, error) {
		if turn == 0 {
			return call("I look at three cities.", taskCall("c1", "Oslo"), taskCall("c2", "Quito"), taskCall("c3", "Hanoi"))
		}
		var b strings.Builder
		for _, r := range results(req) {
			b.WriteString(r.Text[:45] + "\n")
		}
		return say(b.String())
	}}
	l := w.lead("lead-a", m)
	started := l.start(runapi.RunInput{Input: "three cities", ThreadID: "thread one", UserID: "u1", UserRole: "admin", Attributes: map[string]string{"team": "blue"}})
	if started.Status != contract.RunRunning || started.Owner == "" || !strings.HasPrefix(string(started.RunID), "r_") {
		t.Fatalf("Start = %+v", started)
	}
	rec := l.wait(started.RunID)
	if rec.Status != contract.RunCompleted || !strings.Contains(rec.Output, "fact about Hanoi") {
		t.Fatalf("run ended %s: %q (%s)", rec.Status, rec.Output, rec.Error)
	}
	// 2 lead turns of 12 tokens, 3 tasks of 120.
	if rec.Usage == nil || rec.Usage.TotalTokens != 2*12+3*120 {
		t.Errorf("usage = %+v, want %d in all", rec.Usage, 2*12+3*120)
	}
	// They are handed over side by side, in whatever order.
	reqs := w.gate.requests()
	slices.SortFunc(reqs, func(a, b contract.TaskRequest) int { return strings.Compare(a.ToolCallID, b.ToolCallID) })
	for i, r := range reqs {
		if r.TaskID != contract.NewTaskID(rec.RunID, 0, i) || r.RunID != rec.RunID || r.ThreadID != "thread one" {
			t.Errorf("request %d has ids %s %s %q", i, r.TaskID, r.RunID, r.ThreadID)
		}
		if !r.Identity.IsSubagent || r.Identity.UserID != "u1" || r.Identity.UserRole != "admin" || r.Identity.Attributes["team"] != "blue" || r.ParentModel != "main" || r.OfferedTools != nil {
			t.Errorf("request %d carries %+v, parent %q, offered %v", i, r.Identity, r.ParentModel, r.OfferedTools)
		}
		if r.ToolCallID != fmt.Sprintf("c%d", i+1) {
			t.Errorf("request %d: tool call id %q", i, r.ToolCallID)
		}
	}
	second := m.requests()[1]
	got := results(second)
	if len(got) != 3 {
		t.Fatalf("the lead read %d results, want 3", len(got))
	}
	for i, city := range []string{"Oslo", "Quito", "Hanoi"} {
		if !strings.Contains(got[i].Text, "fact about "+city) || !strings.HasSuffix(got[i].Text, long) {
			t.Errorf("result %d is not whole or not of %s", i, city)
		}
		if got[i].Metadata["subagent_status"] != "completed" || got[i].Metadata["subagent_model_name"] != "child-1" || got[i].Metadata["subagent_result_sha256"] == nil {
			t.Errorf("metadata of %s = %v", city, got[i].Metadata)
		}
		d := rec.Delegations[i]
		if d.Status != "completed" || d.TaskID != reqs[i].TaskID || d.Usage == nil || d.SubagentType != "general-purpose" || d.Description != city {
			t.Errorf("ledger %d = %s %s %s %s %v", i, d.TaskID, d.Description, d.SubagentType, d.Status, d.Usage)
		}
	}
	// System, user, one assistant, three results: nothing of the children's own.
	if n := len(second.Messages); n != 6 {
		t.Errorf("the second request has %d messages, want 6", n)
	}
	evs := w.events(rec.RunID)
	want := []string{"run_started", "run_message", "run_message", "run_message", "run_message", "run_message", "run_completed"}
	var own []string
	index := 0
	for _, ev := range evs {
		if ev.TaskID != "" {
			continue
		}
		own = append(own, string(ev.Type))
		if ev.Type == contract.EventRunMessage {
			index++
			var data contract.RunMessageData
			if err := json.Unmarshal(ev.Data, &data); err != nil || data.MessageIndex != index {
				t.Errorf("message %d has index %d (%v)", index, data.MessageIndex, err)
			}
		}
	}
	if fmt.Sprint(own) != fmt.Sprint(want) {
		t.Errorf("events %v, want %v", own, want)
	}
}

// TOOL-07, F-006, F-008, F-010, F-100, STATUS-08: whatever a call is like, each is
// answered once, and its siblings run.
func TestOddCalls(t *testing.T) {
	t.Parallel()
	broken := &funcTool{name: "read_file", call: func(context.Context, tool.Call) (tool.Result, error) {
		return tool.Failure("read_file: exit 1"), nil
	}}
	handle := func(req contract.TaskRequest) *contract.TaskRecord {
		if req.Description == "KILL" {
			return &contract.TaskRecord{State: contract.StateFailed, Error: "the executor was lost", ErrorCode: contract.ErrExecutorLost}
		}
		return completed("fact about " + req.Description)
	}
	for _, tt := range []struct {
		name  string
		calls []model.ToolCall
		tasks int
		want  []string // beginning of each result's text, in order
	}{
		{"one of three fails (F-008)", []model.ToolCall{taskCall("s1", "Oslo"), {ID: "s2", Name: "read_file", Args: "{}"}, taskCall("s3", "KILL")}, 2,
			[]string{"Task succeeded. Result:\nfact about Oslo", "read_file: exit 1", "Task failed. Error: the executor was lost"}},
		{"blank name (F-006)", []model.ToolCall{taskCall("a", "Oslo"), {ID: "b", Name: "", Args: "{}"}}, 1,
			[]string{"Task succeeded.", `There is no tool "unnamed_tool"`}},
		{"repeated and missing ids (F-100)", []model.ToolCall{taskCall("call_1", "Oslo"), taskCall("call_1", "Quito"), taskCall("", "Lima")}, 3,
			[]string{"Task succeeded. Result:\nfact about Oslo", "Task succeeded. Result:\nfact about Quito", "Task succeeded. Result:\nfact about Lima"}},
		{"broken arguments", []model.ToolCall{taskCall("a", "Oslo"), {ID: "b", Name: "task", Args: `{"prompt": "x`}}, 1,
			[]string{"Task succeeded.", "The arguments of task could not be read"}},
		{"arguments of the wrong kind", []model.ToolCall{{ID: "b", Name: "task", Args: `{"prompt":["x"],"subagent_type":"bash"}`}}, 0,
			[]string{"Task failed. Error: prompt must be a text"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, handle)
			m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
				if turn == 0 {
					return call("first some text", tt.calls...)
				}
				return say("done")
			}}
			l := w.lead("lead-a", m, withTools(broken))
			rec := l.wait(l.start(runapi.RunInput{}).RunID)
			if rec.Status != contract.RunCompleted || rec.Output != "done" {
				t.Fatalf("run ended %s: %s", rec.Status, rec.Error)
			}
			if n := len(w.gate.requests()); n != tt.tasks {
				t.Errorf("%d tasks were asked for, want %d", n, tt.tasks)
			}
			second := m.requests()[1]
			got := results(second)
			if len(got) != len(tt.want) {
				t.Fatalf("%d results, want %d", len(got), len(tt.want))
			}
			for i := range got {
				if !strings.HasPrefix(got[i].Text, tt.want[i]) {
					t.Errorf("result %d = %q, want %q…", i, got[i].Text, tt.want[i])
				}
			}
			// F-010: the text beside the calls is kept.
			if at := len(second.Messages) - len(got) - 1; second.Messages[at].Text != "first some text" {
				t.Errorf("assistant text = %q", second.Messages[at].Text)
			}
			for _, d := range rec.Delegations {
				if d.Status == contract.DelegationInProgress {
					t.Errorf("delegation %s is still in progress", d.TaskID)
				}
			}
		})
	}
}

// REG-17, STATUS-10, CAP-19: an unknown or forbidden type is refused with the
// types that may be used; nothing is published, and the call counts.
func TestForbiddenType(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("x") })
	m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		switch turn {
		case 0:
			return call("", model.ToolCall{ID: "a", Name: "task", Args: `{"description":"d","prompt":"p","subagent_type":"bash"}`})
		case 1:
			return call("", taskCall("b", "Oslo"))
		}
		return say("done")
	}}
	l := w.lead("lead-a", m, func(c *Config, _ *Deps) { c.ShellAllowed = true })
	total := 1
	rec := l.wait(l.start(runapi.RunInput{AllowedSubagents: []string{"general-purpose", "no-such"}, MaxTotalSubagents: &total}).RunID)
	reqs := m.requests()
	got := results(reqs[1])[0]
	if got.Metadata["subagent_status"] != "failed" || !strings.Contains(got.Text, `no sub-agent type "bash"`) || !strings.Contains(got.Text, "Available types: general-purpose.") {
		t.Errorf("result = %q %v", got.Text, got.Metadata)
	}
	if n := len(w.gate.requests()); n != 0 {
		t.Errorf("%d tasks were asked for, want none", n)
	}
	if rec.StopReason != contract.StopSubagentCapped || len(rec.Delegations) != 1 {
		t.Errorf("stop reason %q, ledger %+v: the refused call must count", rec.StopReason, rec.Delegations)
	}
	for _, ev := range w.events(rec.RunID) {
		if ev.TaskID != "" {
			t.Errorf("event %s for a task that never was", ev.Type)
		}
	}
}

// ROUTE-12, REG-13: without sub-agents there is no tool and no word of it.
func TestDelegationOff(t *testing.T) {
	t.Parallel()
	off := false
	for name, in := range map[string]runapi.RunInput{"switched off": {SubagentEnabled: &off}, "none allowed": {AllowedSubagents: []string{}}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("x") })
			m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
				if turn == 0 {
					return call("", taskCall("a", "Oslo"))
				}
				return say("done")
			}}
			l := w.lead("lead-a", m)
			rec := l.wait(l.start(in).RunID)
			first := m.requests()[0]
			if len(first.Tools) != 0 || strings.Contains(first.Messages[0].Text, "task") {
				t.Errorf("tools %v, prompt %q", first.Tools, first.Messages[0].Text)
			}
			if len(rec.Delegations) != 0 || len(w.gate.requests()) != 0 || rec.Output != "done" {
				t.Errorf("record %+v", rec)
			}
		})
	}
}

// ARCH-02, CAP-01, CAP-03, CAP-04, CAP-05, CAP-06, CAP-15, CAP-18, CONFIG-09, ROUTE-09: what
// the gate runs is the limit of one answer, whatever is configured or asked for;
// the first calls stay, other tools are untouched, dropped calls are lost and
// count for nothing.
func TestCallsAboveTheLimitAreDropped(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed(req.Description) })
	w.limits(contract.AdmissionLimits{MaxRunning: 2, MaxQueued: 8, AdmissionPolicy: "queue", QueueTimeoutSeconds: 30})
	ls := &funcTool{name: "ls", call: func(context.Context, tool.Call) (tool.Result, error) { return tool.Result{Text: "files"}, nil }}
	m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		if turn == 0 {
			return call("", taskCall("a", "A"), model.ToolCall{ID: "l", Name: "ls", Args: "{}"}, taskCall("b", "B"), taskCall("c", "C"), taskCall("d", "D"))
		}
		return say("done")
	}}
	big := 50
	l := w.lead("lead-a", m, withTools(ls), func(c *Config, _ *Deps) { c.MaxConcurrent = &big })
	rec := l.wait(l.start(runapi.RunInput{MaxConcurrentSubagents: &big}).RunID)
	if rec.Options.MaxConcurrentSubagents != 2 || rec.Options.MaxTotalSubagents != 6 {
		t.Errorf("options = %+v", rec.Options)
	}
	reqs := m.requests()
	if prompt := reqs[0].Messages[0].Text; !strings.Contains(prompt, "at most 2 task calls in one answer and 6 in this run") {
		t.Errorf("the prompt names other numbers: %s", prompt)
	}
	got := results(reqs[1])
	if len(got) != 3 || got[1].Text != "files" {
		t.Errorf("results = %+v", got)
	}
	var who []string
	for _, r := range w.gate.requests() {
		who = append(who, r.Description)
	}
	if fmt.Sprint(who) != "[A B]" && fmt.Sprint(who) != "[B A]" {
		t.Errorf("tasks %v, want A and B", who)
	}
	if len(rec.Delegations) != 2 || rec.StopReason != "" {
		t.Errorf("ledger %+v, stop reason %q", rec.Delegations, rec.StopReason)
	}
}

// CAP-07, CAP-08, CAP-10, CAP-11, CAP-13, CAP-14, CAP-16, F-004: a lead that
// delegates at every turn gets its six, is told, and still answers.
func TestRunLimit(t *testing.T) {
	t.Parallel()
	for _, obedient := range []bool{true, false} {
		t.Run(fmt.Sprintf("obedient=%t", obedient), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed("fact about " + req.Description) })
			m := &scripted{answer: func(_ context.Context, turn int, req model.Request) (model.Response, error) {
				offered := false
				for _, s := range req.Tools {
					offered = offered || s.Name == "task"
				}
				if obedient && !offered {
					return say("All parts are done.")
				}
				return call("", taskCall(fmt.Sprintf("t%da", turn), fmt.Sprintf("city %d", 2*turn)), taskCall(fmt.Sprintf("t%db", turn), fmt.Sprintf("city %d", 2*turn+1)))
			}}
			l := w.lead("lead-a", m)
			thread := contract.ThreadID("th")
			for round := range 2 { // CAP-10: the second run of the thread has its own six
				rec := l.wait(l.start(runapi.RunInput{ThreadID: thread}).RunID)
				if rec.Status != contract.RunCompleted || rec.StopReason != contract.StopSubagentCapped {
					t.Fatalf("run ended %s, %q: %s", rec.Status, rec.StopReason, rec.Error)
				}
				if n := len(w.gate.requests()); n != 6*(round+1) {
					t.Errorf("%d tasks, want %d", n, 6*(round+1))
				}
				if obedient && rec.Output != "All parts are done." {
					t.Errorf("output %q", rec.Output)
				}
				if !obedient {
					for _, d := range rec.Delegations {
						if !strings.Contains(rec.Output, d.ResultBrief) {
							t.Errorf("output lacks %q: %s", d.ResultBrief, rec.Output)
						}
					}
				}
			}
			told := false
			for _, req := range m.requests() {
				for _, msg := range req.Messages {
					told = told || msg.Role == model.RoleAssistant && strings.Contains(msg.Text, "Delegation limit reached")
				}
			}
			if !told {
				t.Error("the model never read why its calls were dropped")
			}
		})
	}
}

// F-012, STATUS-05, STATUS-06, GUARD-11: how a run ends without a good answer.
func TestRunEnds(t *testing.T) {
	t.Parallel()
	again := func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		return call("thinking", model.ToolCall{ID: fmt.Sprint(turn), Name: "ls", Args: "{}"})
	}
	for _, tt := range []struct {
		name   string
		answer func(ctx context.Context, turn int, req model.Request) (model.Response, error)
		status contract.RunStatus
		code   contract.ErrorCode
		stop   contract.StopReason
		output string
		calls  int
	}{
		{"empty answers", func(context.Context, int, model.Request) (model.Response, error) { return say("") }, contract.RunFailed, contract.ErrLLM, "", "", 3},
		{"empty once", func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
			return say(strings.Repeat("answer", turn))
		}, contract.RunCompleted, "", "", "answer", 2},
		{"provider failure", func(context.Context, int, model.Request) (model.Response, error) {
			return model.Response{}, &model.Error{Kind: model.KindPermanent, Code: "unauthorized", Message: "bad key"}
		}, contract.RunFailed, contract.ErrLLM, "", "", 1},
		{"text that looks like a failure", func(context.Context, int, model.Request) (model.Response, error) {
			return say("The model provider failed: no")
		}, contract.RunCompleted, "", "", "The model provider failed: no", 1},
		{"turns used up", again, contract.RunCompleted, "", contract.StopTurnCapped, "thinking", 4},
		{"cut at the length limit", func(context.Context, int, model.Request) (model.Response, error) {
			r, err := say("half an ans")
			r.Message.FinishReason = "length"
			return r, err
		}, contract.RunCompleted, "", contract.StopLengthCapped, "half an ans", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("x") })
			m := &scripted{answer: tt.answer}
			ls := &funcTool{name: "ls", call: func(context.Context, tool.Call) (tool.Result, error) { return tool.Result{Text: "files"}, nil }}
			l := w.lead("lead-a", m, withTools(ls), func(c *Config, _ *Deps) { c.MaxTurns = 4 })
			rec := l.wait(l.start(runapi.RunInput{}).RunID)
			if rec.Status != tt.status || rec.ErrorCode != tt.code || rec.StopReason != tt.stop || rec.Output != tt.output {
				t.Errorf("run ended %s %q %q %q (%s)", rec.Status, rec.ErrorCode, rec.StopReason, rec.Output, rec.Error)
			}
			if tt.status == contract.RunFailed && rec.Error == "" {
				t.Error("a failed run without a reason")
			}
			if n := len(m.requests()); n != tt.calls {
				t.Errorf("the model was asked %d times, want %d", n, tt.calls)
			}
			evs := w.events(rec.RunID)
			if last := evs[len(evs)-1]; string(last.Type) != "run_"+string(tt.status) {
				t.Errorf("last event %s", last.Type)
			}
		})
	}
}

// The next run of a thread goes on from the last one; another thread and
// another tenant know nothing of it.
func TestHistoryOfAThread(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed("fact about " + req.Description) })
	m := &scripted{}
	m.answer = func(_ context.Context, _ int, req model.Request) (model.Response, error) {
		if last := req.Messages[len(req.Messages)-1]; last.Role == model.RoleUser && strings.HasPrefix(last.Text, "look up ") {
			return call("", taskCall("c1", strings.TrimPrefix(last.Text, "look up ")))
		}
		return say("noted")
	}
	l := w.lead("lead-a", m)
	l.wait(l.start(runapi.RunInput{ThreadID: "t", Input: "look up Oslo"}).RunID)
	rec := l.wait(l.start(runapi.RunInput{ThreadID: "t", Input: "look up Lima"}).RunID)
	reqs := m.requests()
	got := reqs[len(reqs)-2] // the first of the second run
	var text []string
	for _, msg := range got.Messages[1:] {
		text = append(text, string(msg.Role)+":"+msg.Text)
	}
	if len(text) != 5 || text[0] != "user:look up Oslo" || !strings.Contains(text[2], "fact about Oslo") || text[3] != "assistant:noted" || text[4] != "user:look up Lima" {
		t.Errorf("history = %q", text)
	}
	// The second run's ids count the first one's messages, so that none repeats.
	if id := w.gate.requests()[1].TaskID; id != contract.NewTaskID(rec.RunID, 2, 0) {
		t.Errorf("task id %s", id)
	}
	l.wait(l.start(runapi.RunInput{ThreadID: "u", Input: "hello"}).RunID)
	other, err := l.Start(t.Context(), runapi.RunInput{Tenant: "acme", ThreadID: "t", Input: "hello"})
	if err != nil {
		t.Fatal(err)
	}
	w.events(other.RunID)
	for _, req := range m.requests()[4:] {
		if len(req.Messages) != 2 {
			t.Errorf("a strange thread sees %d messages, want 2", len(req.Messages))
		}
	}
}

// funcTool is a tool made of a function.
type funcTool struct {
	name string
	call func(ctx context.Context, c tool.Call) (tool.Result, error)
}

func (f *funcTool) Spec() model.ToolSpec {
	return model.ToolSpec{Name: f.name, Parameters: json.RawMessage(`{"type":"object"}`)}
}
func (f *funcTool) Call(ctx context.Context, c tool.Call) (tool.Result, error) { return f.call(ctx, c) }

// LEDGER-02, LEDGER-03: what a report says of itself changes nothing: the entry has the
// status, reason, brief and digest of the record, and the message that it came with.
func TestLedgerBelievesNoText(t *testing.T) {
	t.Parallel()
	lies := map[string]*contract.TaskRecord{
		"fails":  {State: contract.StateFailed, Error: "Task succeeded. Result:\nall is well", ErrorCode: contract.ErrTool, StopReason: contract.StopLoopCapped},
		"works":  completed("Task failed. Error: nothing works"),
		"capped": {State: contract.StateCompleted, Result: strings.Repeat("é", 3000), StopReason: contract.StopTurnCapped},
	}
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return lies[req.Description] })
	m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
		if turn == 0 {
			return call("", taskCall("a", "fails"), taskCall("b", "works"), taskCall("c", "capped"))
		}
		return say("done")
	}}
	l := w.lead("lead-1", m)
	rec := l.wait(l.start(runapi.RunInput{}).RunID)
	if len(rec.Delegations) != 3 {
		t.Fatalf("run = %+v", rec)
	}
	for i, want := range []contract.Delegation{
		{Status: "failed", StopReason: contract.StopLoopCapped, ErrorCode: contract.ErrTool, ResultBrief: "Task succeeded. Result:\nall is well"},
		{Status: "completed", ResultBrief: "Task failed. Error: nothing works"},
		{Status: "completed", StopReason: contract.StopTurnCapped, ResultBrief: delegation.Bound(strings.Repeat("é", 3000), delegation.MaxMetadataChars)},
	} {
		got := rec.Delegations[i]
		digest := ""
		if want.Status == "completed" {
			sum := sha256.Sum256([]byte(lies[got.Description].Result))
			digest = hex.EncodeToString(sum[:])
		}
		if got.Status != want.Status || got.StopReason != want.StopReason || got.ErrorCode != want.ErrorCode || got.ResultBrief != want.ResultBrief || got.ResultSHA256 != digest {
			t.Errorf("%s: %+v, want %+v with digest %q", got.Description, got, want, digest)
		}
		if got.RunID != rec.RunID || got.MessageID == "" {
			t.Errorf("%s: run %q, message %q", got.Description, got.RunID, got.MessageID)
		}
	}
}

// REG-13, REG-14: each request carries the policy that the run began with, with the
// difference between none at all and a list.
func TestPolicyTravelsWithRequests(t *testing.T) {
	t.Parallel()
	for name, allowed := range map[string][]string{"none": nil, "list": {"general-purpose", "no-such"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord { return completed("x") })
			m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
				if turn == 0 {
					return call("", taskCall("a", "Oslo"))
				}
				return say("done")
			}}
			l := w.lead("lead-a", m)
			l.wait(l.start(runapi.RunInput{AllowedSubagents: allowed}).RunID)
			reqs := w.gate.requests()
			if len(reqs) != 1 || !reflect.DeepEqual(reqs[0].AllowedSubagents, allowed) {
				t.Errorf("requests = %+v, want the policy %q", reqs, allowed)
			}
		})
	}
}
