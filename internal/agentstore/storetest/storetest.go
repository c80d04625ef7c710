// Package storetest is the conformance suite of the stores of managed definitions.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
)

const patience = 20 * time.Second

// Open opens two stores of a new deployment, as two leads have them.
type Open func(t *testing.T) (a, b agentstore.Store)

// Run runs the suite.
func Run(t *testing.T, open Open) {
	for name, f := range map[string]func(t *testing.T, ctx context.Context, a, b agentstore.Store){
		"Revisions": revisions, "OneOfManyWins": oneOfManyWins, "Watch": watch, "RoundTrip": roundTrip,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
			defer cancel()
			a, b := open(t)
			f(t, ctx, a, b)
		})
	}
}

// Definition is a good definition.
func Definition(name, description string) subagent.Managed {
	return subagent.Managed{Name: name, Description: description, SystemPrompt: "You do it.", Enabled: true}
}

// REG-06: creating what exists is a conflict, changing what is not there is not
// found, and a change on a revision that is not the last is refused.
func revisions(t *testing.T, ctx context.Context, a, b agentstore.Store) {
	is := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	_, err := a.Get(ctx, "coder")
	is("get before", err, agentstore.ErrNotFound)
	_, err = a.Update(ctx, Definition("coder", "x"), 1)
	is("update before", err, agentstore.ErrNotFound)
	_, err = a.Delete(ctx, "coder", 1)
	is("delete before", err, agentstore.ErrNotFound)
	_, err = a.Delete(ctx, "no name", 1)
	is("delete of no name", err, agentstore.ErrNotFound)
	_, err = a.Create(ctx, subagent.Managed{Name: "coder"})
	is("create of nothing", err, subagent.ErrDefinition)

	first, err := a.Create(ctx, Definition("Coder", " writes code "))
	if err != nil || first.Name != "coder" || first.Description != "writes code" || first.Revision == 0 {
		t.Fatalf("created %+v, %v", first, err)
	}
	_, err = b.Create(ctx, Definition("CODER", "another"))
	is("create again", err, agentstore.ErrExists)
	second, err := b.Update(ctx, Definition("coder", "two"), first.Revision)
	if err != nil || second.Revision <= first.Revision {
		t.Fatalf("updated %+v, %v", second, err)
	}
	_, err = a.Update(ctx, Definition("coder", "three"), first.Revision)
	is("stale update", err, agentstore.ErrStale)
	_, err = a.Delete(ctx, "coder", first.Revision)
	is("stale delete", err, agentstore.ErrStale)
	for _, never := range []uint64{0, math.MaxUint64} {
		_, err = a.Update(ctx, Definition("coder", "three"), never)
		is("update of a revision that cannot be", err, agentstore.ErrStale)
		_, err = a.Delete(ctx, "coder", never)
		is("delete of a revision that cannot be", err, agentstore.ErrStale)
		_, err = a.Update(ctx, Definition("nobody", "x"), never)
		is("update of nobody", err, agentstore.ErrNotFound)
	}
	if got, err := a.Get(ctx, "Coder"); err != nil || got.Description != "two" || got.Revision != second.Revision {
		t.Errorf("got %+v, %v", got, err)
	}
	gone, err := a.Delete(ctx, "coder", second.Revision)
	if err != nil || gone <= second.Revision {
		t.Fatalf("deleted at %d, %v", gone, err)
	}
	_, err = b.Get(ctx, "coder")
	is("get after", err, agentstore.ErrNotFound)
	_, err = b.Update(ctx, Definition("coder", "x"), second.Revision)
	is("update after", err, agentstore.ErrNotFound)
	again, err := b.Create(ctx, Definition("coder", "anew"))
	if err != nil || again.Revision <= gone {
		t.Errorf("made anew with revision %d after %d, %v", again.Revision, gone, err)
	}
}

// REG-06: of many that change the same revision, or create the same name, one wins.
func oneOfManyWins(t *testing.T, ctx context.Context, a, b agentstore.Store) {
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
		_, err := s.Create(ctx, Definition("coder", text))
		return err
	})
	base, err := a.Get(ctx, "coder")
	if err != nil {
		t.Fatal(err)
	}
	race("update", agentstore.ErrStale, func(s agentstore.Store, text string) error {
		_, err := s.Update(ctx, Definition("coder", "then "+text), base.Revision)
		return err
	})
	if got, err := b.Get(ctx, "coder"); err != nil || !strings.HasPrefix(got.Description, "then ") {
		t.Errorf("got %+v, %v", got, err)
	}
}

// Every store sees what every other one changes, the beginning included.
func watch(t *testing.T, ctx context.Context, a, b agentstore.Store) {
	type seen struct {
		all []subagent.Stored
		rev uint64
	}
	var now atomic.Pointer[seen]
	watching, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- b.Watch(watching, func(all []subagent.Stored, rev uint64) { now.Store(&seen{all, rev}) })
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
	one, err := a.Create(ctx, Definition("zeta", "z"))
	if err != nil {
		t.Fatal(err)
	}
	reaches(one.Revision, "zeta=z")
	if _, err = a.Create(ctx, Definition("alpha", "a")); err != nil {
		t.Fatal(err)
	}
	two, err := b.Update(ctx, Definition("zeta", "y"), one.Revision)
	if err != nil {
		t.Fatal(err)
	}
	reaches(two.Revision, "alpha=a", "zeta=y")
	gone, err := a.Delete(ctx, "zeta", two.Revision)
	if err != nil {
		t.Fatal(err)
	}
	reaches(gone, "alpha=a")
}

// What is stored comes back to the letter, also the difference between no list and an
// empty one.
func roundTrip(t *testing.T, ctx context.Context, a, b agentstore.Store) {
	want := map[string]subagent.Stored{}
	for _, m := range []subagent.Managed{
		{Name: "a-1", Description: `<b>&amp; "quotes" \ 😀 \u0000`, SystemPrompt: strings.Repeat("line <1>\n", 2000) + "\x01\u2028;DROP TABLE agents", Tools: []string{}, Skills: []string{}},
		{Name: "a1", DisplayName: "Ünïcode", Description: "d", SystemPrompt: "p", Tools: []string{"grep"}, Skills: []string{"x"}, Model: "m", Pool: "gpu", MaxTurns: 7, TimeoutSeconds: 8, Network: true, Enabled: true},
	} {
		stored, err := a.Create(ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		want[stored.Name] = stored
		if got, err := b.Get(ctx, m.Name); err != nil || !reflect.DeepEqual(got, stored) {
			t.Errorf("got %+v, %v, want %+v", got, err, stored)
		}
	}
	watching, stop := context.WithCancel(ctx)
	err := b.Watch(watching, func(all []subagent.Stored, revision uint64) {
		for _, got := range all {
			if !reflect.DeepEqual(got, want[got.Name]) || got.Revision > revision {
				t.Errorf("told %+v at %d, want %+v", got, revision, want[got.Name])
			}
		}
		if len(all) == len(want) {
			stop()
		}
	})
	if err != nil || ctx.Err() != nil {
		t.Errorf("watch: %v, %v", err, ctx.Err())
	}
	stop()
}
