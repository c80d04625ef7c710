package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// body is a request as it lies in the stream.
type body struct {
	seq     uint64
	tenant  contract.Tenant
	id      contract.TaskID
	req     contract.TaskRequest
	invalid error // why req cannot be used
	queued  time.Time
	parent  string
	state   string
	size    int
	telling tellings
}

// fill completes a record with what the request says.
func (b body) fill(rec contract.TaskRecord) contract.TaskRecord {
	rec.TaskID, rec.Tenant, rec.RequestSeq, rec.QueuedAt = b.id, b.tenant, b.seq, b.queued.UTC()
	rec.TraceParent, rec.TraceState = b.parent, b.state
	if b.invalid != nil && !errors.Is(b.invalid, contract.ErrNotPermitted) {
		// What cannot be read has no run; its events need one all the same.
		rec.RunID, rec.ThreadID, rec.SubagentType = "unknown", "unknown", "unknown"
		return rec
	}
	rec.RunID, rec.ThreadID, rec.Pool = b.req.RunID, b.req.ThreadID, b.req.Pool
	rec.SubagentType, rec.Description = b.req.Subagent.Name, b.req.Description
	rec.TimeoutSeconds = b.req.Subagent.TimeoutSeconds
	return rec
}

// readBody decodes a message of the request stream. The error is for a subject
// that is none of ours; a body that cannot be used is told in the body.
func readBody(names contract.Names, pools []contract.Pool, m bus.Message) (body, error) {
	tenant, id, err := names.ParseTaskRequest(m.Subject)
	if err != nil {
		return body{}, err
	}
	b := body{seq: m.Seq, tenant: tenant, id: id, queued: m.Time, size: len(m.Data)}
	if p := envelope.Carrier(m.Header).Get(envelope.HeaderTraceParent); envelope.ValidTraceParent(p) {
		b.parent = p
		if st := envelope.Carrier(m.Header).Get(envelope.HeaderTraceState); envelope.ValidTraceState(st) {
			b.state = st
		}
	}
	b.req, b.invalid = contract.DecodeTaskRequest(m.Data)
	if b.invalid == nil && (b.req.TaskID != id || b.req.Tenant != tenant) {
		b.invalid = fmt.Errorf("%w: task request: tenant %q and task %q of the body differ from the subject's %q and %q",
			contract.ErrInvalidMessage, b.req.Tenant, b.req.TaskID, tenant, id)
	}
	if b.invalid == nil {
		b.invalid = b.grantable(pools)
	}
	if b.invalid == nil {
		b.invalid = b.req.CheckPolicy() // REG-14
	}
	return b, nil
}

// grantable says why a valid request could never be run: its grant would reach
// nobody and hold a slot for ever.
func (b body) grantable(pools []contract.Pool) error {
	if p := b.req.Pool; p != "" && !slices.Contains(pools, p) {
		return fmt.Errorf("%w: task request: pool is %q; this gate has %q", contract.ErrInvalidMessage, p, pools)
	}
	// A grant holds what was read, written anew: text that came in another
	// encoding may grow, up to six times, and parts of it stand in the record as well.
	// What is far too small for that is not written only to be measured: a take-over
	// comes here for every task that waits.
	if b.size < (contract.MaxGrantBytes-frameRoom)/16 {
		return nil
	}
	data, err := json.Marshal(contract.Grant{TaskID: b.id, Record: b.fill(contract.TaskRecord{}), Request: b.req})
	if err != nil {
		return fmt.Errorf("%w: task request: %w", contract.ErrInvalidMessage, err)
	}
	if limit := contract.MaxGrantBytes - frameRoom; len(data) > limit {
		return fmt.Errorf("%w: task request: its grant would have %d bytes; want at most %d", contract.ErrInvalidMessage, len(data), limit)
	}
	return nil
}

// frameRoom is what a grant needs besides the request's own fields: numbers,
// times and the name of the writer.
const frameRoom = 2 << 10

// bodies reads requests by sequence and keeps the newest in memory, bounded:
// what waits long is read again when its turn comes.
type bodies struct {
	bus   *bus.Conn
	pools []contract.Pool // that the gate has
	limit int             // bytes
	probe func(step string, id contract.TaskID)

	mu    sync.Mutex
	bySeq map[uint64]body
	order []uint64
	bytes int
}

func newBodies(c *bus.Conn, pools []contract.Pool) *bodies {
	return &bodies{bus: c, pools: pools, limit: 8 << 20, bySeq: map[uint64]body{}}
}

func (b *bodies) put(v body) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, there := b.bySeq[v.seq]; there {
		return
	}
	b.bySeq[v.seq] = v
	b.order = append(b.order, v.seq)
	b.bytes += v.size
	for b.bytes > b.limit && len(b.order) > 1 {
		b.drop(b.order[0])
		b.order = b.order[1:]
	}
}

func (b *bodies) drop(seq uint64) {
	if v, there := b.bySeq[seq]; there {
		b.bytes -= v.size
		delete(b.bySeq, seq)
	}
}

// forget drops a request that has left the stream.
func (b *bodies) forget(seq uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(seq)
	if len(b.order) > 0 && b.order[0] == seq {
		b.order = b.order[1:]
	}
	if len(b.order) > 2*len(b.bySeq)+1024 {
		kept := b.order[:0]
		for _, s := range b.order {
			if _, there := b.bySeq[s]; there {
				kept = append(kept, s)
			}
		}
		b.order = kept
	}
}

func (b *bodies) get(ctx context.Context, seq uint64) (body, error) {
	b.mu.Lock()
	v, there := b.bySeq[seq]
	b.mu.Unlock()
	if there {
		return v, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	m, err := b.bus.Get(ctx, b.bus.Names.WorkStream(), seq)
	if err != nil {
		return body{}, err
	}
	return b.read(m)
}

// tellings is who has told that a request is queued. What has left the memory has
// been told by nobody: to tell it again is refused by the stream.
type tellings struct {
	told    bool          // the event is stored
	granted bool          // its grant is being told, and that it is queued with it
	pending chan struct{} // closed when a worker that is at it has done
}

// beginTelling reports whether a worker is to tell that a request is queued, and
// what to call afterwards with whether the event is stored.
func (b *bodies) beginTelling(seq uint64) (end func(stored bool), ok bool) {
	done := make(chan struct{})
	if !b.note(seq, func(t *tellings) bool {
		if t.told || t.granted || t.pending != nil {
			return false
		}
		t.pending = done
		return true
	}) {
		return nil, false
	}
	return func(stored bool) {
		b.note(seq, func(t *tellings) bool {
			t.told, t.pending = t.told || stored, nil
			return true
		})
		close(done)
	}, true
}

// grantTells reports whether a grant is to tell that its request was queued; from
// then on nobody else does. It waits for a worker that is at it.
func (b *bodies) grantTells(ctx context.Context, seq uint64) (tells bool, err error) {
	for {
		var pending chan struct{}
		tells := b.note(seq, func(t *tellings) bool {
			pending, t.granted = t.pending, t.pending == nil
			return !t.told
		})
		if pending == nil {
			return tells, nil
		}
		select {
		case <-pending:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// note looks at the tellings of a request and changes them; true when it is not in
// memory.
func (b *bodies) note(seq uint64, change func(*tellings) bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	v, there := b.bySeq[seq]
	if !there {
		return true
	}
	defer func() { b.bySeq[seq] = v }()
	return change(&v.telling)
}
