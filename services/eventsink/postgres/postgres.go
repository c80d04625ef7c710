// Package postgres keeps events in a PostgreSQL database, the store of a fleet.
//
// One sink at a time writes (the others stand by), or several share the work.
// In both cases readers see nothing beyond the cursor, up to which everything
// has been processed, so that nobody who pages by sequence is overtaken by a
// batch with lower ones.
package postgres

import (
	"context"
	"crypto/rand"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
)

const (
	// writers and readers bound the connections. Who reads waits for other readers
	// and never holds up a batch, the housekeeping or the readiness check.
	writers, readers = 3, 4
	// connectTimeout bounds the wait for a connection to be made.
	connectTimeout = 5 * time.Second
	// statementTimeout ends what hangs in the database: a lock that somebody else
	// holds, a query without an index. It is far above what a batch takes.
	statementTimeout = 30 * time.Second
	// grace is how much longer the answer to a statement is waited for. Nothing
	// comes from a machine that has vanished.
	grace = 2 * time.Second
	// ownerLock is the advisory lock of the sink that writes, so that the others
	// wait in the database instead of asking again and again.
	ownerLock = 0x6865726467617465 // "herdgate"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Store is an [eventsink.Store] in a PostgreSQL database.
type Store struct {
	pool, readers *pgxpool.Pool
	// patience bounds every statement that writes.
	patience time.Duration
	// owner is what the table must name for this store to write; empty if all may.
	owner string
	// held keeps the advisory lock; nil if all may write.
	held *pgx.Conn
}

var _ eventsink.Store = (*Store)(nil)

// Opener returns the [eventsink.OpenFunc] of the database at dsn, a URL or
// keywords as libpq has them. If shared is set several processes write at once,
// else one writes and the others wait.
func Opener(dsn string, shared bool) eventsink.OpenFunc {
	return func(ctx context.Context, waiting func()) (eventsink.Store, error) {
		s, err := Open(ctx, dsn, shared, waiting)
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// Open opens the store and makes or updates its tables. Unless the store is
// shared it blocks while another process writes, after one call of waiting.
func Open(ctx context.Context, dsn string, shared bool, waiting func()) (_ *Store, err error) {
	cfg, err := parse(dsn)
	if err != nil {
		return nil, err
	}
	s := &Store{patience: patience(cfg)}
	defer func() {
		if err != nil {
			_ = s.Close() // the first error is the one that counts
		}
	}()
	reading := cfg.Copy()
	// A page is read in the order of an index. Plans that first read all that matches
	// look good to a server that has no figures of the table yet; a plan for each page
	// costs about as much as the page, and compiling it a hundred times that.
	for name, v := range map[string]string{
		"enable_bitmapscan": "off", "enable_seqscan": "off", "enable_incremental_sort": "off", "jit": "off", "plan_cache_mode": "force_generic_plan",
	} {
		if _, ok := reading.ConnConfig.RuntimeParams[name]; !ok {
			reading.ConnConfig.RuntimeParams[name] = v
		}
	}
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = writers, 0, 0
	if s.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, fmt.Errorf("event store: %w", explain(err))
	}
	if s.readers, err = pgxpool.NewWithConfig(ctx, reading); err != nil {
		return nil, fmt.Errorf("event store: %w", explain(err))
	}
	if err := s.migrate(ctx); err != nil {
		return nil, fmt.Errorf("event store: %w", explain(err))
	}
	if shared {
		if err := s.disown(ctx); err != nil {
			return nil, err
		}
		return s, nil
	}
	if err := s.acquire(ctx, waiting); err != nil {
		return nil, fmt.Errorf("event store: become the one that writes: %w", explain(err))
	}
	return s, nil
}

// parse reads the address. What the address says of timeouts stands.
func parse(dsn string) (*pgxpool.Config, error) {
	// Without an address the variables of PostgreSQL's own tools count.
	if strings.TrimSpace(dsn) == "" && os.Getenv("PGHOST")+os.Getenv("PGHOSTADDR")+os.Getenv("PGSERVICE") == "" {
		return nil, errors.New("eventsink.dsn: is empty; want the address of a PostgreSQL database, such as postgres://user@host:5432/herdgate")
	}
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("eventsink.dsn: %w", err) // pgx leaves the password out
	}
	if !strings.Contains(dsn, "pool_max_conns") {
		cfg.MaxConns = readers
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	// A machine that has vanished must be noticed: by us, who may wait for hours for
	// the lock, and by the server, which must not keep a lock for the two hours that
	// it waits by default.
	alive := net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 3 * time.Second, Count: 3}
	cfg.ConnConfig.DialFunc = (&net.Dialer{KeepAliveConfig: alive}).DialContext
	for name, v := range map[string]string{
		"application_name": "herdgate-eventsink", "timezone": "UTC",
		"statement_timeout":                   fmt.Sprint(statementTimeout.Milliseconds()),
		"idle_in_transaction_session_timeout": fmt.Sprint(statementTimeout.Milliseconds()),
		"tcp_keepalives_idle":                 "5", "tcp_keepalives_interval": "3", "tcp_keepalives_count": "3",
	} {
		if _, ok := cfg.ConnConfig.RuntimeParams[name]; !ok {
			cfg.ConnConfig.RuntimeParams[name] = v
		}
	}
	return cfg, nil
}

// patience is how long the answer to a statement may take.
func patience(cfg *pgxpool.Config) time.Duration {
	// What has a unit is at the server's discretion.
	if ms, err := strconv.Atoi(cfg.ConnConfig.RuntimeParams["statement_timeout"]); err == nil && ms > 0 {
		return time.Duration(ms)*time.Millisecond + grace
	}
	return statementTimeout + grace
}

func (s *Store) migrate(ctx context.Context) error {
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	// A change to a large table takes as long as it takes.
	cfg := s.pool.Config().ConnConfig.Copy()
	cfg.RuntimeParams["statement_timeout"] = "0"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300)) // every second, for five minutes
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, dir, goose.WithDisableGlobalRegistry(true), goose.WithSessionLocker(locker))
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
	if have == want {
		return nil
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migrate from version %d to %d: %w", have, want, err)
	}
	return nil
}

