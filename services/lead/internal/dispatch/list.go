package dispatch

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// listBudget bounds one scan of records and requests.
const listBudget = 10 * time.Second

// ListQuery selects tasks of one tenant. Empty fields match anything.
type ListQuery struct {
	Tenant contract.Tenant
	RunID  contract.RunID
	Status contract.TaskStatus
	// Limit is the size of the page, 1 to wire.MaxPage; 0 takes wire.DefaultPage.
	Limit int
	// Cursor is NextCursor of the page before, or empty for the first page.
	Cursor string
}

func (q ListQuery) matches(t wire.Task) bool {
	return (q.RunID == "" || t.RunID == q.RunID) && (q.Status == "" || t.Status == q.Status)
}

// Page is a page of tasks, newest first. Results are cut.
type Page = wire.TaskPage

// List returns a page of tasks in the order in which they were submitted,
// newest first. The order is that of the queue's sequence, which a task keeps
// for life, so that paging neither repeats nor skips a task that changes its
// state meanwhile.
//
// It reads through all records; memory is bounded by the page and by the
// length of the queue. ErrInvalid for a cursor or limit that cannot be.
func (d *Dispatcher) List(ctx context.Context, q ListQuery) (Page, error) {
	if q.Limit == 0 {
		q.Limit = wire.DefaultPage
	}
	if q.Limit < 1 || q.Limit > wire.MaxPage {
		return Page{}, fmt.Errorf("%w: limit is %d; want 1 to %d", ErrInvalid, q.Limit, wire.MaxPage)
	}
	before := ^uint64(0)
	if q.Cursor != "" {
		n, err := strconv.ParseUint(q.Cursor, 36, 64)
		if err != nil || n == 0 {
			return Page{}, fmt.Errorf("%w: cursor is none of ours", ErrInvalid)
		}
		before = n
	}
	if err := q.Tenant.Validate(); err != nil {
		return Page{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, listBudget)
	defer cancel()

	// Requests first: whatever leaves the queue after that has a record.
	waiting := map[contract.TaskID]uint64{}
	err := d.requests(ctx, q, func(req contract.TaskRequest, seq uint64) {
		if (q.RunID == "" || req.RunID == q.RunID) && seq < before {
			waiting[req.TaskID] = seq
		}
	})
	if err != nil {
		return Page{}, fmt.Errorf("list tasks: %w", unavailable(err))
	}
	newest := &newestFirst{keep: q.Limit + 1}
	err = d.records(ctx, func(rec contract.TaskRecord) {
		if rec.Tenant != q.Tenant {
			return
		}
		delete(waiting, rec.TaskID)
		if v := d.taskOf(rec); rec.RequestSeq < before && q.matches(v) {
			newest.offer(entry{seq: rec.RequestSeq, view: &v, id: rec.TaskID})
		}
	})
	if err != nil {
		return Page{}, fmt.Errorf("list tasks: %w", unavailable(err))
	}
	if q.Status == "" || q.Status == contract.TaskQueued {
		for id, seq := range waiting {
			newest.offer(entry{seq: seq, id: id})
		}
	}
	return d.page(ctx, q, newest.sorted())
}

// page fills in the tasks that still waited during the scan and cuts to size.
func (d *Dispatcher) page(ctx context.Context, q ListQuery, entries []entry) (Page, error) {
	page := Page{Tasks: []wire.Task{}}
	if len(entries) > q.Limit {
		entries = entries[:q.Limit]
		page.NextCursor = strconv.FormatUint(entries[q.Limit-1].seq, 36)
	}
	for _, e := range entries {
		if e.view == nil {
			f, err := d.find(ctx, q.Tenant, e.id)
			if errors.Is(err, ErrNotFound) {
				continue
			}
			if err != nil {
				return Page{}, fmt.Errorf("list tasks: %w", err)
			}
			v := d.view(f)
			if !q.matches(v) {
				continue
			}
			e.view = &v
		}
		if r := e.view.Result; r != nil {
			short := cut(*r, listPreviewChars)
			e.view.ResultTruncated = e.view.ResultTruncated || len(short) < len(*r)
			e.view.Result = &short
		}
		e.view.Receipts = nil
		page.Tasks = append(page.Tasks, *e.view)
	}
	return page, nil
}

// requests reads the tenant's requests in the queue.
func (d *Dispatcher) requests(ctx context.Context, q ListQuery, each func(contract.TaskRequest, uint64)) error {
	cons, err := d.c.JS.OrderedConsumer(ctx, d.c.Names.WorkStream(), jetstream.OrderedConsumerConfig{
		FilterSubjects:    []string{d.c.Names.TaskRequest(q.Tenant, "*")},
		DeliverPolicy:     jetstream.DeliverAllPolicy,
		InactiveThreshold: 30 * time.Second,
	})
	if err != nil {
		return fmt.Errorf("queue: %w", err)
	}
	// The consumer removes itself when it is idle, but a list should not leave
	// one behind for half a minute.
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = d.c.JS.DeleteConsumer(ctx, d.c.Names.WorkStream(), cons.CachedInfo().Name)
	}()
	left := cons.CachedInfo().NumPending
	if left == 0 {
		return nil
	}
	// A bound in bytes alone would have the library make room for a million messages.
	it, err := cons.Messages(jetstream.PullMaxMessagesWithBytesLimit(64, 4<<20))
	if err != nil {
		return fmt.Errorf("queue: %w", err)
	}
	defer it.Stop()
	for left > 0 {
		msg, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			return fmt.Errorf("queue: %w", err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("queue: %w", err)
		}
		left = meta.NumPending
		req, err := contract.DecodeTaskRequest(msg.Data())
		if err != nil {
			d.log.Warn().Err(err).Uint64("seq", meta.Sequence.Stream).Msg("a request in the queue cannot be read")
			continue
		}
		each(req, meta.Sequence.Stream)
	}
	return nil
}

