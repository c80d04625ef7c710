package agents

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

func def(name, description string) subagent.Managed {
	return subagent.Managed{Name: name, Description: description, SystemPrompt: "p", Enabled: true}
}

func catalogue(t *testing.T) *subagent.Catalogue {
	t.Helper()
	c, err := subagent.NewCatalogue(subagent.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// start runs a manager until the test ends.
func start(t *testing.T, m *Manager) context.Context {
	t.Helper()
	ctx, stop := context.WithTimeout(context.Background(), 2*patience)
	run, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- m.Run(run) }()
	t.Cleanup(func() {
		end()
		if err := <-done; err != nil {
			t.Error(err)
		}
		stop()
	})
	select {
	case <-m.Loaded():
	case <-ctx.Done():
		t.Fatal("nothing was loaded")
	}
	return ctx
}

func fileStore(t *testing.T) agentstore.Store {
	t.Helper()
	s, err := agentstore.NewFile(t.TempDir(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// What was stored before is there once it counts as loaded; what is written is in
// force when the answer comes, and gone when it is deleted.
func TestManagerAppliesWhatItWrites(t *testing.T) {
	t.Parallel()
	store := fileStore(t)
	if _, err := store.Create(context.Background(), def("old", "o")); err != nil {
		t.Fatal(err)
	}
	cat := catalogue(t)
	m := New(Config{Catalogue: cat, Store: store, Log: zerolog.Nop()})
	select {
	case <-m.Loaded():
		t.Error("loaded before the store was read")
	default:
	}
	ctx := start(t, m)
	has := func(name string) bool { _, ok := cat.Current().Get(name); return ok }
	if !has("old") {
		t.Error("what was stored before is not there")
	}
	got, created, err := m.Put(ctx, def("New", "n"), Condition{})
	if err != nil || !created || !has("new") {
		t.Fatalf("put: %+v, %v, %v; in force %v", got, created, err, has("new"))
	}
	again, created, err := m.Put(ctx, def("new", "other"), Condition{})
	if err != nil || created || again.Revision <= got.Revision {
		t.Errorf("put again: %+v, %v, %v", again, created, err)
	}
	if _, _, err := m.Put(ctx, def("new", "x"), Condition{Revision: &got.Revision}); !errors.Is(err, agentstore.ErrStale) {
		t.Errorf("put of a stale one: %v", err)
	}
	if _, _, err := m.Put(ctx, def("ghost", "x"), Condition{Any: true}); !errors.Is(err, agentstore.ErrNotFound) {
		t.Errorf("change of what is not there: %v", err)
	}
	if err := m.Delete(ctx, "new", Condition{}); err != nil || has("new") {
		t.Errorf("delete: %v; in force %v", err, has("new"))
	}
	if err := m.Delete(ctx, "new", Condition{}); !errors.Is(err, agentstore.ErrNotFound) {
		t.Errorf("delete again: %v", err)
	}
}

// Without a condition each of many writers gets through, one after the other.
func TestBlindPuts(t *testing.T) {
	t.Parallel()
	m := New(Config{Catalogue: catalogue(t), Store: fileStore(t), Log: zerolog.Nop()})
	ctx := start(t, m)
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			if _, _, err := m.Put(ctx, def("coder", fmt.Sprint(i)), Condition{}); err != nil {
				t.Errorf("put %d: %v", i, err)
			}
		})
	}
	wg.Wait()
}

// Files are read before anything else, and again and again.
func TestManagerFollowsFiles(t *testing.T) {
	t.Parallel()
	var round atomic.Int64
	cat := catalogue(t)
	m := New(Config{Catalogue: cat, FilesInterval: time.Millisecond, Log: zerolog.Nop(), Files: func() ([]subagent.File, bool) {
		n := round.Add(1)
		if n == 2 {
			return nil, false // unchanged
		}
		c := subagent.Custom{Name: fmt.Sprintf("round-%d", min(n, 3)), Description: "d", SystemPrompt: "p"}
		return []subagent.File{{Custom: c}}, true
	}})
	if _, ok := cat.Current().Get("round-1"); !ok {
		t.Error("the files were not read at once")
	}
	ctx := start(t, m)
	natstest.Eventually(t, patience, func() (bool, string) {
		_, ok := cat.Current().Get("round-3")
		return ok, "the files are not followed"
	})
	if _, _, err := m.Put(ctx, def("x", "d"), Condition{}); !errors.Is(err, agentstore.ErrUnavailable) {
		t.Errorf("put without a store: %v", err)
	}
}

// What cannot be read, as after a return to an older version, can be replaced and
// deleted all the same, without a condition.
func TestManagerReplacesWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	broken := `{"revision":4,"agents":{"odd":{"revision":3,"definition":{"name":"odd","sudo":true}},"gone":{"revision":4,"definition":7}}}`
	if err := os.WriteFile(filepath.Join(dir, "agents.json"), []byte(broken), 0o600); err != nil {
		t.Fatal(err)
	}
	store, err := agentstore.NewFile(dir, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	m := New(Config{Catalogue: catalogue(t), Store: store, Log: zerolog.Nop()})
	ctx := start(t, m)
	if got, err := m.Get(ctx, "odd"); !errors.Is(err, agentstore.ErrUnreadable) || errors.Is(err, subagent.ErrDefinition) || got.Revision != 3 {
		t.Errorf("get: %+v, %v", got, err)
	}
	if got, created, err := m.Put(ctx, def("odd", "new"), Condition{}); err != nil || created || got.Revision != 5 {
		t.Errorf("put: %+v, created %v, %v", got, created, err)
	}
	if err := m.Delete(ctx, "gone", Condition{Any: true}); err != nil {
		t.Errorf("delete: %v", err)
	}
	if _, err := m.Get(ctx, "gone"); !errors.Is(err, agentstore.ErrNotFound) {
		t.Errorf("get of what is deleted: %v", err)
	}
}
