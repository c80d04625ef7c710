// Package delegation holds the rules by which a lead hands out work: how many
// delegations one answer and one run may make, which calls of an answer
// survive, and what the lead's model and program are told about the end of one.
// Everything in it is pure.
package delegation

import "fmt"

// The range and defaults of the limits.
const (
	// DefaultMaxRunning is the capacity when the gate has not published one.
	DefaultMaxRunning = 3
	// MaxPerResponse is the most delegations that one answer may ever make.
	MaxPerResponse = 64
	// DefaultMaxTotal, MinTotal and MaxTotalLimit are the delegations of one run.
	DefaultMaxTotal = 6
	MinTotal        = 1
	MaxTotalLimit   = 50
)

// Clamp returns how many delegations one answer may make: what was requested,
// but at most what the gate enforces since its start, at most [MaxPerResponse]
// and at least 1. No request takes the capacity; an unknown capacity is
// [DefaultMaxRunning]. Resolve it once per run and use the one number for the
// prompt and for [Trim].
func Clamp(requested, frozen *int) int {
	capacity := DefaultMaxRunning
	if frozen != nil {
		capacity = *frozen
	}
	capacity = min(max(capacity, 1), MaxPerResponse)
	if requested == nil {
		return capacity
	}
	return min(max(*requested, 1), capacity)
}

// MaxTotal returns how many delegations one run may make: the override of the
// request, clamped into the range, else the configured number, else
// [DefaultMaxTotal].
func MaxTotal(configured, override *int) int {
	total := DefaultMaxTotal
	switch {
	case override != nil:
		total = *override
	case configured != nil:
		total = *configured
	}
	return min(max(total, MinTotal), MaxTotalLimit)
}

// CheckMaxTotal refuses a configured number outside of the range. Only numbers
// of a request are clamped: a file can be mended.
func CheckMaxTotal(n int) error {
	if n < MinTotal || n > MaxTotalLimit {
		return fmt.Errorf("max_total_per_run is %d; want %d to %d", n, MinTotal, MaxTotalLimit)
	}
	return nil
}

// Entry is what the count needs of a delegation in the ledger.
type Entry struct {
	ID    string
	RunID string // empty: not known
}

// Used counts the delegations of a run: distinct ids with its run id, however
// they ended. Entries of other runs, without a run id and without an id do not
// count. If the run id is not known, every entry of the thread counts and
// unknownRun tells the caller to warn: too few is safer than without end.
func Used(ledger []Entry, runID string) (n int, unknownRun bool) {
	ids := map[string]struct{}{}
	for _, e := range ledger {
		if e.ID != "" && (runID == "" || e.RunID == runID) {
			ids[e.ID] = struct{}{}
		}
	}
	return len(ids), runID == ""
}

// Remaining is what a run may still delegate, never below 0.
func Remaining(total int, ledger []Entry, runID string) int {
	used, _ := Used(ledger, runID)
	return max(0, total-used)
}
