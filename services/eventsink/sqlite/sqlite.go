// Package sqlite keeps events in one SQLite file, events.db in the data
// directory. It is the store of a single machine: one process writes, and holds
// eventsink.lock in the same directory for as long.
//
// The file is in WAL mode with synchronous FULL: what was committed survives a
// power failure, which is what the sink's acknowledgements promise.
package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
)

// Names of the files in the data directory.
const (
	File     = "events.db"
	LockFile = "eventsink.lock"
)

const (
	// busyTimeout is how long SQLite itself waits for a lock that another
	// program holds on the file. It is short because a shutdown waits for it;
	// the sink tries again anyway.
	busyTimeout = time.Second
	// lockPoll is how often a process that stands by looks whether the writer
	// has gone. The kernel frees a file lock but tells nobody.
	lockPoll = 250 * time.Millisecond
	// readers bounds the connections that read.
	readers = 4
	// walLimit is the size to which the write-ahead log is cut back after a
	// checkpoint.
	walLimit = 64 << 20
)

const timeFormat = "2006-01-02T15:04:05.000000Z"

//go:embed migrations/*.sql
var migrations embed.FS

// Store is an [eventsink.Store] in a SQLite file.
type Store struct {
	path   string
	file   os.FileInfo // of the file that is open
	lock   *flock.Flock
	writer *sql.DB
	reader *sql.DB
}

var _ eventsink.Store = (*Store)(nil)

// Path is the database's file: dsn, or where that is empty [File] in the data
// directory.
func Path(dataDir, dsn string) string {
	if dsn == "" {
		return filepath.Join(dataDir, File)
	}
	return dsn
}

// Opener returns the [eventsink.OpenFunc] for [File] in the data directory dir.
func Opener(dir string) eventsink.OpenFunc { return FileOpener(Path(dir, "")) }

// FileOpener returns the [eventsink.OpenFunc] for the file at path.
func FileOpener(path string) eventsink.OpenFunc {
	return func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		s, err := OpenFile(ctx, path, waiting)
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// Open opens the store in [File] of the data directory dir, as [OpenFile] does.
func Open(ctx context.Context, dir string, waiting func()) (*Store, error) {
	return OpenFile(ctx, Path(dir, ""), waiting)
}

// OpenFile opens the store at path and makes file and directory if they are not there.
// While another process has the store open it blocks, after one call of waiting.
func OpenFile(ctx context.Context, path string, waiting func()) (_ *Store, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("event store: data directory: %w", err)
	}
	lock := filepath.Join(dir, LockFile)
	if filepath.Base(path) != File {
		lock = path + ".lock" // there may be several in this directory
	}
	s := &Store{path: path, lock: flock.New(lock, flock.SetPermissions(0o600))}
	defer func() {
		if err != nil {
			_ = s.Close() // the first error is the one that counts
		}
	}()
	if err := s.acquire(ctx, waiting); err != nil {
		return nil, err
	}
	// Made here, so that nobody but the owner can read what agents were told.
	f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("event store: %w", err)
	}
	s.file, err = f.Stat()
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("event store: %w", err)
	}
	if s.writer, err = open(s.path, false); err != nil {
		return nil, err
	}
	if s.reader, err = open(s.path, true); err != nil {
		return nil, err
	}
	if err := s.migrate(ctx); err != nil {
		return nil, fmt.Errorf("event store: %s: %w", s.path, explain(err))
	}
	return s, nil
}

func (s *Store) acquire(ctx context.Context, waiting func()) error {
	ok, err := s.lock.TryLock()
	if err != nil {
		return fmt.Errorf("event store: lock %s: %w", s.lock.Path(), err)
	}
	if ok {
		return nil
	}
	if waiting != nil {
		waiting()
	}
	if ok, err = s.lock.TryLockContext(ctx, lockPoll); err != nil {
		return fmt.Errorf("event store: lock %s: %w", s.lock.Path(), err)
	}
	if !ok {
		return fmt.Errorf("event store: lock %s is held by another process", s.lock.Path())
	}
	return nil
}

func open(path string, readOnly bool) (*sql.DB, error) {
	q := url.Values{}
	q.Add("_pragma", fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()))
	if readOnly {
		q.Add("_pragma", "query_only(1)")
	} else {
		q.Add("_pragma", "journal_mode(WAL)")
		q.Add("_pragma", "synchronous(FULL)")
		q.Add("_pragma", fmt.Sprintf("journal_size_limit(%d)", walLimit))
		q.Add("_txlock", "immediate")
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", OmitHost: true, Path: filepath.ToSlash(path), RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, fmt.Errorf("event store: %s: %w", path, err)
	}
	n := 1
	if readOnly {
		n = readers
	}
	db.SetMaxOpenConns(n)
	db.SetMaxIdleConns(n)
	return db, nil
}

