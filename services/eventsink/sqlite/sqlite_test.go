package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sinktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	sinktest.Run(t, func(t *testing.T) sinktest.Backend {
		dir := t.TempDir()
		return sinktest.Backend{Open: func(t *testing.T) eventsink.Store { return openStore(t, dir) }}
	})
}

func openStore(t *testing.T, dir string) *Store {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := Open(ctx, dir, func() { t.Error("the store is held by another one") })
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

// What is promised to survive a power failure needs these settings.
func TestPragmas(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	for name, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "busy_timeout": "1000", "query_only": "0"} {
		var got string
		if err := s.writer.QueryRow("PRAGMA " + name).Scan(&got); err != nil || got != want {
			t.Errorf("writer: %s = %s, %v, want %s", name, got, err, want)
		}
	}
	if _, err := s.reader.Exec("DELETE FROM events"); err == nil {
		t.Error("a reader could write")
	}
	if info, err := os.Stat(s.path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the file = %v, %v, want 0600", info.Mode(), err)
	}
}

// The columns that others read.
func TestSchema(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	if _, err := s.Append(t.Context(), []contract.EventRecord{sinktest.Record(5)}, 5); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var got [11]string
	dest := make([]any, len(got))
	for i := range got {
		dest[i] = &got[i]
	}
	if err := db.QueryRow("SELECT seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, json_extract(content, '$.kind'), json_extract(metadata, '$.task_id'), created_at FROM events").Scan(dest...); err != nil {
		t.Fatal(err)
	}
	want := [11]string{"5", "ev-5", "default", "thread 0", "run-0", "task-1", "subagent.step", "subagent", "ai", "task-1", "2026-01-02T03:04:10.123456Z"}
	if got != want {
		t.Errorf("row = %q, want %q", got, want)
	}
}

// EVT-17: a page must be found through an index and in order, without sorting: a
// conversation, a type or a tenant may be a thousandth of the database.
func TestListUsesIndex(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	end, message, step := contract.RecordEnd, contract.RecordRunMessage, contract.RecordStep
	for _, c := range []struct {
		index string
		types int // how many indexed searches are merged
		q     eventsink.Query
	}{
		{"events_run", 1, eventsink.Query{RunID: "r", Tenant: "a"}},
		{"events_thread", 1, eventsink.Query{ThreadID: "t", Types: []string{end}}},
		{"events_task", 1, eventsink.Query{TaskID: "x", RunID: "r", Tenant: "a", Types: []string{end, message}}},
		{"INTEGER PRIMARY KEY", 1, eventsink.Query{}},
		{"events_tenant", 1, eventsink.Query{Tenant: "a"}},
		{"events_tenant", 1, eventsink.Query{Tenant: "a", Types: []string{step, end}}},
		{"events_type", 1, eventsink.Query{Types: []string{step}}},
		{"events_type", 2, eventsink.Query{Types: []string{end, step, end}}},
		{"events_tenant_type", 1, eventsink.Query{Tenant: "a", Types: []string{end}}},
		{"events_tenant_type", 2, eventsink.Query{Tenant: "a", Types: []string{end, message}}},
	} {
		c.q.Limit, c.q.AfterSeq = 10, 5
		query, args := build(c.q)
		rows, err := s.reader.Query("EXPLAIN QUERY PLAN "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		var plan []string
		for rows.Next() {
			var id, parent, unused int
			var detail string
			if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
				t.Fatal(err)
			}
			plan = append(plan, detail)
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			t.Fatal(err)
		}
		found, wrong := 0, c.types == 1 && len(plan) != 1
		for _, step := range plan {
			if strings.Contains(step, c.index+" (") && (c.index == "INTEGER PRIMARY KEY" || strings.Contains(step, "rowid>?")) {
				found++
			}
			// Only what the merged searches have found, a page of each, may be sorted.
			wrong = wrong || strings.HasPrefix(step, "SCAN events") || c.types == 1 && strings.Contains(step, "TEMP B-TREE")
		}
		if found != c.types || wrong {
			t.Errorf("plan of %+v = %q, want %d searches by %s from the sequence on", c.q, plan, c.types, c.index)
		}
	}
}

