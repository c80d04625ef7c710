package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

// errDone ends a scan that has seen everything.
var errDone = errors.New("done")

// List implements [runapi.Engine]. Run ids sort by their time, so that the
// cursor is the last id of a page. It reads the headers of all runs once and the
// records of the page alone.
func (e *Engine) List(ctx context.Context, q runapi.RunQuery) (runapi.RunPage, error) {
	if q.Limit == 0 {
		q.Limit = runapi.DefaultPage
	}
	if q.Limit < 1 || q.Limit > runapi.MaxPage {
		return runapi.RunPage{}, fmt.Errorf("list runs: %w: limit is %d; want 1 to %d", leaderr.ErrInvalid, q.Limit, runapi.MaxPage)
	}
	if q.Cursor != "" && contract.RunID(q.Cursor).Validate() != nil {
		return runapi.RunPage{}, fmt.Errorf("list runs: %w: cursor is not one of ours", leaderr.ErrInvalid)
	}
	ids, err := e.scan(ctx, q)
	if err != nil {
		return runapi.RunPage{}, fmt.Errorf("list runs: %w", outside(err))
	}
	var page runapi.RunPage
	for _, id := range ids {
		if len(page.Runs) == q.Limit {
			page.NextCursor = string(page.Runs[q.Limit-1].RunID)
			break
		}
		rec, _, err := e.read(ctx, id)
		switch {
		case errors.Is(err, leaderr.ErrNotFound):
			continue // its time was over meanwhile
		case err != nil:
			return runapi.RunPage{}, fmt.Errorf("list runs: %w", outside(err))
		}
		// What has changed since the scan is shown as it is now.
		if rec.Tenant != q.Tenant || q.ThreadID != "" && rec.ThreadID != q.ThreadID {
			continue
		}
		rec.Messages = nil
		page.Runs = append(page.Runs, rec)
	}
	return page, nil
}

// scan returns the ids of matching runs below the cursor, the newest first; a
// few more than a page holds, so that the last page is known as such.
func (e *Engine) scan(ctx context.Context, q runapi.RunQuery) ([]contract.RunID, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*bus.WriteTimeout)
	defer cancel()
	keep := q.Limit + 16
	front := e.c.RunKV(contract.RunKey(""))
	var ids []contract.RunID
	newest := func(a, b contract.RunID) int { return strings.Compare(string(b), string(a)) }
	err := e.c.Watch(ctx, bus.Watch{
		Stream: e.c.RunStream(), Subjects: []string{front + "*"}, LastPerSubject: true, HeadersOnly: true,
		OnStart: func(pending uint64) {
			if pending == 0 {
				cancel() // there is nothing
			}
		},
	}, func(m bus.Message, pending uint64) error {
		id := contract.RunID(strings.TrimPrefix(m.Subject, front))
		if matches(q, id, m) {
			if ids = append(ids, id); len(ids) > 4*keep {
				slices.SortFunc(ids, newest)
				ids = ids[:keep]
			}
		}
		if pending == 0 {
			return errDone
		}
		return nil
	})
	switch {
	case errors.Is(err, errDone), err == nil && errors.Is(ctx.Err(), context.Canceled):
	case err != nil:
		return nil, err
	default:
		return nil, fmt.Errorf("%w: the runs could not be read in time", leaderr.ErrUnavailable)
	}
	slices.SortFunc(ids, newest)
	return slices.Compact(ids), nil
}

func matches(q runapi.RunQuery, id contract.RunID, m bus.Message) bool {
	switch {
	case m.Deleted(), q.Cursor != "" && string(id) >= q.Cursor:
		return false
	case m.Header.Get(headerTenant) != string(q.Tenant):
		return false
	case q.Status != "" && m.Header.Get(headerStatus) != string(q.Status):
		return false
	}
	return q.ThreadID == "" || m.Header.Get(headerThread) == q.ThreadID.Token()
}