func (s *Store) migrate(ctx context.Context) error {
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, s.writer, dir, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("schema version: %w", err)
	}
	if have > want {
		return fmt.Errorf("schema has version %d, this program knows up to %d; use a newer program", have, want)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate from version %d to %d: %w", have, want, err)
	}
	return nil
}

// Bind implements [eventsink.Store].
func (s *Store) Bind(ctx context.Context, want eventsink.Origin) error {
	return s.update(ctx, func(tx *sql.Tx) error {
		var last int64
		if err := tx.QueryRowContext(ctx, `SELECT max(coalesce((SELECT max(seq) FROM events), 0), coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'cursor'), 0))`).Scan(&last); err != nil {
			return err
		}
		stream, err := meta(ctx, tx, "stream")
		if err != nil {
			return err
		}
		created, err := meta(ctx, tx, "stream_created")
		if err != nil {
			return err
		}
		at := want.Created.UTC().Format(time.RFC3339Nano)
		switch {
		case stream == want.Stream && created == at:
			return nil
		case last > 0:
			had, _ := time.Parse(time.RFC3339Nano, created) // the zero time tells as much
			return eventsink.ForeignError(s.path, uint64(last), eventsink.Origin{Stream: stream, Created: had}, want)
		}
		if err := setMeta(ctx, tx, "stream", want.Stream); err != nil {
			return err
		}
		return setMeta(ctx, tx, "stream_created", at)
	})
}

const insert = `INSERT INTO events (seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`

// Append implements [eventsink.Store].
func (s *Store) Append(ctx context.Context, records []contract.EventRecord, upTo uint64) (int, error) {
	for i := range records {
		if records[i].Seq > math.MaxInt64 {
			return 0, fmt.Errorf("event store: %w: sequence %d is above %d", eventsink.ErrRejected, records[i].Seq, int64(math.MaxInt64))
		}
	}
	stored := 0
	err := s.update(ctx, func(tx *sql.Tx) error {
		stmt, err := tx.PrepareContext(ctx, insert)
		if err != nil {
			return err
		}
		defer stmt.Close()
		for i := range records {
			r := &records[i]
			res, err := stmt.ExecContext(ctx, int64(r.Seq), r.EventID, string(r.Tenant), string(r.ThreadID), string(r.RunID), string(r.TaskID),
				r.EventType, r.Category, text(r.Content), text(r.Metadata), r.CreatedAt.UTC().Format(timeFormat))
			if err != nil {
				return fmt.Errorf("event %q at %d: %w", r.EventID, r.Seq, err)
			}
			n, err := res.RowsAffected()
			if err != nil {
				return err
			}
			stored += int(n)
		}
		return raise(ctx, tx, "cursor", upTo)
	})
	if err != nil {
		return 0, err
	}
	return stored, nil
}

// Advance implements [eventsink.Store].
func (s *Store) Advance(ctx context.Context, from, to uint64) error {
	return s.update(ctx, func(tx *sql.Tx) error {
		have, err := counter(ctx, tx, "cursor")
		if err != nil {
			return err
		}
		if have < from {
			return eventsink.ErrLost
		}
		return raise(ctx, tx, "cursor", to)
	})
}

// Mark implements [eventsink.Store].
func (s *Store) Mark(ctx context.Context, at time.Time) error {
	return s.update(ctx, func(tx *sql.Tx) error {
		cursor, err := counter(ctx, tx, "cursor")
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO marks (seq, at) SELECT ?1, ?2 WHERE ?1 > coalesce((SELECT max(seq) FROM marks), 0)`, int64(cursor), at.UTC().Format(timeFormat))
		return err
	})
}

// Prune implements [eventsink.Store].
func (s *Store) Prune(ctx context.Context, before time.Time, limit int) (deleted int, err error) {
	err = s.update(ctx, func(tx *sql.Tx) error {
		var upTo, last int64
		if err := tx.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0) FROM marks WHERE at <= ?`, before.UTC().Format(timeFormat)).Scan(&upTo); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0), count(*) FROM (SELECT seq FROM events WHERE seq <= ? ORDER BY seq LIMIT ?)`, upTo, limit).Scan(&last, &deleted); err != nil {
			return err
		}
		if deleted < limit {
			last = upTo // the marks up to there have served their time
			if _, err := tx.ExecContext(ctx, `DELETE FROM marks WHERE seq <= ?`, upTo); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM events WHERE seq <= ?`, last); err != nil {
			return err
		}
		return raise(ctx, tx, "pruned", uint64(last))
	})
	if err != nil {
		return 0, err
	}
	return deleted, nil
}

