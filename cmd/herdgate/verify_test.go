package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// I4, I6, EVT-12, EVT-22: `events verify` finds each way in which events, records and
// store can differ, and stores the ends that are missing, once.
func TestEventsVerify(t *testing.T) {
	t.Parallel()
	srv := natstest.Start(t, natstest.Listen())
	dir := testConfig(t, "")
	_, lead := up(t, dir, nil, "--nats-url", srv.URL())
	c := srv.Conn("forger")
	ctx, cancel := context.WithTimeout(context.Background(), 5*deadline)
	defer cancel()
	verify := func(code int, args ...string) doctor.Verified {
		t.Helper()
		r := herdgate(t, dir, nil, append([]string{"events", "verify", "--output", "json", "--server", lead, "--nats-url", srv.URL()}, args...)...).want(t, code)
		return decode[doctor.Verified](t, r.stdout)
	}
	if got := verify(0); !got.OK || len(got.Findings) > 0 {
		t.Fatalf("of a system that has done nothing: %+v", got)
	}

	now := time.Now().UTC().Truncate(time.Microsecond)
	record := func(id contract.TaskID, run contract.RunID) contract.TaskRecord {
		return contract.TaskRecord{
			TaskID: id, RunID: run, ThreadID: "th", Tenant: "default", State: contract.StateCompleted, Attempt: 1, Slot: 1, SubagentType: "general-purpose",
			Executor: "ex-1", Writer: "ex-1-0a/1", QueuedAt: now, GrantedAt: &now, StartedAt: &now, FinishedAt: &now, Result: "done",
		}
	}
	put := func(subject string, v any) {
		t.Helper()
		b, err := json.Marshal(v)
		if err == nil {
			_, err = c.Publish(ctx, bus.Write{Subject: subject, Data: b})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	tell := func(events ...envelope.Event) {
		t.Helper()
		for _, ev := range events {
			w, err := eventwrite.Of(c, ev)
			if err != nil {
				t.Fatal(err)
			}
			w.Header.Del(envelope.HeaderMsgID)
			w.MsgID = "" // the same again is what is to be found
			if _, err := c.Publish(ctx, w); err != nil {
				t.Fatal(err)
			}
		}
	}
	const src = "/herdgate/executor/ex-1"
	life := func(rec contract.TaskRecord, steps ...int) (all []envelope.Event) {
		req := contract.TaskRequest{TaskID: rec.TaskID, RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Subagent: contract.Subagent{Name: "general-purpose"}}
		all = append(all, event.Queued(req, "", "", 0, src, now), event.Admitted(rec, src, now), event.Started(rec, contract.TaskStartedData{Executor: "ex-1"}, src, now))
		for _, n := range steps {
			all = append(all, event.Running(rec, n, contract.Step{Kind: contract.StepAI}, "m", nil, src, now))
		}
		return all
	}
	end := func(rec contract.TaskRecord) envelope.Event {
		ev, err := event.Terminal(rec, src)
		if err != nil {
			t.Fatal(err)
		}
		return ev
	}
	endless, untold, gap, twice, other := record("t_endless", "r_a"), record("t_untold", "r_a"), record("t_gap", "r_a"), record("t_twice", "r_b"), record("t_other", "r_b")
	for _, rec := range []contract.TaskRecord{endless, untold, gap, twice, other} {
		put(c.KV(contract.TaskKey(rec.TaskID)), rec)
	}
	tell(life(endless, 1, 2)...) // killed between the record and its event
	tell(append(life(gap, 1, 3), end(gap))...)
	tell(append(life(twice, 1), end(twice), end(twice))...)
	told := other
	told.State = contract.StateFailed // another end than the record's
	tell(append(life(told), end(told))...)
	late := record("t_late", "r_b") // a step after the end
	tell(append(life(late), end(late), event.Running(late, 1, contract.Step{Kind: contract.StepAI}, "m", nil, src, now))...)
	run := contract.RunRecord{RunID: "r_end", ThreadID: "th", Tenant: "default", Status: contract.RunCompleted, Output: "yes", Owner: "lead-9", CreatedAt: now, FinishedAt: &now}
	tell(event.RunStarted(run, "/herdgate/lead/lead-9", now))
	if _, err := c.Publish(ctx, bus.Write{Subject: c.RunKV(contract.RunLeaseKey(run.RunID)), Header: map[string][]string{"KV-Operation": {"DEL"}}}); err != nil {
		t.Fatal(err)
	}
	put(c.RunKV(contract.RunKey(run.RunID)), run)
	ghost := run // events without a record
	ghost.RunID = "r_ghost"
	tell(event.RunStarted(ghost, "/herdgate/lead/lead-9", now))

	want := map[string]string{
		"t_endless": "no event tells of it", "t_untold": "no event tells of it", "t_gap": "message_index 3 of attempt 1 follows 1",
		"t_twice": "the same event is stored twice", "t_other": "its last event failed", "t_late": "after the task's end",
		"r_end": "no event tells of it", "r_ghost": "it has no record",
	}
	check := func(got doctor.Verified, want map[string]string) map[string]doctor.Finding {
		t.Helper()
		found := map[string]doctor.Finding{}
		for _, f := range got.Findings {
			if text, ok := want[f.Subject]; ok && strings.Contains(f.Text, text) {
				found[f.Subject] = f
			} else if !ok {
				t.Errorf("nothing was wrong with %s: %s", f.Subject, f.Text)
			}
			if !f.Mended && f.Mend == "" {
				t.Errorf("%s: nothing says what to do", f.Subject)
			}
		}
		for id, text := range want {
			if _, ok := found[id]; !ok {
				t.Errorf("%s: %q was not found", id, text)
			}
		}
		return found
	}
	check(verify(1), want)
	check(verify(1, "--run", "r_a"), map[string]string{"t_endless": want["t_endless"], "t_untold": want["t_untold"], "t_gap": want["t_gap"]})
	check(verify(0, "--since", "1ns"), nil)

	found := check(verify(1, "--repair"), want)
	for id, mended := range map[string]bool{"t_endless": true, "r_end": true, "t_untold": false, "t_gap": false, "t_twice": false, "r_ghost": false} {
		if found[id].Mended != mended {
			t.Errorf("%s: mended %v, want %v (%s)", id, found[id].Mended, mended, found[id].Mend)
		}
	}
	m, err := c.Last(ctx, c.Names.EventStream(), end(endless).NATSSubject(c.Names))
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := envelope.Decode(m.Data); err != nil || ev.ID != "t_endless.end" || ev.Source != src || !ev.Time.Equal(now) {
		t.Errorf("what was stored: %+v, %v", ev, err)
	}
	delete(want, "t_endless")
	delete(want, "r_end")
	check(verify(1, "--repair"), want)
	if again, err := c.Last(ctx, c.Names.EventStream(), m.Subject); err != nil || again.Seq != m.Seq {
		t.Errorf("the second repair stored it again: %+v, %v", again, err)
	}
	r := herdgate(t, dir, nil, "events", "verify", "--run", "r_a", "--nats-url", srv.URL()).want(t, 1)
	contains(t, "text", r.stdout, "wrong", "t_gap", "message_index 3", "failed", "compared")
}
