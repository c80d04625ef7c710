package agentstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

const patience = 20 * time.Second

// backends open two stores of one deployment, as two leads have them.
var backends = map[string]func(t *testing.T) (a, b agentstore.Store){
	"nats": func(t *testing.T) (a, b agentstore.Store) {
		srv, c := natstest.New(t)
		return agentstore.NewNATS(c, zerolog.Nop()), agentstore.NewNATS(srv.Conn("other"), zerolog.Nop())
	},
	"file": func(t *testing.T) (a, b agentstore.Store) {
		dir := t.TempDir()
		return openFile(t, dir), openFile(t, dir)
	},
}

func openFile(t *testing.T, dir string) agentstore.Store {
	t.Helper()
	s, err := agentstore.NewFile(dir, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func def(name, description string) subagent.Managed {
	return subagent.Managed{Name: name, Description: description, SystemPrompt: "You do it.", Enabled: true}
}

func each(t *testing.T, f func(t *testing.T, ctx context.Context, a, b agentstore.Store)) {
	t.Parallel()
	for name, open := range backends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
			defer cancel()
			a, b := open(t)
			f(t, ctx, a, b)
		})
	}
}

// REG-06: creating what exists is a conflict, changing what is not there is not
// found, and a change on a revision that is not the last is refused.
func TestRevisions(t *testing.T) {
	each(t, func(t *testing.T, ctx context.Context, a, b agentstore.Store) {
		is := func(what string, err, want error) {
			t.Helper()
			if !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", what, err, want)
			}
		}
		_, err := a.Get(ctx, "coder")
		is("get before", err, agentstore.ErrNotFound)
		_, err = a.Update(ctx, def("coder", "x"), 1)
		is("update before", err, agentstore.ErrNotFound)
		_, err = a.Delete(ctx, "coder", 1)
		is("delete before", err, agentstore.ErrNotFound)
		_, err = a.Delete(ctx, "no name", 1)
		is("delete of no name", err, agentstore.ErrNotFound)
		_, err = a.Create(ctx, subagent.Managed{Name: "coder"})
		is("create of nothing", err, subagent.ErrDefinition)

		first, err := a.Create(ctx, def("Coder", " writes code "))
		if err != nil || first.Name != "coder" || first.Description != "writes code" || first.Revision == 0 {
			t.Fatalf("created %+v, %v", first, err)
		}
		_, err = b.Create(ctx, def("CODER", "another"))
		is("create again", err, agentstore.ErrExists)
		second, err := b.Update(ctx, def("coder", "two"), first.Revision)
		if err != nil || second.Revision <= first.Revision {
			t.Fatalf("updated %+v, %v", second, err)
		}
		_, err = a.Update(ctx, def("coder", "three"), first.Revision)
		is("stale update", err, agentstore.ErrStale)
		_, err = a.Delete(ctx, "coder", first.Revision)
		is("stale delete", err, agentstore.ErrStale)
		if got, err := a.Get(ctx, "Coder"); err != nil || got.Description != "two" || got.Revision != second.Revision {
			t.Errorf("got %+v, %v", got, err)
		}
		gone, err := a.Delete(ctx, "coder", second.Revision)
		if err != nil || gone <= second.Revision {
			t.Fatalf("deleted at %d, %v", gone, err)
		}
		_, err = b.Get(ctx, "coder")
		is("get after", err, agentstore.ErrNotFound)
		_, err = b.Update(ctx, def("coder", "x"), second.Revision)
		is("update after", err, agentstore.ErrNotFound)
		again, err := b.Create(ctx, def("coder", "anew"))
		if err != nil || again.Revision <= gone {
			t.Errorf("made anew with revision %d after %d, %v", again.Revision, gone, err)
		}
	})
}

