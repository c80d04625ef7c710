package system

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nats.go/micro"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// unsteady sends each connection to the next of several leads, and breaks the
// first ones, some of them before their first event.
type unsteady struct {
	next  http.RoundTripper
	hosts []string
	turn  atomic.Int64
	cuts  atomic.Int64
	most  int64
}

func (u *unsteady) RoundTrip(req *http.Request) (*http.Response, error) {
	n := u.turn.Add(1)
	req = req.Clone(req.Context())
	req.URL.Host = u.hosts[n%int64(len(u.hosts))]
	resp, err := u.next.RoundTrip(req)
	if err == nil && u.cuts.Load() < u.most {
		resp.Body = &broken{ReadCloser: resp.Body, u: u, left: 20 + int(n*397%4000)}
	}
	return resp, err
}

type broken struct {
	io.ReadCloser
	u    *unsteady
	left int
}

var errBroken = errors.New("the connection was cut")

func (b *broken) Read(p []byte) (int, error) {
	if b.left <= 0 {
		b.u.cuts.Add(1)
		_ = b.ReadCloser.Close()
		return 0, errBroken
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// listed are the ids of all stored events, page by page.
func listed(t *testing.T, c *client.Client, q client.EventQuery) []contract.EventRecord {
	t.Helper()
	q.Limit = 100
	var out []contract.EventRecord
	for after := uint64(0); ; {
		page, err := c.ListEvents(timeout(t), q, after)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, page.Events...)
		if !page.HasMore {
			return out
		}
		after = page.NextAfterSeq
	}
}

// pgDisconnects is how often the reader of the PostgreSQL store is cut off.
var pgDisconnects = flag.Int64("disconnects", 20, "how many disconnects TestDisconnectsPostgres has")

// EVT-13, F-018, I6: a reader that is disconnected 100 times, and comes back to one of
// two leads each time, has got what the store has, while work goes on. EVT-19: each
// ending is there once.
func TestHundredDisconnects(t *testing.T) {
	t.Parallel()
	disconnects(t, 100, sqlite.Opener(t.TempDir()))
}

// The same with PostgreSQL.
func TestDisconnectsPostgres(t *testing.T) {
	t.Parallel()
	pg := pgtest.Start(t)
	disconnects(t, *pgDisconnects, postgres.Opener(pg.Database(), false))
}

func disconnects(t *testing.T, most int64, open eventsink.OpenFunc) {
	s := New(t, Options{Model: Delegator{}})
	s.SinkOf("sink-1", eventsink.Config{}, open)
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	_, c := s.Lead("lead-1", t.TempDir())
	_, second := s.Lead("lead-2", t.TempDir())
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	cut := &unsteady{next: transport, hosts: []string{hostOf(c), hostOf(second)}, most: most}
	reader, err := client.New("http://"+hostOf(c), "", &http.Client{Transport: cut})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*Timeout)
	defer cancel()
	worked := make(chan contract.RunID, 1)
	go func() {
		defer close(worked)
		last := contract.RunID("")
		// There is work until all cuts have hit it.
		for i := 0; ctx.Err() == nil && (last == "" || cut.cuts.Load() < cut.most); i++ {
			run, err := []*client.Client{c, second}[i%2].RunToEnd(ctx, wire.RunRequest{Input: "find foo\nfind bar\n" + strings.Repeat("x", 1000)})
			if err != nil {
				t.Errorf("run %d: %v", i, err)
				cancel()
				return
			}
			last = run.RunID
		}
		// One more, so that its end comes after all of them.
		run, err := c.RunToEnd(ctx, wire.RunRequest{Input: "the last"})
		if err != nil {
			t.Errorf("last run: %v", err)
			cancel()
			return
		}
		worked <- run.RunID
	}()
	var got []contract.EventRecord
	var final contract.RunID
	err = reader.WithPauses(time.Millisecond, 5*time.Millisecond).Stream(ctx, client.EventQuery{
		OnGap: func(g wire.Gap) { t.Errorf("gap %v", g) },
	}, 0, func(rec contract.EventRecord) error {
		got = append(got, rec)
		if rec.EventType != contract.RecordRunCompleted {
			return nil
		}
		// The run is told as ended after its event is out.
		var out struct{ Output string }
		if json.Unmarshal(rec.Content, &out) == nil && strings.HasSuffix(out.Output, "THE LAST") {
			final = rec.RunID
			return client.ErrStop
		}
		return nil
	})
	if id := <-worked; err != nil || id != final {
		stream, ierr := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
		if ierr != nil {
			t.Fatal(err, ierr)
		}
		for info := range stream.ListConsumers(timeout(t)).Info() {
			t.Logf("consumer %s from %d: delivered %+v, %d pending, %d requests wait", info.Name, info.Config.OptStartSeq, info.Delivered, info.NumPending, info.NumWaiting)
		}
		t.Fatalf("stream: %v; after %d events and %d disconnects it ended with run %q, want %q; the last event is %s; the stream ends at %d",
			err, len(got), cut.cuts.Load(), final, id, text(got[max(0, len(got)-1):]), stream.CachedInfo().State.LastSeq)
	}
	if n := cut.cuts.Load(); n < cut.most {
		t.Fatalf("%d disconnects, want %d", n, cut.most)
	}
	stored := listed(t, c, client.EventQuery{})
	stored = stored[:min(len(stored), len(got))]
	if len(stored) != len(got) {
		t.Fatalf("the reader got %d events, the store has %d", len(got), len(stored))
	}
	ends := map[contract.TaskID]int{}
	for i, rec := range got {
		if rec.Seq != stored[i].Seq || rec.EventID != stored[i].EventID || !sameJSON(rec.Content, stored[i].Content) {
			t.Fatalf("event %d is %d %s, in the store %d %s", i, rec.Seq, rec.EventID, stored[i].Seq, stored[i].EventID)
		}
		if rec.EventType == contract.RecordEnd {
			ends[rec.TaskID]++
		}
	}
	for id, n := range ends {
		if n != 1 {
			t.Errorf("task %s has ended %d times", id, n)
		}
	}
	t.Logf("%d events over %d disconnects", len(got), cut.cuts.Load())
}