// List implements [eventsink.Store].
func (s *Store) List(ctx context.Context, q eventsink.Query) ([]contract.EventRecord, bool, error) {
	if q.Limit < 1 {
		return nil, false, fmt.Errorf("event store: limit is %d; want at least 1", q.Limit)
	}
	query, args := build(q)
	rows, err := s.reader.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, false, fmt.Errorf("event store: list: %w", explain(err))
	}
	defer rows.Close()
	records, size, more := []contract.EventRecord{}, 0, false
	for rows.Next() {
		if len(records) == q.Limit {
			more = true
			break
		}
		var r contract.EventRecord
		var content, metadata, created string
		if err := rows.Scan(&r.Seq, &r.EventID, &r.Tenant, &r.ThreadID, &r.RunID, &r.TaskID, &r.EventType, &r.Category, &content, &metadata, &created); err != nil {
			return nil, false, fmt.Errorf("event store: list: %w", explain(err))
		}
		if r.CreatedAt, err = time.Parse(time.RFC3339Nano, created); err != nil {
			return nil, false, fmt.Errorf("event store: event at %d: created_at: %w", r.Seq, err)
		}
		if size += len(content) + len(metadata); q.MaxBytes > 0 && size > q.MaxBytes && len(records) > 0 {
			more = true
			break
		}
		r.Content, r.Metadata = json.RawMessage(content), json.RawMessage(metadata)
		records = append(records, r)
	}
	if err := rows.Err(); err != nil {
		return nil, false, fmt.Errorf("event store: list: %w", explain(err))
	}
	return records, more, nil
}

// columns are what List reads.
const columns = "seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at"

// build writes the statement of a query. One row more than the limit tells
// whether there is a next page. It names the index: each of them has the page in
// order from its first row on, and SQLite, which knows nothing of how often a value
// occurs, might take the one of all events of a tenant.
func build(q eventsink.Query) (string, []any) {
	after, limit := int64(min(q.AfterSeq, math.MaxInt64)), int64(q.Limit)+1
	var index, where string
	var args []any
	use := func(name string) {
		if index == "" {
			index = " INDEXED BY " + name
		}
	}
	equal := func(column, v, name string) {
		if v != "" {
			where += " AND " + column + " = ?"
			args = append(args, v)
			use(name)
		}
	}
	// From the narrowest on.
	equal("task_id", string(q.TaskID), "events_task")
	equal("run_id", string(q.RunID), "events_run")
	equal("thread_id", string(q.ThreadID), "events_thread")
	types := slices.Compact(slices.Sorted(slices.Values(q.Types)))
	merge := index == "" && len(types) > 0
	if merge && q.Tenant != "" {
		if merge = !slices.Contains(types, contract.RecordStep); merge {
			where += " AND event_type <> '" + contract.RecordStep + "'" // what the index is made for
			use("events_tenant_type")
		}
	}
	equal("tenant", string(q.Tenant), "events_tenant")
	if !merge {
		if len(types) > 0 {
			where += " AND event_type IN (?" + strings.Repeat(", ?", len(types)-1) + ")"
			for _, t := range types {
				args = append(args, t)
			}
		}
		return "SELECT " + columns + " FROM events" + index + " WHERE seq > ?" + where + " ORDER BY seq LIMIT ?",
			append(append([]any{after}, args...), limit)
	}
	use("events_type")
	if len(types) == 1 {
		return "SELECT " + columns + " FROM events" + index + " WHERE seq > ?" + where + " AND event_type = ? ORDER BY seq LIMIT ?",
			append(append([]any{after}, args...), types[0], limit)
	}
	// Each type is in order by itself; the page is the first of all of them.
	var b strings.Builder
	var all []any
	b.WriteString("SELECT " + columns + " FROM events WHERE seq IN (SELECT seq FROM (")
	for i, t := range types {
		if i > 0 {
			b.WriteString(" UNION ALL ")
		}
		b.WriteString("SELECT seq FROM (SELECT seq FROM events" + index + " WHERE seq > ?" + where + " AND event_type = ? ORDER BY seq LIMIT ?)")
		all = append(append(append(all, after), args...), t, limit)
	}
	b.WriteString(") ORDER BY seq LIMIT ?) ORDER BY seq")
	return b.String(), append(all, limit)
}

