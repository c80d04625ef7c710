package dispatch

import (
	"context"
	"errors"
	"fmt"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ErrDamaged is returned when a stored result is not the one that its record
// speaks of.
var ErrDamaged = bus.ErrBlob

// Result returns a task's whole result: the record's own, or the blob that it
// refers to, whose size and digest must match. ErrNotFound when the blob is
// gone, ErrDamaged when it is another one, ErrUnavailable when it cannot be
// read at the moment.
func (d *Dispatcher) Result(ctx context.Context, rec contract.TaskRecord) (string, error) {
	if rec.ResultRef == nil {
		return rec.Result, nil
	}
	whole, err := d.c.GetBlob(ctx, *rec.ResultRef)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return "", fmt.Errorf("result of task %s: %w: %w", rec.TaskID, ErrNotFound, err)
	case err != nil:
		return "", fmt.Errorf("result of task %s: %w", rec.TaskID, unavailable(err))
	}
	return string(whole), nil
}
