package postgres

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sinktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	for name, shared := range map[string]bool{"Alone": false, "Shared": true} {
		t.Run(name, func(t *testing.T) {
			sinktest.Run(t, func(t *testing.T) sinktest.Backend {
				dsn := srv.Database()
				return sinktest.Backend{Open: func(t *testing.T) eventsink.Store { return openStore(t, dsn, shared) }}
			})
		})
	}
}

func openStore(t *testing.T, dsn string, shared bool) *Store {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := Open(ctx, dsn, shared, func() { t.Error("the store is held by another one") })
	if err != nil {
		t.Fatalf("Open = %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	})
	return s
}

// A sink that stands by begins when the other one has closed, and one that does
// not know yet that its time is over can write no more.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t).Database()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	first := openStore(t, dsn, false)
	if _, err := first.Append(ctx, []contract.EventRecord{sinktest.Record(1)}, 1); err != nil {
		t.Fatal(err)
	}
	waiting, opened := make(chan struct{}), make(chan *Store, 1)
	go func() {
		s, err := Open(ctx, dsn, false, func() { close(waiting) })
		if err != nil {
			t.Errorf("Open of the second = %v", err)
		}
		opened <- s
	}()
	<-waiting
	select {
	case <-opened:
		t.Fatal("two stores are open at once")
	default:
	}
	// The first one's lock goes with its connection, and it does not notice.
	if err := first.held.Close(ctx); err != nil {
		t.Fatal(err)
	}
	second := <-opened
	if second == nil {
		return
	}
	defer second.Close()
	if err := first.Check(ctx); !errors.Is(err, eventsink.ErrLost) {
		t.Errorf("Check of the first = %v, want ErrLost", err)
	}
	if _, err := first.Append(ctx, []contract.EventRecord{sinktest.Record(2)}, 2); !errors.Is(err, eventsink.ErrLost) {
		t.Errorf("Append of the first = %v, want ErrLost", err)
	}
	if err := first.Advance(ctx, 1, 2); !errors.Is(err, eventsink.ErrLost) {
		t.Errorf("Advance of the first = %v, want ErrLost", err)
	}
	// It must not set the consumer to where it believes to be, either.
	if err := first.Bind(ctx, eventsink.Origin{Stream: "S", Created: time.Unix(1, 0)}); !errors.Is(err, eventsink.ErrLost) {
		t.Errorf("Bind of the first = %v, want ErrLost", err)
	}
	if n, err := second.Append(ctx, []contract.EventRecord{sinktest.Record(1), sinktest.Record(3)}, 3); err != nil || n != 1 {
		t.Errorf("Append of the second = %d, %v, want 1 that is new", n, err)
	}
	got, _, err := second.List(ctx, eventsink.Query{Limit: 10})
	if err != nil || len(got) != 2 {
		t.Errorf("%d records, %v, want 1 and 3", len(got), err)
	}
}

// EVT-18: what lies beyond the cursor is not shown, so that a batch with lower
// sequences that commits later overtakes nobody.
func TestNothingBeyondTheCursor(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t).Database()
	one, two := openStore(t, dsn, true), openStore(t, dsn, true)
	ctx := t.Context()
	if _, err := two.Append(ctx, []contract.EventRecord{sinktest.Record(3), sinktest.Record(4)}, 0); err != nil {
		t.Fatal(err)
	}
	if got, more, err := one.List(ctx, eventsink.Query{Limit: 1}); err != nil || more || len(got) != 0 {
		t.Fatalf("List = %d records, more %v, %v; want none before 1 and 2 are there", len(got), more, err)
	}
	if _, err := one.Append(ctx, []contract.EventRecord{sinktest.Record(1), sinktest.Record(2)}, 0); err != nil {
		t.Fatal(err)
	}
	if err := one.Advance(ctx, 0, 4); err != nil {
		t.Fatal(err)
	}
	got, more, err := two.List(ctx, eventsink.Query{Limit: 10})
	if err != nil || more || len(got) != 4 {
		t.Fatalf("List = %d records, more %v, %v; want 4", len(got), more, err)
	}
	for i, r := range got {
		if r.Seq != uint64(i+1) {
			t.Errorf("record %d has sequence %d", i, r.Seq)
		}
	}
}

