package eventsink_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/agentstore/storetest"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// leadStores are the stores of two leads.
func leadStores(srv *natstest.Server) (a, b agentstore.Store) {
	return agentstore.NewSink(srv.Conn("lead-1"), zerolog.Nop()), agentstore.NewSink(srv.Conn("lead-2"), zerolog.Nop())
}

// The store that leads have at the event sink passes the suite of all stores, with
// each database; with PostgreSQL two sinks share the work.
func TestAgentStoreConformance(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) (a, b agentstore.Store) {
			srv, conn := natstest.New(t)
			start(t, conn, options{open: sqlite.Opener(t.TempDir())}).waitReady("")
			return leadStores(srv)
		})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		db := pgtest.Start(t)
		storetest.Run(t, func(t *testing.T) (a, b agentstore.Store) {
			srv, conn := natstest.New(t)
			o := options{cfg: eventsink.Config{Shared: true}, open: postgres.Opener(db.Database(), true)}
			start(t, conn, o).waitReady("")
			start(t, srv.Conn("second"), o).waitReady("")
			return leadStores(srv)
		})
	})
}

// watched is what a store's watch has told last.
type watched struct {
	t   *testing.T
	now atomic.Pointer[string]
}

// watch follows a store until the test ends.
func watch(t *testing.T, s agentstore.Store) *watched {
	t.Helper()
	w := &watched{t: t}
	w.now.Store(new(string))
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.Watch(ctx, func(all []subagent.Stored, _ uint64) {
			text := ":"
			for _, d := range all {
				text += " " + d.Name + "=" + d.Description
			}
			w.now.Store(&text)
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("watch: %v", err)
		}
	})
	return w
}

func (w *watched) reaches(want string) {
	w.t.Helper()
	natstest.Eventually(w.t, within, func() (bool, string) {
		got := *w.now.Load()
		return got == want, fmt.Sprintf("told is %q, want %q", got, want)
	})
}

// While no sink is there, and while its database is not, changes are refused at once
// as unavailable, and what was read stays; afterwards everything is there, and
// revisions go on.
func TestAgentsWhileTheSinkIsAway(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	dir := t.TempDir()
	a, b := leadStores(srv)
	w := watch(t, b)
	away := func() {
		t.Helper()
		_, err := a.Create(ctx, storetest.Definition("other", "o"))
		_, err2 := a.Get(ctx, "coder")
		_, err3 := a.Delete(ctx, "coder", 7)
		for _, err := range []error{err, err2, err3} {
			if !errors.Is(err, agentstore.ErrUnavailable) || !strings.Contains(err.Error(), "no event sink answers") {
				t.Errorf("without a sink: %v", err)
			}
		}
	}
	away()
	s := start(t, conn, options{open: sqlite.Opener(dir)})
	w.reaches(":")
	first, err := a.Create(ctx, storetest.Definition("coder", "one"))
	if err != nil {
		t.Fatal(err)
	}
	w.reaches(": coder=one")
	s.stop()
	away()
	start(t, srv.Conn("again"), options{open: sqlite.Opener(dir)})
	natstest.Eventually(t, within, func() (bool, string) {
		got, err := a.Get(ctx, "coder")
		return err == nil && got.Revision == first.Revision, fmt.Sprintf("after a restart: %+v, %v, want revision %d", got, err, first.Revision)
	})
	if second, err := a.Update(ctx, storetest.Definition("coder", "two"), first.Revision); err != nil || second.Revision <= first.Revision {
		t.Errorf("after a restart: %+v, %v", second, err)
	}
	w.reaches(": coder=two")
}

// A database that is down is told as such, keeps nobody waiting, and changes nothing
// of what was loaded.
func TestAgentsWhileTheDatabaseIsDown(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	db := pgtest.Start(t)
	start(t, conn, options{open: postgres.Opener(db.Database(), false)}).waitReady("")
	a, b := leadStores(srv)
	w := watch(t, b)
	first, err := a.Create(ctx, storetest.Definition("coder", "one"))
	if err != nil {
		t.Fatal(err)
	}
	w.reaches(": coder=one")
	db.Stop("immediate")
	if _, err := a.Update(ctx, storetest.Definition("coder", "two"), first.Revision); !errors.Is(err, agentstore.ErrUnavailable) {
		t.Errorf("update: %v", err)
	}
	if _, err := a.Get(ctx, "coder"); !errors.Is(err, agentstore.ErrUnavailable) {
		t.Errorf("get: %v", err)
	}
	db.Up()
	natstest.Eventually(t, within, func() (bool, string) {
		_, err := a.Update(ctx, storetest.Definition("coder", "two"), first.Revision)
		return err == nil, fmt.Sprint("update: ", err)
	})
	w.reaches(": coder=two")
}

