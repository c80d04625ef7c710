// Package runapi is what the HTTP layer and the run engine say to each other.
package runapi

import (
	"context"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Limits on a run's input from outside.
const (
	// MaxInputBytes bounds the input of a run.
	MaxInputBytes = contract.MaxPromptBytes
	// MaxMetadata bounds the entries of a run's metadata, MaxTags its tags.
	MaxMetadata = 32
	MaxTags     = 32
	// MaxPage is the most runs that one page may hold, DefaultPage what it holds
	// when the query names no limit.
	MaxPage     = 200
	DefaultPage = 50
)

// RunInput asks for a run. A nil pointer takes the configured default.
type RunInput struct {
	Tenant contract.Tenant
	UserID string
	// UserRole is the role of the user, for the identity of tasks; may be empty.
	UserRole string
	// Attributes are the user's, for rules of authorisation.
	Attributes map[string]string
	Input      string
	// ThreadID may be empty; the engine then makes a new thread.
	ThreadID contract.ThreadID
	// Model is the name of a configured model, or empty.
	Model                  string
	MaxConcurrentSubagents *int
	MaxTotalSubagents      *int
	SubagentEnabled        *bool
	// AllowedSubagents: nil allows all, an empty list none.
	AllowedSubagents []string
	// AvailableSkills: nil allows all that are enabled, an empty list none.
	AvailableSkills []string
	Metadata        map[string]string
	Tags            []string
}

// RunQuery selects runs of one tenant. Empty fields match anything.
type RunQuery struct {
	Tenant   contract.Tenant
	ThreadID contract.ThreadID
	Status   contract.RunStatus
	// Limit is the size of the page, 1 to [MaxPage].
	Limit int
	// Cursor is NextCursor of the page before, or empty for the first page.
	Cursor string
}

// RunPage is a page of runs, newest first.
type RunPage struct {
	Runs []contract.RunRecord
	// NextCursor is empty on the last page.
	NextCursor string
}

// Engine drives runs. Its errors are those of package leaderr, wrapped;
// everything else counts as a fault of ours.
type Engine interface {
	// Start stores a new run and begins to drive it. The trace context in ctx is
	// the parent of the run; the run goes on after ctx is done. ErrInvalid for
	// an unknown model or sub-agent.
	Start(ctx context.Context, in RunInput) (contract.RunRecord, error)
	// Get returns the run's record. ErrNotFound also for another tenant's run.
	Get(ctx context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error)
	// List returns a page of runs. ErrInvalid for a cursor that is not ours.
	List(ctx context.Context, q RunQuery) (RunPage, error)
	// Cancel asks for the run's and its tasks' end and returns once the wish is
	// durable. A *leaderr.FinishedError when the run has ended.
	Cancel(ctx context.Context, tenant contract.Tenant, id contract.RunID) error
	// Wait returns the run's record once it has ended.
	Wait(ctx context.Context, tenant contract.Tenant, id contract.RunID) (contract.RunRecord, error)
}
