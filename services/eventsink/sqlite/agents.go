package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/herdgate/herdgate/services/eventsink"
)

const agentsRevision = "agents_revision"

var errNoRevision = errors.New("agents_revision is missing in the table meta; restore it with a value above all revisions in agents")

// Agents implements [eventsink.AgentStore]. One statement, so that all is of one
// revision.
func (s *Store) Agents(ctx context.Context, q eventsink.AgentQuery) (eventsink.AgentList, error) {
	if q.Limit < 1 {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: limit is %d; want at least 1", q.Limit)
	}
	where, arg := "a.name > ?1", q.AfterName
	if q.Name != "" {
		where, arg = "a.name = ?1", q.Name
	}
	rows, err := s.reader.QueryContext(ctx, `SELECT now.revision, a.name, a.revision, a.body
FROM (SELECT CAST(value AS INTEGER) AS revision FROM meta WHERE key = '`+agentsRevision+`') AS now LEFT JOIN agents AS a ON `+where+`
ORDER BY a.name LIMIT ?2`, arg, int64(q.Limit)+1)
	if err != nil {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
	}
	defer rows.Close()
	var list eventsink.AgentList
	for size := 0; rows.Next(); {
		var store int64
		var name, body sql.NullString
		var revision sql.NullInt64
		if err := rows.Scan(&store, &name, &revision, &body); err != nil {
			return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
		}
		if list.Revision = uint64(store); !name.Valid {
			break // there are none
		}
		if size += len(body.String); list.Full(q, size) {
			break
		}
		list.Add(name.String, uint64(revision.Int64), body.String)
	}
	if err := rows.Err(); err != nil {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
	}
	if list.Revision == 0 {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", errNoRevision)
	}
	return list, nil
}

// PutAgent implements [eventsink.AgentStore].
func (s *Store) PutAgent(ctx context.Context, name string, body []byte, expect uint64) (uint64, error) {
	at := time.Now().UTC().Format(timeFormat)
	return s.changeAgents(ctx, name, func(next int64) (string, []any) {
		if expect == 0 {
			return `INSERT INTO agents (name, revision, body, updated_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`, []any{name, next, string(body), at}
		}
		return `UPDATE agents SET revision = ?, body = ?, updated_at = ? WHERE name = ? AND revision = ?`, []any{next, string(body), at, name, signed(expect)}
	})
}

// DeleteAgent implements [eventsink.AgentStore].
func (s *Store) DeleteAgent(ctx context.Context, name string, expect uint64) (uint64, error) {
	return s.changeAgents(ctx, name, func(int64) (string, []any) {
		return `DELETE FROM agents WHERE name = ? AND revision = ?`, []any{name, signed(expect)}
	})
}

// changeAgents changes one row by a statement that does nothing if the row is not as
// expected, and raises the store's revision in the same transaction.
func (s *Store) changeAgents(ctx context.Context, name string, statement func(next int64) (string, []any)) (uint64, error) {
	var next uint64
	err := s.update(ctx, func(tx *sql.Tx) error {
		now, err := counter(ctx, tx, agentsRevision)
		if err != nil {
			return err
		}
		if now == 0 {
			return errNoRevision
		}
		next = now + 1
		query, args := statement(signed(next))
		res, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, eventsink.ErrStale)
		}
		return raise(ctx, tx, agentsRevision, next)
	})
	if err != nil {
		return 0, fmt.Errorf("sub-agent definition %s: %w", name, err)
	}
	return next, nil
}

// signed is a revision as the database has it. What is larger belongs to no row.
func signed(revision uint64) int64 { return int64(min(revision, math.MaxInt64)) }