func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// hostOf is where a client's lead listens.
func hostOf(c *client.Client) string { return strings.TrimPrefix(c.BaseURL(), "http://") }

// A cursor that is older than what is kept is told what is missing, with the real
// sink and its retention, by a lead that has never seen these events.
func TestGapAfterRetention(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Unrecorded: true}) // the history is deleted
	s.SinkOf("sink-1", eventsink.Config{Retention: time.Millisecond, HouseInterval: 20 * time.Millisecond}, sqlite.Opener(t.TempDir()))
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	_, c := s.Lead("lead-1", t.TempDir())
	feed := s.Follow()
	s.Submit(Request("one"))
	feed.Ended(1)
	// The stream forgets it as well; what the store has deleted is asked of the store.
	stream, err := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	last := stream.CachedInfo().State.LastSeq
	natstest.Eventually(t, Timeout, func() (bool, string) {
		resp, err := eventapi.List(timeout(t), s.Bus, eventapi.ListRequest{})
		return err == nil && resp.PrunedSeq >= last && len(resp.Events) == 0, fmt.Sprint(resp.PrunedSeq, " of ", last, " deleted: ", err)
	})
	if err := stream.Purge(timeout(t), jetstream.WithPurgeSequence(last+1)); err != nil {
		t.Fatal(err)
	}
	var gaps []wire.Gap
	next := Request("two")
	told := make(chan struct{})
	go func() {
		select {
		case <-told:
			s.Submit(next)
		case <-timeout(t).Done():
		}
	}()
	var first contract.EventRecord
	err = c.Stream(timeout(t), client.EventQuery{OnGap: func(g wire.Gap) {
		if gaps = append(gaps, g); len(gaps) == 1 {
			close(told)
		}
	}}, 2, func(rec contract.EventRecord) error { first = rec; return client.ErrStop })
	if err != nil || len(gaps) != 1 || gaps[0] != (wire.Gap{FromSeq: 3, ToSeq: last}) {
		t.Fatalf("gaps %v, %v; want 3 to %d", gaps, err, last)
	}
	if first.Seq != last+1 || first.TaskID != next.TaskID {
		t.Errorf("after the gap came %d of %s, want %d of %s", first.Seq, first.TaskID, last+1, next.TaskID)
	}
	feed.Ended(2)
}