// REG-06: of many that change the same revision, or create the same name, one wins.
func TestOneOfManyWins(t *testing.T) {
	each(t, func(t *testing.T, ctx context.Context, a, b agentstore.Store) {
		race := func(what string, lost error, f func(s agentstore.Store, text string) error) {
			var wg sync.WaitGroup
			var won atomic.Int64
			for i := range 8 {
				s := []agentstore.Store{a, b}[i%2]
				wg.Go(func() {
					if err := f(s, fmt.Sprint(i)); err == nil {
						won.Add(1)
					} else if !errors.Is(err, lost) {
						t.Errorf("%s: %v, want %v", what, err, lost)
					}
				})
			}
			wg.Wait()
			if won.Load() != 1 {
				t.Errorf("%s: %d won, want 1", what, won.Load())
			}
		}
		race("create", agentstore.ErrExists, func(s agentstore.Store, text string) error {
			_, err := s.Create(ctx, def("coder", text))
			return err
		})
		base, err := a.Get(ctx, "coder")
		if err != nil {
			t.Fatal(err)
		}
		race("update", agentstore.ErrStale, func(s agentstore.Store, text string) error {
			_, err := s.Update(ctx, def("coder", "then "+text), base.Revision)
			return err
		})
		if got, err := b.Get(ctx, "coder"); err != nil || !strings.HasPrefix(got.Description, "then ") {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

// Every store sees what every other one changes, the beginning included.
func TestWatch(t *testing.T) {
	each(t, func(t *testing.T, ctx context.Context, a, b agentstore.Store) {
		type seen struct {
			all []subagent.Stored
			rev uint64
		}
		var now atomic.Pointer[seen]
		watch, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() {
			done <- b.Watch(watch, func(all []subagent.Stored, rev uint64) { now.Store(&seen{all, rev}) })
		}()
		defer func() {
			stop()
			if err := <-done; err != nil {
				t.Errorf("watch: %v", err)
			}
		}()
		reaches := func(rev uint64, want ...string) {
			t.Helper()
			natstest.Eventually(t, patience, func() (bool, string) {
				s := now.Load()
				if s == nil {
					return false, "nothing was told"
				}
				var got []string
				for _, d := range s.all {
					got = append(got, d.Name+"="+d.Description)
				}
				return s.rev >= rev && slices.Equal(got, want), fmt.Sprintf("%q at %d, want %q at %d", got, s.rev, want, rev)
			})
		}
		reaches(0)
		one, err := a.Create(ctx, def("zeta", "z"))
		if err != nil {
			t.Fatal(err)
		}
		reaches(one.Revision, "zeta=z")
		if _, err = a.Create(ctx, def("alpha", "a")); err != nil {
			t.Fatal(err)
		}
		two, err := b.Update(ctx, def("zeta", "y"), one.Revision)
		if err != nil {
			t.Fatal(err)
		}
		reaches(two.Revision, "alpha=a", "zeta=y")
		gone, err := a.Delete(ctx, "zeta", two.Revision)
		if err != nil {
			t.Fatal(err)
		}
		reaches(gone, "alpha=a")
	})
}

// A value in the bucket that cannot be read is left out; the others are there.
func TestUnreadableValueIsLeftOut(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, c := natstest.New(t)
	s := agentstore.NewNATS(c, zerolog.Nop())
	for name, data := range map[string]string{"broken": "{", "other": `{"name":"else","description":"d","system_prompt":"p"}`, "odd": `{"name":"odd","description":"d","system_prompt":"p","sudo":true}`} {
		if _, err := c.Publish(ctx, bus.Write{Subject: contract.KVSubject(c.Names.AgentBucket(), contract.AgentKey(name)), Data: []byte(data)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Create(ctx, def("good", "g")); err != nil {
		t.Fatal(err)
	}
	var got []subagent.Stored
	watch, stop := context.WithCancel(ctx)
	if err := s.Watch(watch, func(all []subagent.Stored, _ uint64) { got = all; stop() }); err != nil || len(got) != 1 || got[0].Name != "good" {
		t.Errorf("watched %+v, %v", got, err)
	}
	if _, err := s.Get(ctx, "broken"); err == nil || errors.Is(err, agentstore.ErrNotFound) || !strings.Contains(err.Error(), "broken") {
		t.Errorf("get of a broken one: %v", err)
	}
}

// A file that is broken is told at the start, with what to do; one that breaks
// later leaves what was read before.
func TestBrokenFile(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	dir := t.TempDir()
	s := openFile(t, dir)
	if _, err := s.Create(ctx, def("coder", "c")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "agents.json")
	if err := os.WriteFile(file, []byte(`{"revision":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := agentstore.NewFile(dir, zerolog.Nop()); err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "in place") {
		t.Errorf("a broken file at the start: %v", err)
	}
	if _, err := s.Create(ctx, def("other", "o")); err == nil {
		t.Error("a broken file was overwritten")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".agents-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
