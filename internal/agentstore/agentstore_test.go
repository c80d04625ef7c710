package agentstore_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/agentstore/storetest"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

const patience = 20 * time.Second

// backends open two stores of one deployment, as two leads have them.
var backends = map[string]storetest.Open{
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

// The stores that need no other service; the one of the event sink is tested there.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, open := range backends {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, open)
		})
	}
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
	if _, err := s.Create(ctx, storetest.Definition("good", "g")); err != nil {
		t.Fatal(err)
	}
	var got []subagent.Stored
	watch, stop := context.WithCancel(ctx)
	if err := s.Watch(watch, func(all []subagent.Stored, _ uint64) { got = all; stop() }); err != nil || len(got) != 1 || got[0].Name != "good" {
		t.Errorf("watched %+v, %v", got, err)
	}
	broken, err := s.Get(ctx, "broken")
	if !errors.Is(err, agentstore.ErrUnreadable) || errors.Is(err, subagent.ErrDefinition) || !strings.Contains(err.Error(), "broken") || broken.Revision == 0 {
		t.Errorf("get of a broken one: %+v, %v", broken, err)
	}
	if _, err := s.Update(ctx, storetest.Definition("broken", "mended"), broken.Revision); err != nil {
		t.Errorf("another in its place: %v", err)
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
	if _, err := s.Create(ctx, storetest.Definition("coder", "c")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "agents.json")
	if err := os.WriteFile(file, []byte(`{"revision":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := agentstore.NewFile(dir, zerolog.Nop()); err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "in place") {
		t.Errorf("a broken file at the start: %v", err)
	}
	if _, err := s.Create(ctx, storetest.Definition("other", "o")); err == nil {
		t.Error("a broken file was overwritten")
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".agents-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
