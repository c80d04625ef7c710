package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// judged runs doctor --history and returns what it says of the history.
func judged(t *testing.T, dir string, code int, args ...string) (doctor.History, doctor.Check) {
	t.Helper()
	r := herdgate(t, dir, nil, append([]string{"doctor", "--history", "--output", "json"}, args...)...).want(t, code)
	report := decode[doctor.Report](t, r.stdout)
	for _, c := range report.Checks {
		if c.Name != "history" {
			continue
		}
		if report.History == nil {
			t.Fatalf("no history: %+v", c)
		}
		return *report.History, c
	}
	t.Fatalf("no check of the history:\n%s", clip(r.stdout))
	return doctor.History{}, doctor.Check{}
}

// I1 to I6: doctor --history finds nothing wrong while the system is at work, and
// finds what was forged into its streams, with what proves it.
func TestDoctorJudgesTheHistory(t *testing.T) {
	t.Parallel()
	srv := natstest.Start(t, natstest.Listen(), natstest.Tune(func(o *server.Options) { o.JetStreamMaxStore = 1 << 40 }))
	dir := testConfig(t, "")
	p, lead := up(t, dir, nil, "--nats-url", srv.URL())
	at := []string{"--server", lead, "--nats-url", srv.URL()}
	api, err := client.New(lead, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*deadline)
	defer cancel()
	var ids []contract.TaskID
	working, done := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for n := 0; working.Err() == nil; n++ {
			acc, err := api.SubmitTask(working, wire.TaskRequest{SubagentType: "general-purpose", Prompt: "a quick look"})
			if err != nil {
				continue // the queue is full, or it is over
			}
			ids = append(ids, acc.TaskID)
			if n%7 == 0 {
				_ = api.CancelTask(working, acc.TaskID)
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-working.Done():
			}
		}
	}()
	for round := range 4 {
		h, c := judged(t, dir, 0, at...)
		if len(h.Violations) > 0 || c.Status != doctor.OK || h.Source != "nats" {
			t.Fatalf("round %d: %s: %s\n%v", round, c.Status, c.Detail, h.Violations)
		}
	}
	done()
	<-over
	for _, id := range ids {
		natstest.Eventually(t, deadline, func() (bool, string) {
			task, err := api.GetTask(ctx, id)
			if err != nil {
				return false, err.Error()
			}
			return task.Status.Terminal(), string(task.Status)
		})
	}
	h, c := judged(t, dir, 0, at...)
	if h.Tasks < 5 || h.Events < 5*h.Tasks/2 || h.Records == 0 || h.StoredTo == 0 || h.From == nil || !h.From.Before(*h.To) || h.Cut != "" {
		t.Errorf("what was looked at: %+v", h)
	}
	contains(t, "history", c.Detail, "no violation in", "events of", "the event store up to")
	if h, c := judged(t, dir, 0, append(at, "--max-events", "20")...); h.Events > 20 || !strings.Contains(h.Cut, "older events were not read") || len(h.Violations) > 0 {
		t.Errorf("of a part: %s: %+v", c.Detail, h)
	}

	// Somebody tells another end of a task, takes a record back, and grants a task
	// a slot that is taken.
	conn := srv.Conn("forger")
	read := func(id contract.TaskID) contract.TaskRecord {
		m, err := conn.Last(ctx, conn.TaskStream(), conn.KV(contract.TaskKey(id)))
		if err != nil {
			t.Fatal(err)
		}
		rec, err := contract.DecodeTaskRecord(m.Data)
		if err != nil {
			t.Fatal(err)
		}
		return rec
	}
	var completed []contract.TaskRecord
	for _, id := range ids {
		if rec := read(id); rec.State == contract.StateCompleted {
			completed = append(completed, rec)
		}
	}
	if len(completed) < 2 {
		t.Fatalf("%d tasks have completed, want 2", len(completed))
	}
	other := completed[0]
	other.State = contract.StateFailed
	ev, err := event.Terminal(other, "/forger")
	if err != nil {
		t.Fatal(err)
	}
	ev.ID += ".again"
	data, err := envelope.Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Publish(ctx, bus.Write{Subject: ev.NATSSubject(conn.Names), Data: data, Header: nats.Header(ev.Headers())}); err != nil {
		t.Fatal(err)
	}
	back := completed[1]
	back.State, back.FinishedAt = contract.StateFailed, other.FinishedAt
	body, err := json.Marshal(back)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Publish(ctx, bus.Write{Subject: conn.KV(contract.TaskKey(back.TaskID)), Data: body}); err != nil {
		t.Fatal(err)
	}
	h, c = judged(t, dir, 1, at...)
	want := map[contract.TaskID]string{other.TaskID: "it has 2 ends", back.TaskID: "its record says failed, and its last event completed"}
	for _, v := range h.Violations {
		if v.Rule == invariant.OneEnd && v.Text == want[contract.TaskID(v.Subject)] && len(v.Proof) == 2 {
			delete(want, contract.TaskID(v.Subject))
		}
	}
	if len(want) > 0 || c.Status != doctor.Fail {
		t.Errorf("not found: %v; found %v", want, h.Violations)
	}
	text := herdgate(t, dir, nil, append([]string{"doctor", "--history"}, at...)...).want(t, 1).stdout
	matches(t, "doctor", text, `^fail +history +\d+ violations in `, `^I4 one end: `+string(other.TaskID)+`: it has 2 ends$`, `^  event +\d+ .* subagent\.end +`+string(other.TaskID)+`\.end\.again$`)
	stopped(t, p)
}

// An embedded server that does not listen is looked at through the lead.
func TestDoctorJudgesThroughTheLead(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "")
	p, lead := up(t, dir, nil)
	for range 3 {
		herdgate(t, dir, nil, "run", "quick", "--server", lead).want(t, 0)
	}
	var h doctor.History
	natstest.Eventually(t, deadline, func() (bool, string) {
		h, _ = judged(t, dir, 0, "--server", lead)
		return h.Events > 20, "events are missing"
	})
	if h.Source != "lead" || h.Tasks != 3 || h.Runs != 3 || len(h.Violations) > 0 {
		t.Errorf("history = %+v", h)
	}
	if h, _ := judged(t, dir, 0, "--server", lead, "--max-events", "5"); h.Events > 5 || h.Cut == "" {
		t.Errorf("of a part: %+v", h)
	}
	stopped(t, p)
	r := herdgate(t, dir, nil, "doctor", "--history", "--server", lead).want(t, 1)
	matches(t, "doctor", r.stdout, `^fail +history +it cannot be read: `)
	contains(t, "stderr", herdgate(t, dir, nil, "doctor", "--history", "--max-events", "0").want(t, 1).stderr, "--max-events: 0; want 1 or more")
}