// $SRV.INFO, which "nats micro ls" reads, lists all endpoints with what they do and
// the schemas of their messages; errors are in the headers; and a subject that ends
// in a tenant speaks for that tenant alone.
func TestEndpoints(t *testing.T) {
	t.Parallel()
	s := New(t, Options{})
	s.Whole()
	want := map[string]bool{"task.submit": true, "task.get": true, "task.cancel": true, "events.list": true, "admission.status": true, "agents.list": true, "agents.put": true, "agents.delete": true}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		found := map[string]bool{}
		for _, info := range services(t, s) {
			for _, e := range info.Endpoints {
				name := strings.TrimPrefix(e.Subject, s.Bus.Names.Prefix()+".svc.")
				if !want[strings.TrimSuffix(name, ".*")] {
					t.Fatalf("an endpoint nobody knows: %s", e.Subject)
				}
				found[name] = true
				for _, key := range []string{endpoint.MetaRequestSchema, endpoint.MetaResponseSchema} {
					var schema struct {
						Schema string `json:"$schema"`
						Type   string `json:"type"`
					}
					if err := json.Unmarshal([]byte(e.Metadata[key]), &schema); err != nil || schema.Schema == "" || schema.Type != "object" {
						t.Errorf("%s: %s is %.100q", name, key, e.Metadata[key])
					}
				}
				if e.Metadata[endpoint.MetaDescription] == "" {
					t.Errorf("%s has no description", name)
				}
			}
		}
		return len(found) == 12, fmt.Sprint("found ", found) // the gate and the definitions have no tenant
	})
	acme := Request("for acme")
	acme.Tenant = "acme"
	feed := s.Follow()
	s.Submit(acme)
	feed.Ended(1)
	_, last := lastSeq(t, s)
	ask := func(subject, body string) (string, string) {
		t.Helper()
		msg, err := s.Bus.NC.RequestWithContext(timeout(t), s.Bus.Names.Prefix()+".svc."+subject, []byte(body))
		if err != nil {
			t.Fatal(subject, err)
		}
		return msg.Header.Get(micro.ErrorCodeHeader), string(msg.Data)
	}
	list := fmt.Sprintf(`{"barrier_seq":%d}`, last)
	for _, tc := range []struct{ subject, body, code, has, hasNot string }{
		{"events.list.acme", list, "", `"` + string(acme.TaskID) + `"`, ""},
		{"events.list.other", list, "", `"events":[]`, string(acme.TaskID)},
		{"events.list.other", `{"task_id":"` + string(acme.TaskID) + `"}`, "", `"events":[]`, string(acme.TaskID)},
		{"events.list.other", `{"tenant":"acme"}`, "400", "invalid_request", string(acme.TaskID)},
		{"task.get.acme", `{"task_id":"` + string(acme.TaskID) + `"}`, "", `"completed"`, ""},
		{"task.get.other", `{"task_id":"` + string(acme.TaskID) + `"}`, "404", "not_found", "FOR ACME"},
		{"task.get.other", `{"task_id":"` + string(acme.TaskID) + `","tenant":"acme"}`, "400", "invalid_request", "FOR ACME"},
		{"task.cancel.other", `{"task_id":"` + string(acme.TaskID) + `"}`, "404", "not_found", ""},
		{"task.submit.other", `{"subagent_type":"general-purpose","prompt":"x","tenant":"acme"}`, "400", "invalid_request", ""},
		{"admission.status", `[`, "400", "", ""},
	} {
		code, body := ask(tc.subject, tc.body)
		if code != tc.code || !strings.Contains(body, tc.has) || tc.hasNot != "" && strings.Contains(body, tc.hasNot) {
			t.Errorf("%s %s: code %q, %.300s; want code %q, %q in it and %q not", tc.subject, tc.body, code, body, tc.code, tc.has, tc.hasNot)
		}
	}
}

