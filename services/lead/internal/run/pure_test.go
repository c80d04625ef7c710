package run

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// oneType is a catalogue with a single type.
type oneType struct{ timeout int }

func (o oneType) Visible([]string, bool) []subagent.Definition {
	return []subagent.Definition{{Name: "general-purpose", Description: "does it", MaxTurns: 3, TimeoutSeconds: o.timeout, Model: "inherit"}}
}

// TOOL-08, F-022, REPORT-06: arguments are read tolerantly.
func TestTaskArgs(t *testing.T) {
	t.Parallel()
	many, err := json.Marshal(slices.Repeat([]string{"x"}, 30))
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]string{
		`{"prompt":"p","subagent_type":"a","acceptance_criteria":["x"," ",3," y "]}`: "[x y]",
		`{"prompt":"p","acceptance_criteria":"[\"x\",\"y\"]"}`:                       "[x y]",
		`{"prompt":"p","acceptance_criteria":"tests pass"}`:                          "[tests pass]",
		`{"prompt":"p","acceptance_criteria":null}`:                                  "[]",
		`{"prompt":"p"}`: "[]",
		`{"prompt":"p","acceptance_criteria":""}`:      "[]",
		`{"prompt":"p","acceptance_criteria":"[1,2"}`:  "error",
		`{"prompt":"p","acceptance_criteria":{"a":1}}`: "error",
		`{"prompt":7}`: "error",
		`{"prompt":"p","acceptance_criteria":` + string(many) + `}`:       fmt.Sprint(slices.Repeat([]string{"x"}, contract.MaxCriteria)),
		`{"prompt":"p","extra":1,"description":" d ","subagent_type":""}`: "[]",
	} {
		a, err := decodeTaskArgs([]byte(in))
		got := fmt.Sprint(a.Criteria)
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("decodeTaskArgs(%.80s) = %s (%v), want %s", in, got, err, want)
		}
	}
}

func FuzzTaskArgs(f *testing.F) {
	for _, s := range []string{`{}`, `{"prompt":"p","acceptance_criteria":"[\"x\"]"}`, `{"description":"\ud800","prompt":"\u0000"}`, `[1`, strings.Repeat("[", 200)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeTaskArgs(b)
		if err != nil {
			return
		}
		if len(a.Criteria) > contract.MaxCriteria {
			t.Errorf("%d criteria", len(a.Criteria))
		}
		if _, err := json.Marshal(a); err != nil {
			t.Error(err)
		}
	})
}

func FuzzConversation(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","text":"hi"},{"role":"assistant","tool_calls":[{"id":"a","name":"task","args":"{}"}]}],"history":1}`))
	f.Add([]byte(`{"history":-1}`))
	f.Add([]byte(`{"messages":[{"role":"tool"}],"history":5}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeConversation(b)
		if err != nil {
			return
		}
		c.answerInterrupted()
		c.open()
		c.steps()
		if err := paired(c.history(1 << 10)); err != nil && !strings.Contains(err.Error(), "id") && !strings.Contains(err.Error(), "without a name") {
			t.Errorf("history of %s: %v", b, err)
		}
	})
}

func exchange(n int, size int) []model.Message {
	text := strings.Repeat("x", size)
	return []model.Message{
		{Role: model.RoleUser, Text: fmt.Sprintf("question %d", n)},
		{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{ID: fmt.Sprintf("c%d", n), Name: "ls", Args: "{}"}}},
		{Role: model.RoleTool, ToolCallID: fmt.Sprintf("c%d", n), ToolName: "ls", Text: text},
		{Role: model.RoleAssistant, Text: fmt.Sprintf("answer %d", n)},
	}
}

// F-016, F-020: what the next run takes over is bounded, begins with a question,
// and has one result for each call.
func TestHistory(t *testing.T) {
	t.Parallel()
	var c conversation
	for n := range 10 {
		c.Messages = append(c.Messages, exchange(n, 1000)...)
	}
	got := c.history(5000)
	if got[0].Role != model.RoleUser || got[len(got)-1].Text != "answer 9" || sizeOf(got) > 5000 || len(got) != 12 {
		t.Errorf("history has %d messages, %d bytes, begins with %s", len(got), sizeOf(got), got[0].Role)
	}
	for i, m := range got {
		if m.ID != fmt.Sprintf("m%d", i+1) {
			t.Errorf("message %d has id %s", i, m.ID)
		}
	}
	// An exchange too large by itself keeps its ends.
	big := conversation{Messages: exchange(1, 100_000)}
	if got := big.history(5000); sizeOf(got) > 5000 || got[0].Text != "question 1" || got[len(got)-1].Text != "answer 1" {
		t.Errorf("large exchange: %d bytes, %d messages", sizeOf(got), len(got))
	}
	huge := conversation{Messages: []model.Message{{Role: model.RoleUser, Text: strings.Repeat("\x01", 100_000)}, {Role: model.RoleAssistant, Text: strings.Repeat("\x01", 100_000)}}}
	if got := huge.history(50_000); sizeOf(got) > 50_000 || len(got) != 2 {
		t.Errorf("huge texts: %d bytes, %d messages", sizeOf(got), len(got))
	}
	// Calls without results, empty replies and provider failures.
	odd := conversation{Messages: []model.Message{
		{Role: model.RoleUser, Text: "q"},
		{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{ID: "a", Name: "task", Args: `{"broken`}, {ID: "b", Name: "ls", Args: "{}"}}},
		{Role: model.RoleTool, ToolCallID: "b", Text: "files"},
		{Role: model.RoleAssistant},
		{Role: model.RoleAssistant, Text: "the provider failed", ErrorFallback: true},
	}}
	got = odd.history(1 << 20)
	if err := paired(got); err != nil {
		t.Error(err)
	}
	if len(got) != 5 || got[4].ErrorFallback {
		t.Errorf("history = %+v", got)
	}
}

// CAP-16: the record stays below its limit, and the ledger whole.
func TestRecordIsBounded(t *testing.T) {
	t.Parallel()
	c := conversation{}
	for n := range 100 {
		c.Messages = append(c.Messages, exchange(n, 20_000)...)
	}
	open := model.ToolCall{ID: "open", Name: "task", Args: `{"prompt":"` + strings.Repeat("p", 50_000) + `"}`}
	c.Messages = append(c.Messages, model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{open}})
	rec := contract.RunRecord{RunID: "r_1", ThreadID: "t", Tenant: "default"}
	for n := range 50 {
		rec.Delegations = append(rec.Delegations, contract.Delegation{TaskID: contract.NewTaskID("r_1", n, 0), ResultBrief: strings.Repeat("b", 2000)})
	}
	before := c.assistants()
	b, err := encodeRecord(&rec, &c, maxRecordBytes)
	if err != nil {
		t.Fatal(err)
	}
	got, err := contract.DecodeRunRecord(b)
	if err != nil || len(b) > maxRecordBytes || len(got.Delegations) != 50 || len(got.Delegations[49].ResultBrief) != 2000 {
		t.Fatalf("record has %d bytes, %d entries: %v", len(b), len(got.Delegations), err)
	}
	back, err := decodeConversation(got.Messages)
	if err != nil || back.assistants() != before || back.Messages[len(back.Messages)-1].ToolCalls[0].Args != open.Args {
		t.Errorf("%d assistant messages, want %d; %v", back.assistants(), before, err)
	}
	if first, last := len(back.Messages[2].Text), len(back.Messages[len(back.Messages)-3].Text); first > last {
		t.Errorf("the oldest result has %d bytes, a newer one %d: the oldest go first", first, last)
	}
	if _, err := encodeRecord(&rec, &c, 100_000); !errors.Is(err, errTooLarge) {
		t.Errorf("with 100 kB of ledger in 100 kB: %v, want too large", err)
	}
}