// LastSeq implements [eventsink.Store].
func (s *Store) LastSeq(ctx context.Context) (uint64, error) {
	n, err := counter(ctx, s.reader, "cursor")
	if err != nil {
		return 0, fmt.Errorf("event store: %s: %w", s.path, explain(err))
	}
	return n, nil
}

// Newest implements [eventsink.Store].
func (s *Store) Newest(ctx context.Context) (seq uint64, eventID string, err error) {
	err = s.reader.QueryRowContext(ctx, `SELECT seq, event_id FROM events ORDER BY seq DESC LIMIT 1`).Scan(&seq, &eventID)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, "", fmt.Errorf("event store: %s: %w", s.path, explain(err))
	}
	return seq, eventID, nil
}

// Pruned implements [eventsink.Store].
func (s *Store) Pruned(ctx context.Context) (uint64, error) {
	n, err := counter(ctx, s.reader, "pruned")
	if err != nil {
		return 0, fmt.Errorf("event store: %s: %w", s.path, explain(err))
	}
	return n, nil
}

// Check implements [eventsink.Store]. It takes the lock that a writer needs and
// lets it go.
func (s *Store) Check(ctx context.Context) error {
	if err := s.same(); err != nil {
		return err
	}
	tx, err := s.writer.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("event store: begin: %w", explain(err))
	}
	_ = tx.Rollback() // nothing was done
	return nil
}

// same reports whether the file is still the one that was opened. SQLite would
// write on to a file that was removed, and all of it would be gone at the end.
func (s *Store) same() error {
	now, err := os.Stat(s.path)
	switch {
	case err != nil:
		return fmt.Errorf("event store: the file was taken away while it was open: %w; put it back or start the event sink again", err)
	case !os.SameFile(now, s.file):
		return fmt.Errorf("event store: %s was replaced while it was open; start the event sink again", s.path)
	}
	return nil
}

// Close closes the file and frees the lock.
func (s *Store) Close() error {
	var errs []error
	// The reader first: the last connection of all folds the log back into the
	// file, and one that may only read could not.
	for _, db := range []*sql.DB{s.reader, s.writer} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(append(errs, s.lock.Close())...)
}

func (s *Store) update(ctx context.Context, f func(*sql.Tx) error) error {
	if err := s.same(); err != nil {
		return err
	}
	tx, err := s.writer.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("event store: begin: %w", explain(err))
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback() // the first error is the one that counts
		return fmt.Errorf("event store: write: %w", explain(err))
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("event store: commit: %w", explain(err))
	}
	return nil
}

// querier is a database or a transaction of it.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// counter reads a number that only grows; 0 if there is none.
func counter(ctx context.Context, q querier, key string) (uint64, error) {
	v, err := meta(ctx, q, key)
	if err != nil || v == "" {
		return 0, err
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is %q; want a sequence", key, v)
	}
	return n, nil
}

// raise sets a number that only grows.
func raise(ctx context.Context, tx *sql.Tx, key string, to uint64) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO meta (key, value) VALUES (?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE CAST(value AS INTEGER) < CAST(excluded.value AS INTEGER)`, key, strconv.FormatUint(to, 10))
	return err
}

func meta(ctx context.Context, tx querier, key string) (string, error) {
	var v string
	err := tx.QueryRowContext(ctx, `SELECT value FROM meta WHERE key = ?`, key).Scan(&v)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	return v, err
}

func setMeta(ctx context.Context, tx *sql.Tx, key, value string) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value`, key, value)
	return err
}

func text(b json.RawMessage) string {
	if len(b) == 0 {
		return "null"
	}
	return string(b)
}

// explain marks what will never work and adds a hint where a person can help.
func explain(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() & 0xff { // without the extended part
	case sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG:
		return fmt.Errorf("%w: %w", eventsink.ErrRejected, err)
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return fmt.Errorf("another program holds the database: %w", err)
	case sqlite3.SQLITE_FULL:
		return fmt.Errorf("no room left: free disk space: %w", err)
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN:
		return fmt.Errorf("the file or its directory cannot be written: check owner and mode: %w", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return fmt.Errorf("the file is damaged or no SQLite database: move it away or restore it: %w", err)
	}
	return err
}