func lastSeq(t *testing.T, s *System) (first, last uint64) {
	t.Helper()
	stream, err := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	st := stream.CachedInfo().State
	return st.FirstSeq, st.LastSeq
}

// services asks who is there, as the tools for NATS services do.
func services(t *testing.T, s *System) []micro.Info {
	t.Helper()
	inbox := s.Bus.NC.NewInbox()
	sub, err := s.Bus.NC.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := s.Bus.NC.PublishRequest("$SRV.INFO", inbox, nil); err != nil {
		t.Fatal(err)
	}
	var out []micro.Info
	for {
		msg, err := sub.NextMsg(300 * time.Millisecond)
		if err != nil {
			return out // nobody else answers
		}
		var info micro.Info
		if err := json.Unmarshal(msg.Data, &info); err != nil {
			t.Fatal(err)
		}
		out = append(out, info)
	}
}

// fates ends each task as its prompt says.
type fates struct{ Delegator }

func (f fates) Generate(ctx context.Context, req model.Request, on func(model.Delta)) (model.Response, error) {
	usage := &contract.Usage{InputTokens: 7, OutputTokens: 3, TotalTokens: 10}
	if req.Agent == "lead" {
		return f.Delegator.Generate(ctx, req, on)
	}
	switch task := taskOf(req); {
	case strings.Contains(task, "fail"):
		return model.Response{}, errors.New("the model is out of order")
	case strings.Contains(task, "hold"):
		<-ctx.Done()
		return model.Response{}, ctx.Err()
	case strings.Contains(task, "loop"):
		return model.Response{Message: call("nosuch", "{}"), Model: "delegator-1", Usage: usage}, nil
	}
	return f.Delegator.Generate(ctx, req, on)
}

// taskState is what the events of a task come to.
func taskState(records []contract.EventRecord) wire.Task {
	var out wire.Task
	for _, r := range records {
		var m struct {
			Attempt int `json:"attempt"`
		}
		var end struct {
			Status     contract.TaskStatus `json:"status"`
			Result     *string             `json:"result"`
			Error      *string             `json:"error"`
			ErrorCode  contract.ErrorCode  `json:"error_code"`
			StopReason *string             `json:"stop_reason"`
			ModelName  *string             `json:"model_name"`
			Usage      *contract.Usage     `json:"usage"`
		}
		_, _ = json.Unmarshal(r.Metadata, &m), json.Unmarshal(r.Content, &end)
		out.TaskID, out.RunID, out.ThreadID = r.TaskID, r.RunID, r.ThreadID
		at := r.CreatedAt
		if m.Attempt > 0 {
			out.Attempt = m.Attempt
		}
		switch r.EventType {
		case contract.RecordQueued:
			out.Status, out.QueuedAt = contract.TaskQueued, at
		case contract.RecordAdmitted:
			out.StartedAt = nil // another attempt
		case contract.RecordStart:
			out.Status, out.StartedAt = "running", &at
		case contract.RecordEnd:
			out.Status, out.FinishedAt = end.Status, &at
			out.Result, out.Error, out.ErrorCode, out.StopReason = end.Result, end.Error, end.ErrorCode, end.StopReason
			out.ModelName, out.Usage = end.ModelName, end.Usage
		}
	}
	return out
}

// micros is a time as events have it.
func micros(at *time.Time) *time.Time {
	if at == nil {
		return nil
	}
	v := at.Truncate(time.Microsecond)
	return &v
}

// same is the part of a task's view that events tell exactly.
func same(v wire.Task) wire.Task {
	return wire.Task{
		TaskID: v.TaskID, RunID: v.RunID, ThreadID: v.ThreadID, Status: v.Status, Attempt: v.Attempt, Result: v.Result, Error: v.Error,
		ErrorCode: v.ErrorCode, StopReason: v.StopReason, ModelName: v.ModelName, Usage: v.Usage, FinishedAt: micros(v.FinishedAt),
	}
}