// A change whose answer is lost is looked for, and found: it is neither made twice nor
// told as failed.
func TestAgentChangeWhoseAnswerIsLost(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	lost := make(chan struct{}, 1)
	start(t, conn, options{open: func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		s, err := sqlite.Open(ctx, t.TempDir(), waiting)
		return &forgetful{s, lost}, err
	}}).waitReady("")
	a, b := leadStores(srv)
	lost <- struct{}{}
	first, err := a.Create(ctx, storetest.Definition("coder", "one"))
	if err != nil {
		t.Fatal(err)
	}
	lost <- struct{}{}
	second, err := a.Update(ctx, storetest.Definition("coder", "two"), first.Revision)
	if err != nil || second.Revision != first.Revision+1 {
		t.Fatalf("update: %+v, %v, want revision %d", second, err, first.Revision+1)
	}
	if got, err := b.Get(ctx, "coder"); err != nil || got.Description != "two" || got.Revision != second.Revision {
		t.Errorf("got %+v, %v", got, err)
	}
	lost <- struct{}{}
	if gone, err := a.Delete(ctx, "coder", second.Revision); err != nil || gone != second.Revision+1 {
		t.Errorf("deleted at %d, %v, want %d", gone, err, second.Revision+1)
	}
	if len(lost) > 0 {
		t.Error("no answer was lost")
	}
}

// forgetful does not know of some changes that it has made them, as when a connection
// breaks with the commit.
type forgetful struct {
	eventsink.Store
	lost chan struct{}
}

func (f *forgetful) answer(revision uint64, err error) (uint64, error) {
	select {
	case <-f.lost:
		return 0, errors.New("the connection broke")
	default:
		return revision, err
	}
}

func (f *forgetful) PutAgent(ctx context.Context, name string, body []byte, expect uint64) (uint64, error) {
	return f.answer(f.Store.PutAgent(ctx, name, body, expect))
}

func (f *forgetful) DeleteAgent(ctx context.Context, name string, expect uint64) (uint64, error) {
	return f.answer(f.Store.DeleteAgent(ctx, name, expect))
}

// Many and large definitions come in several pages, all of one revision, also while
// they change; one that does not fit into a message is refused and said to be too large.
func TestAgentsInPages(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())}).waitReady("")
	a, b := leadStores(srv)
	big := strings.Repeat("<", subagent.MaxPromptChars) // six bytes each as JSON
	want := map[string]uint64{}
	for i := range 4 {
		d := storetest.Definition(fmt.Sprintf("big-%d", i), "d")
		d.SystemPrompt = big
		got, err := a.Create(ctx, d)
		if err != nil {
			t.Fatal(err)
		}
		want[got.Name] = got.Revision
	}
	page, err := agentapi.List(ctx, conn, agentapi.AgentsRequest{})
	if err != nil || len(page.Agents) != 1 || !page.HasMore {
		t.Fatalf("%d in a page, more %v, %v; want 1 that is large", len(page.Agents), page.HasMore, err)
	}
	changes := make(chan error, 1)
	go func() {
		got, err := b.Create(ctx, storetest.Definition("zeta", "0"))
		for i := 1; err == nil && i < 10; i++ {
			got, err = b.Update(ctx, storetest.Definition("zeta", fmt.Sprint(i)), got.Revision)
		}
		changes <- err
	}()
	for range 5 {
		all, err := agentapi.All(ctx, conn, 0)
		if err != nil {
			t.Fatal(err)
		}
		highest := slices.Max(slices.Collect(maps.Values(want)))
		for _, d := range all.Agents {
			if d.Name != "zeta" && d.Revision != want[d.Name] {
				t.Errorf("%s has revision %d, want %d", d.Name, d.Revision, want[d.Name])
			}
			highest = max(highest, d.Revision)
		}
		if len(all.Agents) < len(want) || highest != all.Revision {
			t.Errorf("%d definitions up to %d at revision %d: they are of several revisions", len(all.Agents), highest, all.Revision)
		}
	}
	if err := <-changes; err != nil {
		t.Errorf("changes: %v", err)
	}
	huge := storetest.Definition("huge", "d")
	huge.SystemPrompt = big
	for i := range 900 {
		huge.Tools = append(huge.Tools, fmt.Sprintf("%0*d", 250, i))
		huge.Skills = append(huge.Skills, fmt.Sprintf("%0*d", 250, i))
	}
	if _, err := a.Create(ctx, huge); !errors.Is(err, subagent.ErrDefinition) || !strings.Contains(err.Error(), "max_payload") {
		t.Errorf("a definition above the server's limit: %v", err)
	}
}