// LEDGER-01, LEDGER-06: entries are made once and end once.
func TestLedger(t *testing.T) {
	t.Parallel()
	msg := model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{
		{ID: "l", Name: "ls", Args: "{}"}, taskCall("a", strings.Repeat("é", 300)), {ID: "b", Name: "task", Args: "broken"},
	}}
	l := capture(nil, "r_1", msg, 4, time.Now())
	l = capture(l, "r_1", msg, 4, time.Now())
	if len(l) != 2 || l[0].TaskID != contract.NewTaskID("r_1", 4, 1) || l[1].TaskID != contract.NewTaskID("r_1", 4, 2) || len([]rune(l[0].Description)) != 200 {
		t.Fatalf("ledger = %+v", l)
	}
	if l = settle(l, l[0].TaskID, outcomeOf{Status: contract.ToolCompleted, Usage: &contract.Usage{TotalTokens: 5}}); l[0].Status != "completed" {
		t.Error("the entry was not settled")
	}
	if l = settle(l, l[0].TaskID, outcomeOf{Status: contract.ToolFailed}); l[0].Status != "completed" {
		t.Errorf("an ended entry became %s", l[0].Status)
	}
	if u := totalUsage(nil, l); u == nil || u.TotalTokens != 5 {
		t.Errorf("usage = %+v", u)
	}
	if u := totalUsage(nil, l[1:]); u != nil {
		t.Errorf("usage = %+v, want unknown (USAGE-06)", u)
	}
}

// The picture of the bucket: what is done with is forgotten, what nobody drives
// is due.
func TestView(t *testing.T) {
	t.Parallel()
	const ttl = 10 * time.Second
	v := newView()
	v.record("running", contract.RunRunning, false, 0)
	v.lease("running", leaseLive, time.Second)
	v.record("silent", contract.RunRunning, false, 0)
	v.record("expired", contract.RunRunning, false, 0)
	v.lease("expired", leaseLive, 0)
	v.lease("expired", leaseExpired, 0)
	v.record("done", contract.RunCompleted, false, 0)
	v.lease("done", leaseClosed, 0)
	v.lease("orphan", leaseLive, 0)
	v.record("forgotten", contract.RunFailed, false, 0)
	if got := v.due(time.Hour, ttl); got != nil {
		t.Errorf("due before the picture is complete: %v", got)
	}
	v.caughtUp()
	due := func(now time.Duration) string {
		got := v.due(now, ttl)
		slices.Sort(got)
		return fmt.Sprint(got)
	}
	if got := due(2 * time.Second); got != "[expired]" {
		t.Errorf("due at 2 s: %s", got)
	}
	if got := due(10*time.Second + time.Millisecond); got != "[expired forgotten silent]" {
		t.Errorf("due after a lease: %s", got)
	}
	v.tried("expired", 11*time.Second, 5*time.Second)
	v.lease("silent", leaseLive, 11*time.Second)
	if got := due(12 * time.Second); got != "[forgotten running]" {
		t.Errorf("due at 12 s: %s", got)
	}
	v.lease("running", leaseClosed, 12*time.Second)
	if got := due(12 * time.Second); got != "[forgotten running]" {
		t.Errorf("a handed-over run: %s", got)
	}
	v.lease("forgotten", leaseClosed, 0)
	v.record("running", "", true, 0)
	v.lease("orphan", leaseExpired, 0)
	if len(v.entries) != 2 {
		t.Errorf("%d entries are left, want expired and silent", len(v.entries))
	}
}