func text(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// I11, EVT-16, EVT-17: what GET /v1/tasks and GET /v1/runs show can be made from the
// stored events alone, for tasks that completed, failed, were capped, cancelled, and
// moved to another executor.
func TestStateFromEvents(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: fates{}})
	s.Sink("sink-1", t.TempDir())
	s.Admission("adm-1")
	first := s.Executor("ex-1", 4, 50*time.Millisecond)
	_, c := s.Lead("lead-1", t.TempDir())
	feed := s.Follow()
	capped, moved := Request("loop"), Request("hold")
	capped.Subagent.MaxTurns = 1
	s.Submit(capped)
	s.Submit(moved)
	feed.started(2)
	feed.Ended(1)
	// The one that is held is handed to another executor, and then cancelled.
	s.Executor("ex-2", 4, time.Second)
	first.Stop()
	feed.started(3)
	if err := c.CancelTask(timeout(t), moved.TaskID); err != nil {
		t.Fatal(err)
	}
	feed.Ended(2)
	run, err := c.RunToEnd(timeout(t), wire.RunRequest{Input: "find foo\nfail"})
	if err != nil {
		t.Fatal(err)
	}
	feed.Ended(4)
	natstest.Eventually(t, Timeout, func() (bool, string) {
		page, err := c.ListEvents(timeout(t), client.EventQuery{RunID: run.RunID, Types: []string{contract.RecordRunCompleted}}, 0)
		return err == nil && len(page.Events) == 1, fmt.Sprint("events: ", page, err)
	})
	byTask := map[contract.TaskID][]contract.EventRecord{}
	var lead []contract.EventRecord
	for _, r := range listed(t, c, client.EventQuery{}) {
		if r.TaskID == "" {
			lead = append(lead, r)
		} else {
			byTask[r.TaskID] = append(byTask[r.TaskID], r)
		}
	}
	seen := map[string]int{}
	for id, records := range byTask {
		shown, err := c.GetTask(timeout(t), id)
		if err != nil {
			t.Fatal(err)
		}
		state := taskState(records)
		if got, want := text(same(state)), text(same(shown)); got != want {
			t.Errorf("task %s\n from events %s\n shown       %s", id, got, want)
		}
		// That a task was queued or has started is told a little later, never before.
		if state.QueuedAt.Before(*micros(&shown.QueuedAt)) || state.StartedAt == nil || shown.StartedAt == nil || state.StartedAt.Before(*micros(shown.StartedAt)) {
			t.Errorf("task %s was told as queued and started at %v, %v, and was at %v, %v", id, state.QueuedAt, state.StartedAt, shown.QueuedAt, shown.StartedAt)
		}
		seen[string(state.Status)]++
		if state.StopReason != nil {
			seen[*state.StopReason]++
		}
		if state.Attempt > 1 {
			seen["moved"]++
		}
	}
	for _, what := range []string{"completed", "failed", "cancelled", "turn_capped", "moved"} {
		if seen[what] == 0 {
			t.Errorf("no task was %s: %v", what, seen)
		}
	}
	// EVT-16: the run's own events are told from those of its tasks by their category.
	var end struct {
		Status     contract.RunStatus `json:"status"`
		Output     *string            `json:"output"`
		Error      *string            `json:"error"`
		StopReason *string            `json:"stop_reason"`
		Usage      *contract.Usage    `json:"usage"`
	}
	if last := lead[len(lead)-1]; json.Unmarshal(last.Content, &end) != nil || last.Category != contract.CategoryRun ||
		run.FinishedAt == nil || !last.CreatedAt.Equal(*micros(run.FinishedAt)) || lead[0].CreatedAt.Before(*micros(&run.CreatedAt)) {
		t.Errorf("the run's events %s to %s; shown %s", text(lead[0]), text(last), text(run))
	}
	if got, want := text([]any{end.Status, end.Output, end.Error, end.StopReason, end.Usage}), text([]any{run.Status, run.Output, run.Error, run.StopReason, run.Usage}); got != want {
		t.Errorf("run from events %s\n shown %s", got, want)
	}
}
