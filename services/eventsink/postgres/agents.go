package postgres

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/herdgate/herdgate/services/eventsink"
)

// Agents implements [eventsink.AgentStore]. One statement, so that all is of one
// revision.
func (s *Store) Agents(ctx context.Context, q eventsink.AgentQuery) (eventsink.AgentList, error) {
	if q.Limit < 1 {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: limit is %d; want at least 1", q.Limit)
	}
	where, arg := "a.name > $1", q.AfterName
	if q.Name != "" {
		where, arg = "a.name = $1", q.Name
	}
	rows, err := s.readers.Query(ctx, `SELECT now.revision, a.name, a.revision, a.body::text FROM agents_revision AS now LEFT JOIN agents AS a ON `+where+` ORDER BY a.name LIMIT $2`, arg, int64(q.Limit)+1)
	if err != nil {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
	}
	defer rows.Close()
	var list eventsink.AgentList
	for size := 0; rows.Next(); {
		var store int64
		var name, body *string
		var revision *int64
		if err := rows.Scan(&store, &name, &revision, &body); err != nil {
			return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
		}
		if list.Revision = uint64(store); name == nil {
			break // there are none
		}
		if size += len(*body); list.Full(q, size) {
			break
		}
		list.Add(*name, uint64(*revision), *body)
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return eventsink.AgentList{}, fmt.Errorf("sub-agent definitions: %w", explain(err))
	}
	if list.Revision == 0 {
		return eventsink.AgentList{}, errors.New("sub-agent definitions: the row of agents_revision is missing; restore it with a revision above all in agents")
	}
	return list, nil
}

// Each of these is one statement, and so one transaction. All take the row of the
// revision first: whoever comes second finds what the first one has made of the
// definition, does nothing, and gives no row.
const (
	insertAgent = `WITH next AS (UPDATE agents_revision SET revision = revision + 1 RETURNING revision)
INSERT INTO agents (name, revision, body, updated_at) SELECT $1, revision, $2::json, now() FROM next ON CONFLICT DO NOTHING RETURNING revision`
	updateAgent = `WITH next AS (UPDATE agents_revision SET revision = revision + 1 RETURNING revision)
UPDATE agents SET revision = next.revision, body = $2::json, updated_at = now() FROM next WHERE agents.name = $1 AND agents.revision = $3 RETURNING agents.revision`
	deleteAgent = `WITH next AS (UPDATE agents_revision SET revision = revision + 1 RETURNING revision)
DELETE FROM agents USING next WHERE agents.name = $1 AND agents.revision = $2 RETURNING next.revision`
)

// PutAgent implements [eventsink.AgentStore].
func (s *Store) PutAgent(ctx context.Context, name string, body []byte, expect uint64) (uint64, error) {
	if expect == 0 {
		return s.changeAgents(ctx, insertAgent, name, expect, name, string(body))
	}
	return s.changeAgents(ctx, updateAgent, name, expect, name, string(body), int64(min(expect, math.MaxInt64)))
}

// DeleteAgent implements [eventsink.AgentStore].
func (s *Store) DeleteAgent(ctx context.Context, name string, expect uint64) (uint64, error) {
	return s.changeAgents(ctx, deleteAgent, name, expect, name, int64(min(expect, math.MaxInt64)))
}

func (s *Store) changeAgents(ctx context.Context, statement, name string, expect uint64, args ...any) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	var revision int64
	err := s.pool.QueryRow(ctx, statement, args...).Scan(&revision)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, fmt.Errorf("sub-agent definition %s: %w", name, eventsink.ErrStale)
	case err != nil:
		return 0, fmt.Errorf("sub-agent definition %s: %w", name, explain(err))
	}
	return uint64(revision), nil
}