// Trouble that a person can mend is told so, and no password with it.
func TestExplains(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	db := srv.Database()
	srv.SQL("postgres", "CREATE ROLE reader LOGIN PASSWORD 'hush'; CREATE ROLE nobody NOLOGIN PASSWORD 'hush'")
	for name, c := range map[string]struct{ dsn, want string }{
		"no address":  {"", "want the address of a PostgreSQL database"},
		"rubbish":     {"postgres://u:hush@h:port/d", "eventsink.dsn"},
		"no database": {srv.DSN("missing", "postgres"), "the database does not exist"},
		"no login":    {srv.DSN("postgres", "nobody"), "refuses the user"},
		"no rights":   {srv.DSN(strings.TrimPrefix(strings.SplitN(db, "?", 2)[0], "postgres:///"), "reader") + "&password=hush", "lacks rights"},
		"no server":   {"postgres://u:hush@127.0.0.1:1/d?connect_timeout=5", "connect"},
	} {
		s, err := Open(ctx, c.dsn, false, nil)
		if err == nil {
			_ = s.Close()
			t.Errorf("%s: Open succeeded", name)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v; want %q and no password", name, err, c.want)
		}
	}
	s := openStore(t, db, false)
	srv.SQL(strings.TrimPrefix(strings.SplitN(db, "?", 2)[0], "postgres:///"), "ALTER DATABASE db1 SET default_transaction_read_only = on")
	s.pool.Reset()
	if err := s.Check(ctx); err == nil || !strings.Contains(err.Error(), "primary") {
		t.Errorf("Check of a read-only database = %v", err)
	}
	if _, err := s.Append(ctx, []contract.EventRecord{sinktest.Record(1)}, 1); err == nil || errors.Is(err, eventsink.ErrRejected) {
		t.Errorf("Append to a read-only database = %v, want trouble that may pass", err)
	}
}

// Replicas that start at the same time on an empty database all come up.
func TestOpenedAtOnce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Start(t).Database()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			s, err := Open(ctx, dsn, true, nil)
			if err != nil {
				t.Errorf("Open = %v", err)
				return
			}
			if err := s.Check(ctx); err != nil {
				t.Errorf("Check = %v", err)
			}
			if err := s.Close(); err != nil {
				t.Errorf("Close = %v", err)
			}
		})
	}
	all.Wait()
}

// A program that is older than the tables does not touch them.
func TestNewerSchema(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	dsn := srv.Database()
	openStore(t, dsn, true)
	srv.SQL("db1", "INSERT INTO goose_db_version (version_id, is_applied) VALUES (900, true)")
	s, err := Open(t.Context(), dsn, true, nil)
	if err == nil {
		_ = s.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "use a newer program") {
		t.Errorf("Open = %v, want that a newer program is needed", err)
	}
}