// acquire waits for the lock and writes who we are into the table. The lock
// spares the others' work; what keeps a writer out that does not know yet that
// it has lost the lock is the name.
func (s *Store) acquire(ctx context.Context, waiting func()) error {
	cfg := s.pool.Config().ConnConfig.Copy()
	cfg.RuntimeParams["statement_timeout"] = "0"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return err
	}
	s.held = conn
	var ok bool
	if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, int64(ownerLock)).Scan(&ok); err != nil {
		return err
	}
	if !ok {
		if waiting != nil {
			waiting()
		}
		if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, int64(ownerLock)); err != nil {
			return err
		}
	}
	s.owner = rand.Text()
	_, err = s.pool.Exec(ctx, `UPDATE sink SET owner = $1`, s.owner)
	return err
}

// disown makes a database that one process wrote to one that several do.
func (s *Store) disown(ctx context.Context) error {
	if _, err := s.pool.Exec(ctx, `UPDATE sink SET owner = '' WHERE owner <> ''`); err != nil {
		return fmt.Errorf("event store: %w", explain(err))
	}
	return nil
}

// Bind implements [eventsink.Store].
func (s *Store) Bind(ctx context.Context, want eventsink.Origin) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	at := want.Created.UTC().Format(time.RFC3339Nano)
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var last int64
		var have eventsink.Origin
		var created, owner string
		if err := tx.QueryRow(ctx, `SELECT greatest(cursor, coalesce((SELECT max(seq) FROM events), 0)), stream, stream_created, owner FROM sink FOR UPDATE`).
			Scan(&last, &have.Stream, &created, &owner); err != nil {
			return err
		}
		switch {
		case owner != s.owner:
			return fmt.Errorf("event store: %w", eventsink.ErrLost)
		case have.Stream == want.Stream && created == at:
			return nil
		case last > 0:
			have.Created, _ = time.Parse(time.RFC3339Nano, created) // the zero time tells as much
			return eventsink.ForeignError(s.name(), uint64(last), have, want)
		}
		_, err := tx.Exec(ctx, `UPDATE sink SET stream = $1, stream_created = $2`, want.Stream, at)
		return err
	})
	if err != nil && !errors.Is(err, eventsink.ErrForeign) && !errors.Is(err, eventsink.ErrLost) {
		return fmt.Errorf("event store: %w", explain(err))
	}
	return err
}