// records reads all records.
func (d *Dispatcher) records(ctx context.Context, each func(contract.TaskRecord)) error {
	kv, err := d.c.JS.KeyValue(ctx, d.c.Names.TaskBucket())
	if err != nil {
		return fmt.Errorf("records: %w", err)
	}
	w, err := kv.Watch(ctx, contract.TaskKey("*"), jetstream.IgnoreDeletes())
	if err != nil {
		return fmt.Errorf("records: %w", err)
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("records: reading all of them took longer than %s: %w", listBudget, ctx.Err())
		case e, ok := <-w.Updates():
			if !ok {
				return fmt.Errorf("records: %w: the watch ended early", ErrUnavailable)
			}
			if e == nil { // all current ones have been read
				return nil
			}
			rec, err := contract.DecodeTaskRecord(e.Value())
			if err != nil {
				d.log.Warn().Err(err).Str("key", e.Key()).Msg("a record cannot be read")
				continue
			}
			each(rec)
		}
	}
}

type entry struct {
	seq  uint64
	id   contract.TaskID
	view *wire.Task // nil while it waits
}

// newestFirst keeps the entries with the highest sequences: a heap whose top is
// the oldest one kept.
type newestFirst struct {
	keep  int
	items []entry
}

func (h *newestFirst) offer(e entry) {
	if len(h.items) == h.keep {
		if e.seq <= h.items[0].seq {
			return
		}
		heap.Pop(h)
	}
	heap.Push(h, e)
}

// sorted empties the heap, newest first.
func (h *newestFirst) sorted() []entry {
	out := make([]entry, len(h.items))
	for i := len(out) - 1; i >= 0; i-- {
		out[i] = heap.Pop(h).(entry)
	}
	return out
}

func (h *newestFirst) Len() int           { return len(h.items) }
func (h *newestFirst) Less(i, j int) bool { return h.items[i].seq < h.items[j].seq }
func (h *newestFirst) Swap(i, j int)      { h.items[i], h.items[j] = h.items[j], h.items[i] }
func (h *newestFirst) Push(x any)         { h.items = append(h.items, x.(entry)) }
func (h *newestFirst) Pop() any {
	last := h.items[len(h.items)-1]
	h.items = h.items[:len(h.items)-1]
	return last
}
