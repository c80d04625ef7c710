package outcome

import (
	"errors"
	"fmt"
	"time"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Errors of [Terminate] and [Progress.Apply].
var (
	// ErrNotTerminal: the end's state is none to end in; a fault of the caller.
	ErrNotTerminal = errors.New("not a terminal state")
	// ErrAlreadyTerminal: the task has ended before; the first end stands whole.
	ErrAlreadyTerminal = errors.New("task has already ended")
)

// Terminate returns rec with its end: state and whole payload in one value, for
// one write. What the record already holds of usage, model and receipts stays
// unless the end carries its own. A record that has ended is returned as it is
// with [ErrAlreadyTerminal]. An error text longer than
// [contract.MaxErrorChars] and a result that is too large for a record are cut.
func Terminate(rec contract.TaskRecord, end End, at time.Time) (contract.TaskRecord, error) {
	if !end.State.Terminal() {
		return rec, fmt.Errorf("end task %s as %q: %w", rec.TaskID, end.State, ErrNotTerminal)
	}
	if rec.State.Terminal() {
		return rec, fmt.Errorf("end task %s as %q: %w as %q", rec.TaskID, end.State, ErrAlreadyTerminal, rec.State)
	}
	at = at.UTC()
	rec.State, rec.FinishedAt = end.State, &at
	rec.Result, rec.ResultTruncated, rec.ResultRef = end.Result, end.ResultTruncated, end.ResultRef
	if len(rec.Result) > contract.MaxInlineResultBytes {
		rec.Result, rec.ResultTruncated = event.CutBytes(rec.Result, contract.MaxInlineResultBytes), true
	}
	rec.Error, _ = event.Truncate(end.Error, contract.MaxErrorChars)
	rec.ReceiptVerdict = end.Verdict
	rec.ErrorCode, rec.StopReason, rec.AdmissionFailure = end.ErrorCode, end.StopReason, end.AdmissionFailure
	return Progress{Usage: end.Usage, ModelName: end.ModelName, Receipts: end.Receipts}.onto(rec), nil
}

// Progress is what becomes known while a task runs. Empty fields say nothing.
type Progress struct {
	// Usage is the sum so far: it replaces the one before.
	Usage     *contract.Usage
	ModelName string
	Receipts  []contract.Receipt
}

// Apply returns rec with the progress on it. Nothing is published into a record
// that has ended: that is [ErrAlreadyTerminal].
func (p Progress) Apply(rec contract.TaskRecord) (contract.TaskRecord, error) {
	if rec.State.Terminal() {
		return rec, fmt.Errorf("progress of task %s: %w as %q", rec.TaskID, ErrAlreadyTerminal, rec.State)
	}
	return p.onto(rec), nil
}

func (p Progress) onto(rec contract.TaskRecord) contract.TaskRecord {
	if p.Usage != nil {
		u := *p.Usage
		rec.Usage = &u
	}
	if p.ModelName != "" {
		rec.ModelName = p.ModelName
	}
	if p.Receipts != nil {
		rec.Receipts = append([]contract.Receipt(nil), p.Receipts...)
	}
	return rec
}