// name tells a person which database this is, without its password.
func (s *Store) name() string {
	c := s.pool.Config().ConnConfig
	return fmt.Sprintf("the database %q at %s", c.Database, c.Host)
}

// One statement is one transaction and one round trip. The update comes first:
// it is the fence that keeps out whoever is not the owner any more.
const (
	rows = `INSERT INTO events (seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at)
SELECT seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content::json, metadata::json, created_at
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::timestamptz[])
  AS t (seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content, metadata, created_at)
WHERE EXISTS (SELECT 1 FROM fence)
ON CONFLICT DO NOTHING RETURNING 1`
	moving  = `UPDATE sink SET cursor = greatest(cursor, $12) WHERE owner = $13 RETURNING 1`
	staying = `SELECT 1 FROM sink WHERE $12::bigint = 0 AND owner = $13`
)

func insert(fence string) string {
	return `WITH fence AS (` + fence + `), added AS (` + rows + `) SELECT (SELECT count(*) FROM fence), (SELECT count(*) FROM added)`
}

// Append implements [eventsink.Store].
func (s *Store) Append(ctx context.Context, records []contract.EventRecord, upTo uint64) (int, error) {
	if upTo > math.MaxInt64 {
		return 0, fmt.Errorf("event store: %w: sequence %d is above %d", eventsink.ErrRejected, upTo, int64(math.MaxInt64))
	}
	n := len(records)
	seq, created := make([]int64, n), make([]time.Time, n)
	var text [9][]string
	for i := range text {
		text[i] = make([]string, n)
	}
	for i := range records {
		r := &records[i]
		if r.Seq > math.MaxInt64 {
			return 0, fmt.Errorf("event store: %w: sequence %d is above %d", eventsink.ErrRejected, r.Seq, int64(math.MaxInt64))
		}
		seq[i], created[i] = int64(r.Seq), r.CreatedAt
		for j, v := range [9]string{r.EventID, string(r.Tenant), string(r.ThreadID), string(r.RunID), string(r.TaskID), r.EventType, r.Category, raw(r.Content), raw(r.Metadata)} {
			text[j][i] = v
		}
	}
	statement := insert(moving)
	if upTo == 0 {
		statement = insert(staying)
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	var fence, stored int
	err := s.pool.QueryRow(ctx, statement, seq, text[0], text[1], text[2], text[3], text[4], text[5], text[6], text[7], text[8], created, int64(upTo), s.owner).
		Scan(&fence, &stored)
	switch {
	case err != nil:
		return 0, fmt.Errorf("event store: write: %w", explain(err))
	case fence == 0:
		return 0, fmt.Errorf("event store: %w", eventsink.ErrLost)
	}
	return stored, nil
}

// Advance implements [eventsink.Store].
func (s *Store) Advance(ctx context.Context, from, to uint64) error {
	if to > math.MaxInt64 {
		return fmt.Errorf("event store: sequence %d is above %d", to, int64(math.MaxInt64))
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	tag, err := s.pool.Exec(ctx, `UPDATE sink SET cursor = greatest(cursor, $1) WHERE owner = $2 AND cursor >= $3`, int64(to), s.owner, int64(from))
	switch {
	case err != nil:
		return fmt.Errorf("event store: move the cursor: %w", explain(err))
	case tag.RowsAffected() == 0:
		return fmt.Errorf("event store: %w", eventsink.ErrLost)
	}
	return nil
}

// List implements [eventsink.Store].
func (s *Store) List(ctx context.Context, q eventsink.Query) ([]contract.EventRecord, bool, error) {
	if q.Limit < 1 {
		return nil, false, fmt.Errorf("event store: limit is %d; want at least 1", q.Limit)
	}
	query, args := build(q)
	rows, err := s.readers.Query(ctx, query, args...)
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
		var seq int64
		var content, metadata string
		if err := rows.Scan(&seq, &r.EventID, &r.Tenant, &r.ThreadID, &r.RunID, &r.TaskID, &r.EventType, &r.Category, &content, &metadata, &r.CreatedAt); err != nil {
			return nil, false, fmt.Errorf("event store: list: %w", explain(err))
		}
		if size += len(content) + len(metadata); q.MaxBytes > 0 && size > q.MaxBytes && len(records) > 0 {
			more = true
			break
		}
		r.Seq, r.CreatedAt = uint64(seq), r.CreatedAt.UTC()
		r.Content, r.Metadata = json.RawMessage(content), json.RawMessage(metadata)
		records = append(records, r)
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return nil, false, fmt.Errorf("event store: list: %w", explain(err))
	}
	return records, more, nil
}

// build writes the statement of a query. One row more than the limit tells
// whether there is a next page.
//
// It leaves the server one index to use, which has the page in order from its first
// row on: the condition is one range of that index, the order is that of all its
// columns, and other columns have an empty text added, which no index has. A server
// that chooses takes what is good for the usual thread, type or tenant, and for a
// rare one reads the whole table.
func build(q eventsink.Query) (string, []any) {
	const cursor = "(SELECT cursor FROM sink WHERE one)"
	args := []any{int64(min(q.AfterSeq, math.MaxInt64)), int64(q.Limit) + 1}
	arg := func(v any) string {
		args = append(args, v)
		return fmt.Sprintf("$%d", len(args))
	}
	var columns, values, others string // the index, where in it, and what else must be right
	type filter struct{ column, value string }
	// From the narrowest on.
	filters := []filter{{"task_id", string(q.TaskID)}, {"run_id", string(q.RunID)}, {"thread_id", string(q.ThreadID)}, {"tenant", string(q.Tenant)}}
	for _, f := range filters {
		switch {
		case f.value == "":
		case columns == "":
			columns, values = f.column+", ", arg(f.value)+"::text, "
		default:
			others += " AND (" + f.column + " || '') = " + arg(f.value)
		}
	}
	if q.TaskID != "" {
		others += " AND task_id <> ''" // what the index is made for
	}
	merge := false
	types := slices.Compact(slices.Sorted(slices.Values(q.Types)))
	if len(types) > 0 {
		wanted := arg(types)
		switch {
		case columns == "":
			merge = true
		case columns == "tenant, " && !slices.Contains(types, contract.RecordStep):
			merge = true
			others += " AND event_type <> '" + contract.RecordStep + "'" // what the index is made for
		default:
			others += " AND (event_type || '') = ANY(" + wanted + "::text[])"
		}
		if merge {
			columns, values = columns+"event_type, ", values+"wanted.name, "
		}
	}
	where := fmt.Sprintf("(%[1]sseq) > (%[2]s$1) AND (%[1]sseq) <= (%[2]s%[3]s)%[4]s ORDER BY %[1]sseq LIMIT $2", columns, values, cursor, others)
	if merge {
		// Each type is in order by itself; the page is the first of all of them.
		where = fmt.Sprintf(`seq = ANY (ARRAY(SELECT page.seq FROM unnest($%d::text[]) AS wanted (name)
  CROSS JOIN LATERAL (SELECT seq FROM events WHERE %s) AS page ORDER BY page.seq LIMIT $2)) ORDER BY seq LIMIT $2`, len(args), where)
	}
	return `SELECT seq, event_id, tenant, thread_id, run_id, task_id, event_type, category, content::text, metadata::text, created_at FROM events
WHERE ` + where, args
}

// LastSeq implements [eventsink.Store].
func (s *Store) LastSeq(ctx context.Context) (uint64, error) { return number(ctx, s.pool, "cursor") }

// Newest implements [eventsink.Store].
func (s *Store) Newest(ctx context.Context) (seq uint64, eventID string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	var n int64
	err = s.pool.QueryRow(ctx, `SELECT seq, event_id FROM events ORDER BY seq DESC LIMIT 1`).Scan(&n, &eventID)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return 0, "", fmt.Errorf("event store: newest event: %w", explain(err))
	}
	return uint64(n), eventID, nil
}

