package run

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// CTX-06, CTX-12, LEDGER-04, LEDGER-09, F-020: whoever takes a run over adds no message of a
// user, and knows by the stored boundary which messages the thread had before the run:
// their delegations stay the earlier run's, are neither made nor counted again, and
// nothing of them is told as the run's own.
func TestResumeKnowsItsBoundary(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(req contract.TaskRequest) *contract.TaskRecord {
		if req.Description == "held" {
			return nil
		}
		return completed("fact about " + req.Description)
	})
	asks := func(req model.Request) (all []string) {
		for _, m := range req.Messages {
			if m.Role == model.RoleUser && !m.Marked(model.MetaHidden) {
				all = append(all, m.Text)
			}
		}
		return all
	}
	answer := func(_ context.Context, _ int, req model.Request) (model.Response, error) {
		users := asks(req)
		switch last := req.Messages[len(req.Messages)-1]; {
		case last.Role == model.RoleTool && users[len(users)-1] == "second" && strings.Contains(last.Text, "Lima"):
			return call("", taskCall("c", "Cairo")) // the lead that took the run over
		case last.Role == model.RoleTool:
			return say("that is it")
		case users[len(users)-1] == "first":
			// The same ids of calls as in the other run: ids of models tell nothing apart.
			return call("", taskCall("a", "Oslo"), taskCall("b", "Quito"))
		}
		return call("", taskCall("a", "held"), taskCall("b", "Lima"))
	}
	a := w.lead("lead-a", &scripted{answer: answer})
	first := a.wait(a.start(runapi.RunInput{ThreadID: "th", Input: "first"}).RunID)
	rec := a.start(runapi.RunInput{ThreadID: "th", Input: "second", UserID: "ann", UserRole: "user", Attributes: map[string]string{"team": "blue"}})
	w.gate.await(4)
	natstest.Eventually(t, patience, func() (bool, string) {
		now, err := a.Get(t.Context(), contract.DefaultTenant, rec.RunID)
		lima := slices.ContainsFunc(now.Delegations, func(d contract.Delegation) bool { return d.Description == "Lima" && d.Status == "completed" })
		return err == nil && lima, fmt.Sprintf("%+v %v", now.Delegations, err)
	})
	before := w.conversation(a, rec.RunID)
	a.die()
	second := &scripted{answer: answer}
	b := w.lead("lead-b", second)
	natstest.Eventually(t, patience, func() (bool, string) {
		now, err := b.Get(t.Context(), contract.DefaultTenant, rec.RunID)
		return err == nil && now.Owner != rec.Owner, "owner is " + now.Owner
	})
	for _, req := range w.gate.requests() {
		w.gate.end(t.Context(), req.TaskID, *completed("fact about " + req.Description)) // the held one
	}
	end := b.wait(rec.RunID)
	after := w.conversation(b, rec.RunID)

	if end.Status != contract.RunCompleted || end.Output != "that is it" {
		t.Errorf("run ended %s: %q %s", end.Status, end.Output, end.Error)
	}
	if before.History != 5 || after.History != before.History {
		t.Errorf("%d messages were there before the run, after the take-over it is %d; want 5", before.History, after.History)
	}
	for i, m := range before.Messages[:before.History] {
		if got := after.Messages[i]; got.ID != m.ID || got.Role != m.Role || got.Text != m.Text {
			t.Errorf("message %d before the run was %+v and is %+v", i, m, got)
		}
	}
	for _, req := range second.requests() {
		if got := asks(req); !slices.Equal(got, []string{"first", "second"}) {
			t.Errorf("after the take-over the model reads the questions %q", got)
		}
	}
	var own []string
	for _, d := range end.Delegations {
		own = append(own, d.Description)
		if d.RunID != rec.RunID || d.Status != "completed" {
			t.Errorf("delegation %+v, want one of %s that is completed", d, rec.RunID)
		}
	}
	if !slices.Equal(own, []string{"held", "Lima", "Cairo"}) {
		t.Errorf("the run's delegations are %q", own)
	}
	for _, d := range after.Earlier {
		if d.RunID != first.RunID {
			t.Errorf("an earlier delegation is the run's own now: %+v", d)
		}
	}
	if len(after.Earlier) != 2 {
		t.Errorf("%d earlier delegations, want 2", len(after.Earlier))
	}
	reqs := w.gate.requests()
	if len(reqs) != 5 {
		t.Errorf("%d requests, want 5", len(reqs))
	}
	// CTX-06: on whose behalf a run works is stored with it.
	if id := reqs[len(reqs)-1].Identity; id.UserID != "ann" || id.UserRole != "user" || id.Attributes["team"] != "blue" {
		t.Errorf("after the take-over the identity is %+v", id)
	}
	for _, ev := range w.events(rec.RunID) {
		if text, _ := json.Marshal(ev); strings.Contains(string(text), "Oslo") {
			t.Errorf("told as the run's own: %s", text)
		}
	}
}

// conversation reads what is stored of a run.
func (w *world) conversation(l *lead, id contract.RunID) conversation {
	w.t.Helper()
	rec, _, err := l.read(w.t.Context(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	conv, err := decodeConversation(rec.Messages)
	if err != nil {
		w.t.Fatal(err)
	}
	return conv
}
