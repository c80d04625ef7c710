package eventsink

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Store keeps events. Package sinktest holds the tests that every store passes.
//
// One goroutine calls Bind, Append and Advance; the others may be called from many
// at the same time. Other processes may write to the same database: several at once if they
// share the work, and one whose time is over finds out by [ErrLost].
type Store interface {
	// Bind ties the store to the stream that its sequences come from. A store
	// that holds nothing yet takes any origin. One that holds events of another
	// origin returns [ErrForeign] and changes nothing.
	Bind(ctx context.Context, origin Origin) error

	// Append stores records, which ascend in sequence, and moves the cursor to
	// upTo, all in one transaction that is durable when Append returns. A record
	// whose event id or sequence is there already changes nothing, and the
	// cursor never moves back; with upTo 0 it stays. It returns how many records
	// are new.
	//
	// An error means that nothing was stored. If it is [ErrRejected], a record
	// is at fault and the same records will always be refused; after any other
	// error the caller tries again.
	Append(ctx context.Context, records []contract.EventRecord, upTo uint64) (int, error)

	// List returns the records that match, in ascending sequence, and whether
	// there are more behind them.
	List(ctx context.Context, q Query) (records []contract.EventRecord, more bool, err error)

	// LastSeq returns the cursor: everything up to it has been processed.
	LastSeq(ctx context.Context) (uint64, error)

	// Newest returns the highest sequence that is stored, also if the cursor has not
	// reached it yet, and the id of that event; 0 if there is none.
	Newest(ctx context.Context) (seq uint64, eventID string, err error)

	// Advance moves the cursor to a later place, for sinks that share the work:
	// none of them knows by itself that everything up to there is stored. from is
	// where the caller saw the cursor last; if it is below that now, the database
	// was exchanged for an older one and the error is [ErrLost].
	Advance(ctx context.Context, from, to uint64) error

	// Mark notes that what the cursor has passed was stored at that time or before.
	Mark(ctx context.Context, at time.Time) error

	// Prune deletes the oldest events, limit at most, of what was stored before
	// that time as far as the marks tell, and returns how many those were. Fewer
	// than limit: there are no more.
	Prune(ctx context.Context, before time.Time, limit int) (int, error)

	// Pruned returns up to where Prune has deleted.
	Pruned(ctx context.Context) (uint64, error)

	// Check reports whether Append could store something now. It changes nothing.
	Check(ctx context.Context) error

	// AgentStore keeps sub-agent definitions in the same database.
	AgentStore

	// Close releases the store. Another process may take over from here.
	Close() error
}

// Origin names a stream and when it was made.
type Origin struct {
	Stream  string
	Created time.Time
}

// Query selects records. Empty fields match anything.
type Query struct {
	Tenant   contract.Tenant
	ThreadID contract.ThreadID
	RunID    contract.RunID
	TaskID   contract.TaskID
	Types    []string
	// AfterSeq is exclusive.
	AfterSeq uint64
	// Limit is the largest number of records; it must be at least 1.
	Limit int
	// MaxBytes ends the page when content and metadata together reach it; 0 is
	// no limit. The first record always comes.
	MaxBytes int
}

// OpenFunc opens a store. It blocks while another process holds the store, and
// calls waiting once before it does. It returns ctx's error when ctx is done.
type OpenFunc func(ctx context.Context, waiting func()) (Store, error)

var (
	// ErrRejected is returned by a store that will never take a record.
	ErrRejected = errors.New("record refused by the store")
	// ErrLost is returned when this process may not write to the database any more:
	// another one does, or the database is not the one that it was.
	ErrLost = errors.New("another event sink has taken over the database")
	// ErrForeign is returned by a store that holds events of another stream.
	ErrForeign = errors.New("the database holds events of another stream")
)

// ForeignError is the error of [Store.Bind]. Where says what to move away.
func ForeignError(where string, last uint64, have, want Origin) error {
	return fmt.Errorf("%w: %s holds events up to %d of stream %s made at %s, but stream %s was made at %s and counts from 1 again; move that database away and restart, then a new one is made",
		ErrForeign, where, last, have.Stream, have.Created.UTC().Format(time.RFC3339Nano), want.Stream, want.Created.UTC().Format(time.RFC3339Nano))
}
