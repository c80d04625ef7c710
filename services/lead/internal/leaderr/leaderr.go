// Package leaderr holds the errors that all parts of the lead share, so that
// the HTTP layer can tell them apart without importing the parts.
package leaderr

import (
	"errors"
	"fmt"

	"github.com/herdgate/herdgate/pkg/contract"
)

var (
	// ErrNotFound is returned for what does not exist, and for what belongs to
	// another tenant: nobody learns that it exists.
	ErrNotFound = errors.New("not found")
	// ErrUnavailable is returned when NATS, the gate or the event store cannot
	// be reached at the moment. Trying again later may work.
	ErrUnavailable = errors.New("unavailable")
	// ErrInvalid is returned for requests that will never work as they are.
	ErrInvalid = errors.New("invalid request")
	// ErrQueueFull is returned when the bounded queue has no room. Trying again
	// later may work; nothing was stored.
	ErrQueueFull = errors.New("queue is full")
)

// FinishedError is returned when something that has ended already should be
// stopped. Use errors.As with a *FinishedError.
type FinishedError struct {
	// What names the thing: "task t_…" or "run r_…".
	What string
	// Status is the status that it ended with: a [contract.TaskStatus] or a
	// [contract.RunStatus].
	Status string
}

// Error says what has ended and how.
func (e *FinishedError) Error() string {
	return fmt.Sprintf("%s has already finished: %s", e.What, e.Status)
}

// TaskFinished returns the error for a task that ended with status.
func TaskFinished(id contract.TaskID, status contract.TaskStatus) error {
	return &FinishedError{What: "task " + string(id), Status: string(status)}
}

// RunFinished returns the error for a run that ended with status.
func RunFinished(id contract.RunID, status contract.RunStatus) error {
	return &FinishedError{What: "run " + string(id), Status: string(status)}
}
