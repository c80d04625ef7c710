package feed

import (
	"encoding/json"
	"slices"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
)

// The event stream is cut in front of a slow reader, behind what waits for it. It gets
// the rest from the store, and is told what the store does not have either; without a
// word it loses nothing.
func TestStreamIsCutInFrontOfAReader(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	store := feedtest.NewStore(t, c)
	other := feedtest.Run{Tenant: "acme", Thread: "another", ID: "r_2"}
	const n, cutAt, stored = 1200, 1001, 800
	var want []uint64
	var records []contract.EventRecord
	for i := 1; i <= n; i++ {
		// Only each second event is the reader's, so that a jump is nothing special.
		run := []feedtest.Run{other, run1}[i%2]
		ev := run.Message(i, "text")
		seq := feedtest.Publish(t, c, ev)
		if seq <= stored {
			records = append(records, feedtest.Record(t, ev, seq))
		}
		if run == run1 && (seq <= stored || seq >= cutAt) {
			want = append(want, seq)
		}
	}
	store.Load(stored, records...)
	blocked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r := &reader{stopAt: n - 1}
	done := make(chan error, 1)
	go func() {
		done <- f.Stream(ctx, Query{Tenant: "acme", RunID: run1.ID}, 0, func(rec contract.EventRecord) error {
			once.Do(func() { close(blocked); <-release })
			return r.emit(rec)
		}, r.gap)
	}()
	select {
	case <-blocked:
	case err := <-done:
		t.Fatal(err)
	}
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err == nil {
		err = s.Purge(ctx, jetstream.WithPurgeSequence(cutAt))
	}
	if err != nil {
		t.Fatal(err)
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(r.seqs, want) || !slices.Equal(r.gaps, [][2]uint64{{stored + 1, cutAt - 1}}) {
		t.Errorf("%d events, gaps %v; want %d, and a gap from %d to %d", len(r.seqs), r.gaps, len(want), stored+1, cutAt-1)
	}
}

// What retention has deleted is told as a gap before the first event that is left, also
// to a reader of something else than what was deleted; a page says up to where it is.
func TestRetentionIsToldFirst(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	store := feedtest.NewStore(t, c)
	var records []contract.EventRecord
	for i := 1; i <= 40; i++ {
		ev := run1.Message(i, "text")
		records = append(records, feedtest.Record(t, ev, feedtest.Publish(t, c, ev)))
	}
	store.Load(40, records...)
	store.Prune(25)
	s, err := c.JS.Stream(ctx, c.Names.EventStream())
	if err == nil {
		err = s.Purge(ctx, jetstream.WithPurgeSequence(31))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		after uint64
		want  []uint64
		gaps  [][2]uint64
	}{
		{0, seqs(26, 40), [][2]uint64{{1, 25}}},
		{24, seqs(26, 40), [][2]uint64{{25, 25}}},
		{25, seqs(26, 40), nil},
		{35, seqs(36, 40), nil},
	} {
		r := &reader{stopAt: 40}
		err := f.Stream(ctx, Query{Tenant: "acme"}, tc.after, r.emit, r.gap)
		if err != nil || !slices.Equal(r.seqs, tc.want) || !slices.Equal(r.gaps, tc.gaps) {
			t.Errorf("stream after %d: %v, gaps %v, %v; want %v, gaps %v", tc.after, r.seqs, r.gaps, err, tc.want, tc.gaps)
		}
		p, err := f.List(ctx, Query{Tenant: "acme", AfterSeq: tc.after})
		if err != nil || len(p.Events) != len(tc.want) || p.Events[0].Seq != tc.want[0] || p.PrunedSeq != 25 || p.HasMore {
			t.Errorf("page after %d: %d events, pruned %d, more %v, %v", tc.after, len(p.Events), p.PrunedSeq, p.HasMore, err)
		}
	}
	// Nothing of the other tenant was deleted, but nobody can know that any more.
	r := &reader{}
	err = f.Stream(ctx, Query{Tenant: "other"}, 3, r.emit, func(from, to uint64) error { _ = r.gap(from, to); return ErrStop })
	if err != nil || !slices.Equal(r.gaps, [][2]uint64{{4, 25}}) || len(r.seqs) > 0 {
		t.Errorf("another tenant: %v, gaps %v, %v", r.seqs, r.gaps, err)
	}
}

// EVT-21: an event that leaves to its subject what that says anyhow is stored, and so
// it is told live as well.
func TestStreamFillsFromSubject(t *testing.T) {
	t.Parallel()
	f, c, _, ctx := setup(t)
	run := feedtest.Run{Tenant: "acme", Thread: "th", ID: "r_1"}
	full := run.Message(1, "text")
	for _, leave := range [][]string{nil, {"tenant", "threadid", "runid"}} {
		body, err := envelope.Encode(full)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(body, &m); err != nil {
			t.Fatal(err)
		}
		for _, name := range leave {
			delete(m, name)
			m["id"] = "short"
		}
		if body, err = json.Marshal(m); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Publish(ctx, bus.Write{Subject: full.NATSSubject(c.Names), Data: body}); err != nil {
			t.Fatal(err)
		}
	}
	feedtest.Publish(t, c, run.End(contract.RunCompleted))
	var got []contract.EventRecord
	err := f.Stream(ctx, Query{Tenant: "acme", RunID: run.ID, UntilRunEnd: true}, 0, func(r contract.EventRecord) error { got = append(got, r); return nil }, func(uint64, uint64) error { return nil })
	if err != nil || len(got) != 3 {
		t.Fatalf("%d events, %v; want 3", len(got), err)
	}
	a, b := got[0], got[1]
	if b.Tenant != a.Tenant || b.ThreadID != a.ThreadID || b.RunID != a.RunID || b.TaskID != a.TaskID || string(b.Content) != string(a.Content) {
		t.Errorf("an event without ids is %+v, want the ids of %+v", b, a)
	}
}