// Pruned implements [eventsink.Store].
func (s *Store) Pruned(ctx context.Context) (uint64, error) { return number(ctx, s.readers, "pruned") }

func number(ctx context.Context, pool *pgxpool.Pool, column string) (uint64, error) {
	var n int64
	if err := pool.QueryRow(ctx, `SELECT `+column+` FROM sink`).Scan(&n); err != nil {
		return 0, fmt.Errorf("event store: %s: %w", column, explain(err))
	}
	return uint64(n), nil
}

// Mark implements [eventsink.Store].
func (s *Store) Mark(ctx context.Context, at time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	// Several sinks may do so at once; what they note is the same.
	_, err := s.pool.Exec(ctx, `INSERT INTO marks (at, seq) SELECT $1, cursor FROM sink WHERE cursor > coalesce((SELECT max(seq) FROM marks), 0) ON CONFLICT DO NOTHING`, at)
	if err != nil {
		return fmt.Errorf("event store: note the time: %w", explain(err))
	}
	return nil
}

// Prune implements [eventsink.Store].
func (s *Store) Prune(ctx context.Context, before time.Time, limit int) (deleted int, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// Another sink that prunes at the same time is waited for.
		var upTo, last int64
		if err := tx.QueryRow(ctx, `SELECT coalesce((SELECT max(seq) FROM marks WHERE at <= $1), 0) FROM sink FOR NO KEY UPDATE OF sink`, before).Scan(&upTo); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT coalesce(max(seq), 0), count(*) FROM (SELECT seq FROM events WHERE seq <= $1 ORDER BY seq LIMIT $2) AS oldest`, upTo, limit).Scan(&last, &deleted); err != nil {
			return err
		}
		if deleted < limit {
			last = upTo // the marks up to there have served their time
			if _, err := tx.Exec(ctx, `DELETE FROM marks WHERE seq <= $1`, upTo); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, `DELETE FROM events WHERE seq <= $1`, last); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE sink SET pruned = greatest(pruned, $1)`, last)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("event store: delete old events: %w", explain(err))
	}
	return deleted, nil
}

