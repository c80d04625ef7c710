package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/doctor"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
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
	// What is wrong is looked at for seconds before it is told, so several look at once.
	begin := func(args ...string) *proc {
		t.Helper()
		return start(t, dir, nil, append([]string{"events", "verify", "--output", "json", "--server", lead, "--nats-url", srv.URL()}, args...)...)
	}
	result := func(p *proc, code int) doctor.Verified {
		t.Helper()
		if got := p.wait(); got != code {
			t.Fatalf("exit code %d, want %d", got, code)
		}
		return decode[doctor.Verified](t, p.stdout.String())
	}
	verify := func(code int, args ...string) doctor.Verified { t.Helper(); return result(begin(args...), code) }
	storeAnswers(t, dir, lead)
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
	all, ofRun, fresh := begin(), begin("--run", "r_a"), begin("--since", "1ns")
	check(result(all, 1), want)
	check(result(ofRun, 1), map[string]string{"t_endless": want["t_endless"], "t_untold": want["t_untold"], "t_gap": want["t_gap"]})
	check(result(fresh, 0), nil)

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
	second, text := begin("--repair"), start(t, dir, nil, "events", "verify", "--run", "r_a", "--nats-url", srv.URL())
	check(result(second, 1), want)
	if again, err := c.Last(ctx, c.Names.EventStream(), m.Subject); err != nil || again.Seq != m.Seq {
		t.Errorf("the second repair stored it again: %+v, %v", again, err)
	}
	if code := text.wait(); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	contains(t, "text", text.stdout.String(), "wrong", "t_gap", "message_index 3", "failed", "compared")
}

// I6, EVT-14: `events verify` finds what the event store has lost, what it holds
// otherwise than the stream, and what it alone has, with either database.
func TestEventsVerifyStore(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		dir := testConfig(t, "")
		verifyStore(t, dir, func(statement string) {
			db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "data", sqlite.File)+"?_pragma=busy_timeout(10000)")
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if _, err := db.ExecContext(t.Context(), statement); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		pg := pgtest.Start(t)
		dsn := pg.Database()
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		verifyStore(t, testConfig(t, fmt.Sprintf("eventsink: {store: postgres, dsn: %q}\n", dsn)), func(statement string) {
			pg.SQL(strings.TrimPrefix(u.Path, "/"), statement)
		})
	})
}

// storeAnswers waits for the event sink: the lead may be ready before it.
func storeAnswers(t *testing.T, dir, lead string) {
	t.Helper()
	natstest.Eventually(t, deadline, func() (bool, string) {
		r := herdgate(t, dir, nil, "events", "--limit", "1", "--server", lead)
		return r.code == 0, r.stderr
	})
}

// verifyStore forges the store of a system that has done some work.
func verifyStore(t *testing.T, dir string, forge func(statement string)) {
	srv := natstest.Start(t, natstest.Listen())
	_, lead := up(t, dir, nil, "--nats-url", srv.URL(), "--data-dir", filepath.Join(dir, "data"))
	at := []string{"--server", lead}
	herdgate(t, dir, nil, append([]string{"run", "quick <b>&amp;\u2028"}, at...)...).want(t, 0)
	// A number of the stream that no event has.
	c := srv.Conn("forger")
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	junk := envelope.Event{Type: contract.EventTaskRunning, Tenant: "default", ThreadID: "th", RunID: "r_junk", TaskID: "t_junk"}
	ack, err := c.Publish(ctx, bus.Write{Subject: junk.NATSSubject(c.Names), Data: []byte("no event")})
	if err != nil {
		t.Fatal(err)
	}
	verify := func(code int) doctor.Verified {
		t.Helper()
		r := herdgate(t, dir, nil, append([]string{"events", "verify", "--output", "json", "--nats-url", srv.URL()}, at...)...).want(t, code)
		return decode[doctor.Verified](t, r.stdout)
	}
	storeAnswers(t, dir, lead)
	// In the store is in the end what is in the stream, to the letter.
	got := verify(0)
	var stored []contract.EventRecord
	for line := range strings.Lines(herdgate(t, dir, nil, append([]string{"events"}, at...)...).want(t, 0).stdout) {
		stored = append(stored, decode[contract.EventRecord](t, line))
	}
	if len(got.Unreadable) != 1 || got.StoredTo != ack.Seq || got.Events != len(stored) || len(stored) < 5 {
		t.Fatalf("%d events are stored: %+v", len(stored), got)
	}

	lost, other := stored[0], stored[len(stored)-2] // the first too: nothing was deleted because of its age
	forge(fmt.Sprintf(`DELETE FROM events WHERE seq = %d`, lost.Seq))
	forge(fmt.Sprintf(`UPDATE events SET content = '{"task_id":"forged"}' WHERE seq = %d`, other.Seq))
	forge(fmt.Sprintf(`INSERT INTO events (seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at)
		SELECT %d, 'forged', tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at FROM events WHERE seq = %d`, ack.Seq, other.Seq))
	want := map[uint64]string{lost.Seq: "is not in the store", other.Seq: "otherwise than the stream", ack.Seq: "that the stream does not have"}
	for _, f := range verify(1).Findings {
		seq := f.Proof[0].Seq
		if text := want[seq]; text == "" || !strings.Contains(f.Text, text) || f.Mended || f.Mend == "" {
			t.Errorf("event %d: %+v, want %q", seq, f, text)
		}
		delete(want, seq)
	}
	for seq, text := range want {
		t.Errorf("event %d: %q was not found", seq, text)
	}
}
