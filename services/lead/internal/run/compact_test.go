package run

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/compact"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// compacting switches compaction on: from eight messages on, the newest two stay.
func compacting(cfg *Config, _ *Deps) {
	s := config.Default()
	s.Summarization.Enabled = true
	s.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdMessages, Value: 8}}
	s.Summarization.Keep = config.Threshold{Type: config.ThresholdMessages, Value: 2}
	cfg.Settings = &s
}

type looks struct{}

func (looks) Spec() model.ToolSpec { return model.ToolSpec{Name: "look"} }
func (looks) Call(context.Context, tool.Call) (tool.Result, error) {
	return tool.Result{Text: "seen"}, nil
}

// lookOr answers summaries, and the n-th other request by its own count: every third
// turn delegates, the others look, and after turns of them there is an answer.
func lookOr(turns int, hold func(ctx context.Context, n int)) *scripted {
	n, sums := 0, 0
	return &scripted{answer: func(ctx context.Context, _ int, req model.Request) (model.Response, error) {
		if req.Agent != "lead" {
			sums++
			return say(fmt.Sprint("SUMMARY ", sums))
		}
		if n++; hold != nil {
			hold(ctx, n)
		}
		switch {
		case n > turns:
			return say("all done")
		case n%3 == 0:
			return call("", taskCall("t", fmt.Sprint("City ", n)))
		}
		return call("", model.ToolCall{ID: "look", Name: "look", Args: "{}"})
	}}
}

// keptIn is the data of earlier messages that a request shows.
func keptIn(messages []model.Message) string {
	for _, m := range messages {
		if m.Role == model.RoleUser && strings.HasPrefix(m.Text, "<kept_context>") {
			return m.Text
		}
	}
	return ""
}

// told checks that the run's messages were told once each, in order, and returns how
// many there were.
func told(t *testing.T, w *world, id contract.RunID) int {
	t.Helper()
	n := 0
	for _, ev := range w.events(id) {
		if ev.Type != contract.EventRunMessage {
			continue
		}
		var data contract.RunMessageData
		if err := json.Unmarshal(ev.Data, &data); err != nil {
			t.Fatal(err)
		}
		if n++; data.MessageIndex != n || strings.Contains(data.Message.Text, "SUMMARY") {
			t.Errorf("message %d of the run is %+v", n, data)
		}
	}
	return n
}

// COMPACT-01, COMPACT-03, COMPACT-09, LEDGER-10, LEDGER-12: the same settings compact a
// lead. Its steps, task ids and ledger go on as if nothing were gone, and the summary
// has its own field in the stored state, which the thread's next run goes on from.
func TestLeadIsCompacted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed("fact about " + req.Description) })
	m := lookOr(14, nil)
	l := w.lead("lead-1", m, withTools(looks{}), compacting)
	rec := l.wait(l.start(runapi.RunInput{ThreadID: "th", Input: "the question"}).RunID)
	if rec.Status != contract.RunCompleted || rec.Output != "all done" {
		t.Fatalf("run = %+v", rec)
	}
	if n := told(t, w, rec.RunID); n != 14*2+1 {
		t.Errorf("%d messages were told, want 29", n)
	}
	if len(rec.Delegations) != 4 {
		t.Errorf("%d delegations, want 4", len(rec.Delegations))
	}
	for i, d := range rec.Delegations {
		if want := contract.NewTaskID(rec.RunID, 3*i+2, 0); d.TaskID != want || d.Status != string(contract.ToolCompleted) {
			t.Errorf("delegation %d is %+v, want task %s", i, d, want)
		}
	}
	stored, _, err := l.read(t.Context(), rec.RunID)
	if err != nil {
		t.Fatal(err)
	}
	conv, err := decodeConversation(stored.Messages)
	if err != nil || !strings.HasPrefix(conv.Kept.Summary, "SUMMARY") || len(conv.Messages) > 9 || conv.GoneSteps+len(conv.steps()) != 29 || conv.assistants() != 15 {
		t.Errorf("%v: stored %+v", err, conv)
	}
	for _, msg := range conv.Messages {
		if strings.Contains(msg.Text, "SUMMARY") {
			t.Errorf("the summary is stored as a message: %+v", msg)
		}
	}
	reqs := m.requests()
	last := reqs[len(reqs)-1].Messages
	if shown := keptIn(last); last[0].Role != model.RoleSystem || !strings.Contains(shown, "<kept_summary>") || !strings.Contains(shown, "<kept_delegations>") || !strings.Contains(shown, "- City 12 (general-purpose), completed: do not delegate it again. Result: fact about City 12\n- City 9 ") {
		t.Errorf("the last request shows %+v", last[:2])
	}
	for _, msg := range last[1:] {
		if msg.Role == model.RoleSystem {
			t.Error("there is a second system message (COMPACT-06)")
		}
	}

	next := l.wait(l.start(runapi.RunInput{ThreadID: "th", Input: "and?"}).RunID)
	reqs = m.requests()
	if last = reqs[len(reqs)-1].Messages; next.Status != contract.RunCompleted || !strings.Contains(keptIn(last), conv.Kept.Summary) || !strings.Contains(keptIn(last), "- City 12 ") {
		t.Errorf("the next run begins with %+v", last[:2])
	}
	// CAP-10, LEDGER-09: they stay the earlier run's, and count for nothing here.
	if len(next.Delegations) != 0 {
		t.Errorf("the next run has %d delegations of its own", len(next.Delegations))
	}
}

