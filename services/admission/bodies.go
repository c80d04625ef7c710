package admission

import (
	"context"
	"encoding/json"
	"fmt"
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
}

// fill completes a record with what the request says.
func (b body) fill(rec contract.TaskRecord) contract.TaskRecord {
	rec.TaskID, rec.Tenant, rec.RequestSeq, rec.QueuedAt = b.id, b.tenant, b.seq, b.queued.UTC()
	rec.TraceParent, rec.TraceState = b.parent, b.state
	if b.invalid != nil {
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
func readBody(names contract.Names, m bus.Message) (body, error) {
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
		b.invalid = b.grantable()
	}
	return b, nil
}

// grantable says why a valid request could never be run: its grant would reach
// nobody and hold a slot for ever.
func (b body) grantable() error {
	if p := b.req.Pool; p != "" && p != contract.DefaultPool {
		return fmt.Errorf("%w: task request: pool is %q; the executors of this gate serve %q", contract.ErrInvalidMessage, p, contract.DefaultPool)
	}
	// A grant holds what was read, written anew: text that came in another
	// encoding may grow, and parts of it stand in the record as well.
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
	limit int // bytes

	mu    sync.Mutex
	bySeq map[uint64]body
	order []uint64
	bytes int
}

func newBodies(c *bus.Conn) *bodies {
	return &bodies{bus: c, limit: 8 << 20, bySeq: map[uint64]body{}}
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
	return readBody(b.bus.Names, m)
}
