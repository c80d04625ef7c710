package system

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/stored"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// I6: the history that is read for a judgement goes on in the store where the
// stream has let go of it, is the same in both, and shows what the store has lost.
func TestStoredHistoryIsWhole(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Unrecorded: true}) // the test takes events away
	dir := t.TempDir()
	s.Sink("sink-1", dir)
	s.Admission("adm-1")
	s.Executor("ex-1", 3, 0)
	_, api := s.Lead("lead-1", dir)
	feed := s.Follow()
	const tasks = 6
	for i := range tasks {
		if _, err := api.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: fmt.Sprint("task ", i)}); err != nil {
			t.Fatal(err)
		}
	}
	feed.Ended(tasks)
	last := uint64(0)
	read := func(c stored.Config) *stored.View {
		t.Helper()
		c.Bus, c.Store = s.Bus, true
		v, err := stored.NewReader(c).Read(timeout(t))
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	check := func(v *stored.View) []invariant.Violation {
		o := invariant.Options{MaxRunning: s.Opts.MaxRunning}
		if !v.Whole {
			o.Since = v.Since
		}
		return v.History.Check(o)
	}
	var v *stored.View
	natstest.Eventually(t, Timeout, func() (bool, string) {
		v = read(stored.Config{})
		last = v.History.Mark
		return v.StoreError == nil && v.StoredTo == last, fmt.Sprint("the store has come to ", v.StoredTo, " of ", last, v.StoreError)
	})
	all := v.Events
	if found := check(v); len(found) > 0 || !v.Whole || v.FromStore > 0 || v.Records != tasks || uint64(len(v.History.Stored)) != last {
		t.Errorf("%d events, %d in the store, %d records: %v", v.Events, len(v.History.Stored), v.Records, found)
	}

	st, err := s.Bus.JS.Stream(timeout(t), s.Bus.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Purge(timeout(t), jetstream.WithPurgeSequence(last-9)); err != nil {
		t.Fatal(err)
	}
	if v := read(stored.Config{}); !v.Whole || v.Events != all || v.FromStore != all-10 || len(check(v)) > 0 {
		t.Errorf("whole %v, %d events, %d of them from the store: %v", v.Whole, v.Events, v.FromStore, check(v))
	}
	if v := read(stored.Config{MaxEvents: 15}); v.Whole || v.Events != 15 || v.FromStore != 5 || len(check(v)) > 0 {
		t.Errorf("whole %v, %d events, %d of them from the store: %v", v.Whole, v.Events, v.FromStore, check(v))
	}

	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, sqlite.File))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(context.Background(), `DELETE FROM events WHERE seq = ?`, last-2); err != nil {
		t.Fatal(err)
	}
	found := check(read(stored.Config{}))
	if len(found) != 1 || found[0].Rule != invariant.Events || !strings.Contains(found[0].Text, "is not in the store") || found[0].Proof[0].Seq != last-2 {
		t.Errorf("an event was taken from the store: found %v", found)
	}

	// What retention has deleted is not missing, what somebody else has is.
	for _, step := range []struct {
		statement string
		found     int
	}{
		{`DELETE FROM events WHERE seq <= ?`, 3},
		{`INSERT INTO meta (key, value) VALUES ('pruned', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value`, 1},
	} {
		if _, err := db.ExecContext(context.Background(), step.statement, fmt.Sprint(last-8)); err != nil {
			t.Fatal(err)
		}
		if found := check(read(stored.Config{})); len(found) != step.found {
			t.Errorf("%s: found %v, want %d", step.statement, found, step.found)
		}
	}
}