// EVT-17: a page is found through an index and in order, without sorting what matches,
// also before the server has figures of the table.
func TestListUsesIndex(t *testing.T) {
	t.Parallel()
	s := openStore(t, pgtest.Start(t).Database(), false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var records []contract.EventRecord
	for seq := uint64(1); seq <= 3000; seq++ {
		records = append(records, sinktest.Record(seq))
	}
	if _, err := s.Append(ctx, records, 3000); err != nil {
		t.Fatal(err)
	}
	end, message, step := contract.RecordEnd, contract.RecordRunMessage, contract.RecordStep
	look := func(t *testing.T) {
		for _, c := range []struct {
			index string
			q     eventsink.Query
		}{
			{"events_run", eventsink.Query{RunID: "r", Tenant: "default"}},
			{"events_thread", eventsink.Query{ThreadID: "t", Types: []string{end}}},
			{"events_task", eventsink.Query{TaskID: "x", RunID: "r", ThreadID: "t", Tenant: "default", Types: []string{end, message}}},
			{"events_pkey", eventsink.Query{}},
			{"events_tenant", eventsink.Query{Tenant: "default"}},
			{"events_tenant", eventsink.Query{Tenant: "default", Types: []string{step, end}}},
			{"events_type", eventsink.Query{Types: []string{step}}},
			{"events_type", eventsink.Query{Types: []string{end, message}}},
			{"events_tenant_type", eventsink.Query{Tenant: "default", Types: []string{end}}},
			{"events_tenant_type", eventsink.Query{Tenant: "default", Types: []string{end, message}}},
		} {
			c.q.Limit, c.q.AfterSeq = 10, 5
			query, args := build(c.q)
			rows, err := s.readers.Query(ctx, "EXPLAIN "+query, args...)
			if err != nil {
				t.Fatal(err)
			}
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				t.Fatal(err)
			}
			plan := strings.Join(lines, "\n")
			_, scan, _ := strings.Cut(plan, "using "+c.index+" on events")
			scan, _, _ = strings.Cut(scan, "->")
			sorted := strings.Contains(plan, "Sort") && !strings.Contains(plan, "unnest")
			if !strings.Contains(scan, "Index Cond: ") || !strings.Contains(scan, "seq") || !strings.Contains(scan, " > ") || sorted || strings.Contains(plan, "Bitmap") || strings.Contains(plan, "Seq Scan on events") {
				t.Errorf("plan of %+v =\n%s\nwant a search by %s from the sequence on", c.q, plan, c.index)
			}
		}
	}
	t.Run("without figures", look)
	if _, err := s.pool.Exec(ctx, "ANALYZE"); err != nil {
		t.Fatal(err)
	}
	t.Run("with figures", look)
}

// Readers, however many and however slow, take no connection from who writes.
func TestReadersDoNotHoldUpWriters(t *testing.T) {
	t.Parallel()
	s := openStore(t, pgtest.Start(t).Database(), false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range s.readers.Config().MaxConns {
		c, err := s.readers.Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Release()
	}
	if _, err := s.Append(ctx, []contract.EventRecord{sinktest.Record(1)}, 1); err != nil {
		t.Errorf("Append = %v", err)
	}
	if err := errors.Join(s.Check(ctx), s.Mark(ctx, time.Now()), s.Advance(ctx, 1, 2)); err != nil {
		t.Error(err)
	}
	if n, err := s.LastSeq(ctx); err != nil || n != 2 {
		t.Errorf("LastSeq = %d, %v, want 2", n, err)
	}
}

// A server that says nothing any more, because its machine has stopped or the network
// swallows everything, is given up after a while, and what is tried again then is
// stored once.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	srv := pgtest.Start(t)
	s := openStore(t, srv.Database()+"&statement_timeout=300", false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Check(ctx); err != nil {
		t.Fatal(err)
	}
	backends := strings.Fields(srv.SQL("db1", "SELECT pid FROM pg_stat_activity WHERE application_name = 'herdgate-eventsink'"))
	signal := func(sig syscall.Signal) {
		for _, b := range backends {
			pid, err := strconv.Atoi(b)
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(pid, sig); err != nil {
				t.Errorf("%s to backend %d: %v", sig, pid, err)
			}
		}
	}
	signal(syscall.SIGSTOP)
	_, err := s.Append(ctx, []contract.EventRecord{sinktest.Record(1)}, 1)
	signal(syscall.SIGCONT)
	if err == nil || errors.Is(err, eventsink.ErrRejected) || errors.Is(err, eventsink.ErrLost) || ctx.Err() != nil {
		t.Errorf("Append = %v, want trouble that may pass, before the test gives up", err)
	}
	for {
		if _, err = s.Append(ctx, []contract.EventRecord{sinktest.Record(1)}, 1); err == nil || ctx.Err() != nil {
			break
		}
	}
	got, _, listErr := s.List(ctx, eventsink.Query{Limit: 10})
	if err != nil || listErr != nil || len(got) != 1 {
		t.Errorf("%d records, %v, %v; want 1", len(got), err, listErr)
	}
}