// Check implements [eventsink.Store].
func (s *Store) Check(ctx context.Context) error {
	var readOnly string
	var owner string
	if err := s.pool.QueryRow(ctx, `SELECT current_setting('transaction_read_only'), owner FROM sink`).Scan(&readOnly, &owner); err != nil {
		return fmt.Errorf("event store: %w", explain(err))
	}
	if readOnly == "on" {
		return fmt.Errorf("event store: %s takes no writes now (a standby server, or read-only by its settings); point eventsink.dsn at the primary", s.name())
	}
	if owner != s.owner {
		return fmt.Errorf("event store: %w", eventsink.ErrLost)
	}
	return nil
}

// Close ends the connections. Another process may take over from here.
func (s *Store) Close() error {
	var err error
	if s.held != nil {
		ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
		defer cancel()
		// The server takes a moment to notice that a connection has ended.
		_, _ = s.held.Exec(ctx, `SELECT pg_advisory_unlock($1)`, int64(ownerLock)) // it ends with the connection at the latest
		if e := s.held.Close(ctx); e != nil && !s.held.IsClosed() {
			err = fmt.Errorf("event store: %w", e)
		}
	}
	for _, p := range []*pgxpool.Pool{s.readers, s.pool} {
		if p != nil {
			p.Close()
		}
	}
	return err
}

func raw(b json.RawMessage) string {
	if len(b) == 0 {
		return "null"
	}
	return string(b)
}

// explain marks what will never work and adds a hint where a person can help.
// https://www.postgresql.org/docs/current/errcodes-appendix.html
func explain(err error) error {
	var e *pgconn.PgError
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code[:min(2, len(e.Code))] {
	case "22", "23", "54": // data exception, integrity, limit of the program
		return fmt.Errorf("%w: %w", eventsink.ErrRejected, err)
	case "28":
		return fmt.Errorf("the database refuses the user: check user and password in eventsink.dsn and pg_hba.conf: %w", err)
	case "3D":
		return fmt.Errorf("the database does not exist: create it, or correct eventsink.dsn: %w", err)
	case "42":
		return fmt.Errorf("a table is missing or the user lacks rights on it: grant CREATE and USAGE on the schema: %w", err)
	case "53":
		return fmt.Errorf("the database server is out of room or connections: %w", err)
	case "25":
		return fmt.Errorf("the database takes no writes now: point eventsink.dsn at the primary: %w", err)
	}
	return err
}