// What no lead could read is not stored, a request that is wrong is said to be so, and
// the answer goes into inboxes alone.
func TestAgentEndpointsRefuse(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())}).waitReady("")
	good := `{"name":"coder","description":"d","system_prompt":"p"}`
	for request, c := range map[string]struct{ endpoint, code, says string }{
		`{"name":"coder","definition":` + good + `,"expect":5}`: {"put", "conflict", "expected revision"},
		`{"name":"coder","expect":5}`:                           {"delete", "conflict", "expected revision"},
		`{"name":"coder"}`:                                      {"delete", "invalid_request", "expect is missing"},
		`{"name":"Coder","definition":` + good + `}`:            {"put", "invalid_request", "lower-case"},
		`{"name":"other","definition":` + good + `}`:            {"put", "invalid_request", `want "other"`},
		`{"name":"coder","definition":{"name":"coder"}}`:        {"put", "invalid_request", "description is blank"},
		`{"name":"coder","definition":{"name":"coder","description":"d","system_prompt":"p","sudo":true}}`: {"put", "invalid_request", "sudo"},
		`{"name":"coder","definition":null}`: {"put", "invalid_request", "definition"},
		`{"name":"coder"`:                    {"put", "invalid_request", "JSON"},
		`{"after_name":"a.b"}`:               {"list", "invalid_request", "lower-case"},
		`{"name":"coder","expect":18446744073709551615,"definition":` + good + `}`:                             {"put", "invalid_request", "at most"},
		`{"name":"coder","definition":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `,"expect":1}`: {"put", "invalid_request", "deep"},
	} {
		m, err := conn.NC.Request("hg.v1.svc.agents."+c.endpoint, []byte(request), within)
		if err != nil {
			t.Fatal(err)
		}
		var answer agentapi.AgentChanged
		if err := json.Unmarshal(m.Data, &answer); err != nil {
			t.Fatal(err)
		}
		status := map[string]string{"conflict": "409", "invalid_request": "400"}[c.code]
		if answer.Error == nil || answer.Error.Code != c.code || !strings.Contains(answer.Error.Message, c.says) || m.Header.Get("Nats-Service-Error-Code") != status {
			t.Errorf("%s %.100s: %+v %v, want %s %q", c.endpoint, request, answer.Error, m.Header, c.code, c.says)
		}
	}
	if err := conn.NC.PublishMsg(&nats.Msg{Subject: "hg.v1.svc.agents.put", Reply: "$KV.HG_AGENTS.agent.x", Data: []byte(`{"name":"coder","definition":` + good + `}`)}); err != nil {
		t.Fatal(err)
	}
	// Requests of one connection are taken in their order.
	page, err := agentapi.All(t.Context(), conn, 0)
	if err != nil || len(page.Agents) > 0 || page.Revision == 0 {
		t.Errorf("stored: %+v, %v", page, err)
	}
	if _, err := conn.Last(t.Context(), "KV_HG_AGENTS", "$KV.HG_AGENTS.agent.x"); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("an answer was stored: %v", err)
	}
}

// A notice that is lost costs a lead seconds: it asks again by itself. And a database
// that was exchanged for an empty one counts at once, with revisions above the old ones.
func TestAgentsWithoutANotice(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	db := pgtest.Start(t)
	start(t, conn, options{open: postgres.Opener(db.Database(), false)}).waitReady("")
	a, b := leadStores(srv)
	w := watch(t, b)
	first, err := a.Create(ctx, storetest.Definition("coder", "one"))
	if err != nil {
		t.Fatal(err)
	}
	w.reaches(": coder=one")
	// Behind the sink's back, so that nobody tells.
	db.SQL("db1", "UPDATE agents_revision SET revision = revision + 1; DELETE FROM agents")
	w.reaches(":")
	if again, err := a.Create(ctx, storetest.Definition("coder", "anew")); err != nil || again.Revision <= first.Revision+1 {
		t.Errorf("made anew: %+v, %v, want above %d", again, err, first.Revision+1)
	}
	if first.Revision < uint64(time.Now().Add(-24*time.Hour).Unix()) {
		t.Errorf("the first revision of a new database is %d: it would repeat those of the one before it", first.Revision)
	}
}

// Other leads hear of a change at once, and not when they ask the next time, which is
// every three seconds.
func TestAgentChangesAreToldAtOnce(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	srv, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())}).waitReady("")
	a, b := leadStores(srv)
	w := watch(t, b)
	w.reaches(":")
	const changes = 10
	begin := time.Now()
	got, err := a.Create(ctx, storetest.Definition("coder", "0"))
	for i := 1; err == nil && i <= changes; i++ {
		w.reaches(fmt.Sprintf(": coder=%d", i-1))
		got, err = a.Update(ctx, storetest.Definition("coder", fmt.Sprint(i)), got.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > changes*3*time.Second/2 {
		t.Errorf("%d changes were seen after %v: nobody told of them", changes, took)
	}
}
