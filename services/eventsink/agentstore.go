package eventsink

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/herdgate/herdgate/internal/agentapi"
)

// AgentStore keeps the sub-agent definitions that administrators made. The store has a
// revision, which is never 0, grows with every change, deletions included, and is never
// seen before a lower one; a definition has that of its last change. Every process may
// change it at the same time, also one that does not store events.
type AgentStore interface {
	// Agents returns definitions in the order of the bytes of their names, all of one
	// revision of the store.
	Agents(ctx context.Context, q AgentQuery) (AgentList, error)

	// PutAgent stores a definition in the place of the revision that is expected; 0:
	// there must be none of that name. It returns the new revision. [ErrStale]: what
	// was expected is not there, and nothing has changed. After any other error it may
	// have.
	PutAgent(ctx context.Context, name string, body []byte, expect uint64) (uint64, error)

	// DeleteAgent removes the revision that is expected and returns the store's
	// revision after it. Errors are as with PutAgent.
	DeleteAgent(ctx context.Context, name string, expect uint64) (uint64, error)
}

// ErrStale is returned for a change to a definition that is not as expected.
var ErrStale = errors.New("the expected revision is not the last")

// AgentQuery selects definitions.
type AgentQuery struct {
	// Name selects this one alone.
	Name string
	// AfterName is exclusive.
	AfterName string
	// Limit is the largest number of definitions; it must be at least 1.
	Limit int
	// MaxBytes ends the page when their bodies together reach it; 0 is no limit. The
	// first one always comes.
	MaxBytes int
}

// AgentList is a page of definitions.
type AgentList struct {
	Agents []agentapi.Agent
	// Revision is that of the store.
	Revision uint64
	More     bool
}

// Full reports whether the next definition, with which all have size bytes, belongs to
// another page, and notes that there is one.
func (l *AgentList) Full(q AgentQuery, size int) bool {
	l.More = len(l.Agents) == q.Limit || q.MaxBytes > 0 && size > q.MaxBytes && len(l.Agents) > 0
	return l.More
}

// Add adds a definition.
func (l *AgentList) Add(name string, revision uint64, body string) {
	l.Agents = append(l.Agents, agentapi.Agent{Name: name, Revision: revision, Definition: json.RawMessage(body)})
}