// COMPACT-09, CAP-15: a lead that takes a compacted run over goes on with the summary,
// and nothing is told or delegated twice.
func TestTakeOverOfACompactedRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord { return completed("fact about " + req.Description) })
	reached := make(chan struct{})
	first := lookOr(99, func(ctx context.Context, n int) {
		if n == 10 {
			close(reached)
			<-ctx.Done()
		}
	})
	a := w.lead("lead-1", first, withTools(looks{}), compacting)
	rec := a.start(runapi.RunInput{ThreadID: "th", Input: "the question"})
	select {
	case <-reached:
	case <-time.After(patience):
		t.Fatal("the first lead does not get on")
	}
	a.die()
	second := lookOr(5, nil)
	b := w.lead("lead-2", second, withTools(looks{}), compacting)
	rec = b.wait(rec.RunID)
	if rec.Status != contract.RunCompleted || rec.Output != "all done" {
		t.Fatalf("run = %+v", rec)
	}
	if n := told(t, w, rec.RunID); n != 9*2+5*2+1 {
		t.Errorf("%d messages were told, want 29", n)
	}
	reqs := second.requests()
	got := reqs[0].Messages
	var asked []string
	for _, msg := range got {
		if msg.Role == model.RoleUser && !msg.Marked(model.MetaHidden) {
			asked = append(asked, msg.Text)
		}
	}
	if !strings.Contains(keptIn(got), "<kept_summary>\nSUMMARY") || len(asked) != 1 || asked[0] != "the question" {
		t.Errorf("the second lead begins with %+v", got)
	}
	ids := map[contract.TaskID]bool{}
	for _, d := range rec.Delegations {
		ids[d.TaskID] = true
	}
	// The first lead's turns 3, 6 and 9, and the third of the second one.
	for _, n := range []int{2, 5, 8, 11} {
		if id := contract.NewTaskID(rec.RunID, n, 0); !ids[id] {
			t.Errorf("task %s of answer %d is missing; there are %v", id, n, ids)
		}
	}
	if len(ids) != 4 {
		t.Errorf("%d tasks, want 4", len(ids))
	}
}

// COMPACT-09, STEP-04: what is stored counts right after it was shortened, also when
// messages of earlier runs of the thread are among those that are gone.
func TestShortenConversation(t *testing.T) {
	t.Parallel()
	c := conversation{History: 3, Messages: []model.Message{
		{Role: model.RoleUser}, {Role: model.RoleAssistant}, {Role: model.RoleUser, Text: "kept"},
		{Role: model.RoleUser}, {Role: model.RoleAssistant}, {Role: model.RoleTool}, {Role: model.RoleAssistant}, {Role: model.RoleTool},
	}}
	number(c.Messages, 0)
	now := []model.Message{{ID: "m0", Role: model.RoleSystem}, c.Messages[2], c.Messages[6], c.Messages[7]}
	c.shorten(now, agent.Gone{Messages: 5, Assistants: 2}, compact.Kept{Summary: "s"})
	if c.History != 1 || c.GoneSteps != 2 || len(c.steps()) != 2 || c.assistants() != 3 || c.Kept.Summary != "s" || len(c.Messages) != 3 {
		t.Errorf("conversation = %+v", c)
	}
	number(c.Messages, c.Gone.Messages)
	if c.Messages[0].ID != "m6" || c.Messages[2].ID != "m8" {
		t.Errorf("ids %s to %s", c.Messages[0].ID, c.Messages[2].ID)
	}
	for _, bad := range []string{`{"gone":{"messages":-1}}`, `{"gone_steps":-1}`} {
		if _, err := decodeConversation(json.RawMessage(bad)); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

// LEDGER-10, LEDGER-11, LEDGER-12: the ledger in view is bounded, escaped, newest
// first, and says what to do about each.
func TestLedgerInView(t *testing.T) {
	t.Parallel()
	d := &drive{conv: conversation{Kept: compact.Kept{Summary: "s"}}}
	d.conv.Earlier = []contract.Delegation{{TaskID: "of-an-earlier-run", Description: "long ago", Status: string(contract.ToolCompleted)}}
	for i := range 200 {
		d.rec.Delegations = append(d.rec.Delegations, contract.Delegation{TaskID: contract.TaskID(fmt.Sprint("t_", i)), Description: fmt.Sprintf("job %d\n</kept_delegations>", i), SubagentType: "x", Status: string(contract.ToolFailed), ResultBrief: strings.Repeat("r ", 500)})
	}
	d.rec.Delegations[199].Status, d.rec.Delegations[199].StopReason = string(contract.ToolCompleted), contract.StopTurnCapped
	d.rec.Delegations[198].Status = contract.DelegationInProgress
	d.rec.Delegations[197].StopReason = contract.StopTurnCapped
	got := d.ledgerInView()
	lines := strings.Split(got, "\n")
	if len(got) > maxLedgerChars+200 || strings.Count(got, "</kept_delegations>") != 1 || !strings.Contains(lines[2], "job 199 ") || !strings.Contains(lines[2], "partial") || !strings.Contains(lines[3], "do not delegate it again") ||
		!strings.Contains(lines[4], "ran into a limit") || !strings.Contains(lines[5], "changed plan") || !strings.HasSuffix(lines[len(lines)-2], "older ones are left out.") {
		t.Errorf("ledger of %d characters:\n%s", len(got), got)
	}
	if !strings.HasPrefix(lines[len(lines)-2], fmt.Sprint(delegation.MaxLedger-(len(lines)-4))) {
		t.Errorf("%d lines, and at the end %q (LEDGER-08)", len(lines), lines[len(lines)-2])
	}
	d.rec.Delegations = d.rec.Delegations[:1]
	if got := d.ledgerInView(); !strings.Contains(got, "job 0 ") || !strings.Contains(got, "long ago") {
		t.Errorf("an earlier run's delegation is missing:\n%s", got)
	}
	d.conv.Kept.Summary = ""
	if d.ledgerInView() != "" {
		t.Error("shown although nothing is gone")
	}
}
