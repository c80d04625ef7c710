package feed

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
)

// twoAttempts is the life of a task that was lost after two steps and run again.
func twoAttempts(t *testing.T) []envelope.Event {
	t.Helper()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	rec := contract.TaskRecord{TaskID: "t_1", RunID: "r_1", ThreadID: "th", Tenant: "acme", State: contract.StateRunning, QueuedAt: now, GrantedAt: &now}
	req := contract.TaskRequest{TaskID: rec.TaskID, RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Subagent: contract.Subagent{Name: "x"}}
	out := []envelope.Event{event.Queued(req, "", "", 1, "s", now)}
	step := func(n int) envelope.Event {
		return event.Running(rec, n, contract.Step{Kind: contract.StepAI, Text: fmt.Sprint("attempt ", rec.Attempt)}, "m", nil, "s", now)
	}
	for rec.Attempt = 1; rec.Attempt <= 2; rec.Attempt++ {
		out = append(out, event.Admitted(rec, "s", now), event.Started(rec, contract.TaskStartedData{}, "s", now))
		for n := 1; n <= 3-rec.Attempt; n++ {
			out = append(out, step(n))
		}
	}
	rec.Attempt, rec.State, rec.FinishedAt = 2, contract.StateCompleted, &now
	end, err := event.Terminal(rec, "s")
	if err != nil {
		t.Fatal(err)
	}
	return append(out, end)
}

// EXEC-03, F-052: the history of a task that was run again is that of its newest
// attempt, whether it comes from the store or the stream, page by page or not; what
// the lost one told is still there, with its number, for who asks for it.
func TestHistoryIsTheNewestAttempts(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	store := feedtest.NewStore(t, c)
	var past []contract.EventRecord
	for i, ev := range twoAttempts(t) {
		past = append(past, feedtest.Record(t, ev, feedtest.Publish(t, c, ev)))
		store.Load(uint64(i+1), past[i])
	}
	// 1 queued; 2 admitted, 3 started, 4 and 5 steps; 6 admitted, 7 started, 8 step, 9 end.
	newest, all := []uint64{1, 6, 7, 8, 9}, seqs(1, 9)
	list := func(q Query) []uint64 {
		t.Helper()
		var got []uint64
		for {
			p, err := f.List(ctx, q)
			if err != nil {
				t.Fatal(err)
			}
			if q.Limit > 0 && len(p.Events) > q.Limit {
				t.Errorf("a page of %d has %d events", q.Limit, len(p.Events))
			}
			for _, e := range p.Events {
				got = append(got, e.Seq)
			}
			if q.AfterSeq = p.NextAfterSeq; !p.HasMore {
				return got
			}
		}
	}
	stream := func(q Query) []uint64 {
		t.Helper()
		r := &reader{stopAt: 9}
		if err := f.Stream(ctx, q, 0, r.emit, r.gap); err != nil || len(r.gaps) > 0 {
			t.Fatalf("%v, gaps %v", err, r.gaps)
		}
		return r.seqs
	}
	check := func(what string) {
		t.Helper()
		for _, limit := range []int{0, 1, 2} {
			q := Query{Tenant: "acme", TaskID: "t_1", Limit: limit}
			if got := list(q); !slices.Equal(got, newest) {
				t.Errorf("%s, pages of %d: %v, want %v", what, limit, got, newest)
			}
			q.AllAttempts = true
			if got := list(q); !slices.Equal(got, all) {
				t.Errorf("%s, all attempts, pages of %d: %v", what, limit, got)
			}
		}
		// A run's events are a log, not a task's history.
		if got := list(Query{Tenant: "acme", RunID: "r_1"}); !slices.Equal(got, all) {
			t.Errorf("%s, the run's events: %v", what, got)
		}
		if got := stream(Query{Tenant: "acme", TaskID: "t_1"}); !slices.Equal(got, newest) {
			t.Errorf("%s, stream: %v, want %v", what, got, newest)
		}
		if got := stream(Query{Tenant: "acme", TaskID: "t_1", AllAttempts: true}); !slices.Equal(got, all) {
			t.Errorf("%s, stream of all attempts: %v", what, got)
		}
	}
	check("in the stream")
	for i, want := range []int{0, 1, 1, 1, 1, 2, 2, 2, 2} {
		if got := attemptOf(past[i]); got != want {
			t.Errorf("event %d is of attempt %d, want %d", i+1, got, want)
		}
	}
	// The stream forgets all but the end; the store has the rest.
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq < 9; seq++ {
		if err := s.DeleteMsg(ctx, seq); err != nil {
			t.Fatal(err)
		}
	}
	natstest.Eventually(t, timeout, func() (bool, string) {
		first, _, err := f.bounds(ctx)
		return err == nil && first == 9, fmt.Sprint("the stream begins at ", first, err)
	})
	check("in the store alone")
}