// F-164: pages keep nothing open, so the write-ahead log is folded back all the time
// however much is read meanwhile. A program that reads on and on keeps it growing; when
// that one has ended the log gets its size back.
func TestLongReader(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	size := func() int64 {
		info, err := os.Stat(filepath.Join(dir, File+"-wal"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	seq, text := uint64(0), `{"text":"`+strings.Repeat("x", 16<<10)+`"}`
	write := func(bytes int) {
		for n := 0; n < bytes; n += 100 * len(text) {
			batch := make([]contract.EventRecord, 100)
			for i := range batch {
				seq++
				batch[i] = sinktest.Record(seq)
				batch[i].Content = []byte(text)
			}
			if _, err := s.Append(t.Context(), batch, seq); err != nil {
				t.Fatal(err)
			}
			// A page that ends before its rows do.
			if got, more, err := s.List(t.Context(), eventsink.Query{Limit: 50, MaxBytes: len(text)}); err != nil || len(got) == 0 || !more {
				t.Fatalf("List = %d records, more %v, %v", len(got), more, err)
			}
		}
	}
	write(16 << 20)
	if n := size(); n > 10<<20 {
		t.Errorf("the log has %d MiB after 16 MiB were written beside readers of pages, want at most 10", n>>20)
	}
	long, err := s.reader.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer long.Rollback()
	var n int
	if err := long.QueryRowContext(t.Context(), "SELECT count(*) FROM events").Scan(&n); err != nil {
		t.Fatal(err)
	}
	if _, err := s.writer.ExecContext(t.Context(), "CREATE TABLE large AS SELECT zeroblob(?) AS bytes", walLimit); err != nil { // cheaper than events
		t.Fatal(err)
	}
	write(4 << 20)
	if n := size(); n <= walLimit {
		t.Errorf("the log has %d bytes beside a reader that goes on and on: this test shows nothing", n)
	}
	if err := long.Rollback(); err != nil {
		t.Fatal(err)
	}
	write(4 << 20)
	if n := size(); n > walLimit {
		t.Errorf("the log has %d bytes after the reader has gone, want at most %d", n, walLimit)
	}
}

// Only one process writes to a file; another one waits, says so, and takes over
// when the first has gone.
func TestStandby(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := openStore(t, dir)
	if _, err := first.Append(t.Context(), []contract.EventRecord{sinktest.Record(1)}, 1); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	waiting, result := make(chan struct{}), make(chan error, 1)
	go func() {
		s, err := Open(ctx, dir, func() { close(waiting) })
		if s != nil {
			err = errors.Join(errors.New("opened beside the first"), s.Close())
		}
		result <- err
	}()
	<-waiting
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Fatalf("Open while another has the store = %v, want context.Canceled", err)
	}

	waiting = make(chan struct{})
	opened := make(chan *Store, 1)
	go func() {
		s, err := Open(t.Context(), dir, func() { close(waiting) })
		if err != nil {
			t.Errorf("Open = %v", err)
		}
		opened <- s
	}()
	<-waiting
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := <-opened
	if second == nil {
		t.FailNow()
	}
	defer second.Close()
	if seq, err := second.LastSeq(t.Context()); err != nil || seq != 1 {
		t.Errorf("LastSeq after taking over = %d, %v, want 1", seq, err)
	}
}

// F-162: a full disk is trouble that passes, not the fault of a record, and the
// same batch goes in when there is room again.
func TestFull(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	var pages int
	if err := s.writer.QueryRow("PRAGMA page_count").Scan(&pages); err != nil {
		t.Fatal(err)
	}
	if _, err := s.writer.Exec(fmt.Sprintf("PRAGMA max_page_count = %d", pages+2)); err != nil {
		t.Fatal(err)
	}
	var batch []contract.EventRecord
	for seq := uint64(1); seq <= 500; seq++ {
		batch = append(batch, sinktest.Record(seq))
	}
	_, err := s.Append(t.Context(), batch, 500)
	if err == nil || errors.Is(err, eventsink.ErrRejected) || !strings.Contains(err.Error(), "free disk space") {
		t.Fatalf("Append without room = %v, want an error about space that is not ErrRejected", err)
	}
	if _, err := s.writer.Exec("PRAGMA max_page_count = 1000000"); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Append(t.Context(), batch, 500); err != nil || n != 500 {
		t.Errorf("Append with room again = %d, %v, want 500", n, err)
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	t.Run("no database", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, File), []byte(strings.Repeat("this is no database ", 300)), 0o600); err != nil {
			t.Fatal(err)
		}
		wantOpenError(t, dir, "no SQLite database")
	})
	t.Run("newer schema", func(t *testing.T) {
		dir := t.TempDir()
		s := openStore(t, dir)
		if _, err := s.writer.Exec("INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)"); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		wantOpenError(t, dir, "use a newer program")
	})
	t.Run("a file where the directory should be", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(dir, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		wantOpenError(t, dir, "data directory")
	})
}

// wantOpenError checks the error, and that the lock is free again after it.
func wantOpenError(t *testing.T, dir, want string) {
	t.Helper()
	for range 2 {
		s, err := Open(t.Context(), dir, func() { t.Error("the lock was left behind") })
		if err == nil {
			_ = s.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("Open = %v, want an error with %q", err, want)
		}
	}
}

// Odd characters in the path of the data directory must not be read as a URI's.
func TestPath(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a b?c#d%41&mode=ro")
	s := openStore(t, dir)
	if _, err := s.Append(t.Context(), []contract.EventRecord{sinktest.Record(1)}, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, File)); err != nil {
		t.Error(err)
	}
}

// An idle sink must find out as well that it could not store anything: Check
// does what a batch would have to do (F-156, F-162).
func TestCheckFindsWhatABatchWouldFind(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	if err := s.Check(t.Context()); err != nil {
		t.Fatalf("Check of a sound store = %v", err)
	}
	other, err := sql.Open("sqlite", "file:"+s.path+"?_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	tx, err := other.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "another program holds the database") {
		t.Errorf("Check while another program holds the lock = %v", err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check after the lock is gone = %v", err)
	}
}

// What is written to a file that was removed is gone with the process. It must
// not be stored there, or it would be acknowledged.
func TestFileTakenAwayTakesNothingMore(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	record := []contract.EventRecord{sinktest.Record(5)}
	aside := s.path + ".aside"
	if err := os.Rename(s.path, aside); err != nil {
		t.Fatal(err)
	}
	refused := func(want string) {
		t.Helper()
		if err := s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Check = %v, want %q", err, want)
		}
		if _, err := s.Append(t.Context(), record, 5); err == nil || errors.Is(err, eventsink.ErrRejected) || !strings.Contains(err.Error(), want) {
			t.Errorf("Append = %v, want %q and to be tried again", err, want)
		}
	}
	refused("taken away")
	if err := os.WriteFile(s.path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused("replaced")
	if err := os.Rename(aside, s.path); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Append(t.Context(), record, 5); err != nil || n != 1 {
		t.Errorf("Append after the file is back = %d, %v", n, err)
	}
}
