// Package feedtest stands in for the event store in tests of its readers, and
// publishes events. The store answers the real endpoint over NATS.
package feedtest

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Store is an event store in memory. It knows what it was given, no more.
type Store struct {
	mu       sync.Mutex
	records  []contract.EventRecord
	last     uint64
	pruned   uint64
	requests []eventapi.ListRequest
}

// NewStore serves an empty store on c until the test ends.
func NewStore(t testing.TB, c *bus.Conn) *Store {
	t.Helper()
	s := &Store{}
	sub, err := c.NC.Subscribe(eventapi.Subject(c.Names), s.answer)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	return s
}

// Load stores records, in ascending order, and says that everything up to last
// has been processed.
func (s *Store) Load(last uint64, records ...contract.EventRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records, s.last = append(s.records, records...), max(s.last, last)
}

// Prune forgets what lies up to seq, as retention does.
func (s *Store) Prune(seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = slices.DeleteFunc(s.records, func(r contract.EventRecord) bool { return r.Seq <= seq })
	s.pruned = max(s.pruned, seq)
}

// Requests returns what was asked so far.
func (s *Store) Requests() []eventapi.ListRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

func (s *Store) answer(msg *nats.Msg) {
	req, err := eventapi.DecodeRequest(msg.Data)
	resp := eventapi.ListResponse{NextAfterSeq: req.AfterSeq}
	if err != nil {
		resp.Error = &eventapi.Error{Code: eventapi.CodeInvalid, Message: err.Error()}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, req)
	resp.LastSeq, resp.PrunedSeq = s.last, s.pruned
	for _, r := range s.records {
		if r.Seq <= req.AfterSeq || r.Tenant != req.Tenant ||
			req.ThreadID != "" && r.ThreadID != req.ThreadID || req.RunID != "" && r.RunID != req.RunID ||
			req.TaskID != "" && r.TaskID != req.TaskID || len(req.Types) > 0 && !slices.Contains(req.Types, r.EventType) {
			continue
		}
		if len(resp.Events) == req.Limit {
			resp.HasMore = true
			break
		}
		resp.Events = append(resp.Events, r)
		resp.NextAfterSeq = r.Seq
	}
	body, err := json.Marshal(resp)
	if err == nil {
		_ = msg.Respond(body)
	}
}

// Run is a run whose events a test publishes.
type Run struct {
	Tenant contract.Tenant
	Thread contract.ThreadID
	ID     contract.RunID
}

// Message is a message of the run's lead, with the number n.
func (r Run) Message(n int, text string) envelope.Event {
	return event.RunMessage(r.record(), n, contract.Step{Kind: contract.StepAI, Text: text}, "model", nil, "/herdgate/lead/test", at(n))
}

// End is the run's last event.
func (r Run) End(status contract.RunStatus) envelope.Event {
	rec := r.record()
	done := at(1 << 20)
	rec.Status, rec.FinishedAt, rec.Output = status, &done, "the answer"
	ev, err := event.RunEnd(rec, "/herdgate/lead/test")
	if err != nil {
		panic(err)
	}
	return ev
}

// Step is step n of a task of the run.
func (r Run) Step(task contract.TaskID, n int, text string) envelope.Event {
	rec := contract.TaskRecord{TaskID: task, RunID: r.ID, ThreadID: r.Thread, Tenant: r.Tenant, State: contract.StateRunning, Attempt: 1, SubagentType: "general-purpose"}
	return event.Running(rec, n, contract.Step{Kind: contract.StepAI, Text: text}, "model", nil, "/herdgate/executor/test", at(n))
}

func (r Run) record() contract.RunRecord {
	return contract.RunRecord{RunID: r.ID, ThreadID: r.Thread, Tenant: r.Tenant, Status: contract.RunRunning, Input: "input", CreatedAt: at(0)}
}

func at(n int) time.Time {
	return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Add(time.Duration(n) * time.Millisecond)
}

// Publish stores the event in the event stream and returns its sequence.
func Publish(t testing.TB, c *bus.Conn, ev envelope.Event) uint64 {
	t.Helper()
	seq, err := TryPublish(c, ev)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// TryPublish is [Publish] for goroutines, which must not end a test.
func TryPublish(c *bus.Conn, ev envelope.Event) (uint64, error) {
	body, err := envelope.Encode(ev)
	if err != nil {
		return 0, err
	}
	ack, err := c.Publish(context.Background(), bus.Write{Subject: ev.NATSSubject(c.Names), Data: body, Header: nats.Header(ev.Headers()), MsgID: ev.ID})
	if err != nil {
		return 0, fmt.Errorf("publish %s: %w", ev.ID, err)
	}
	return ack.Seq, nil
}

// Record is what the store keeps of the event.
func Record(t testing.TB, ev envelope.Event, seq uint64) contract.EventRecord {
	t.Helper()
	rec, ok := event.Record(ev, seq)
	if !ok {
		t.Fatalf("event %s gives no record", ev.ID)
	}
	return rec
}
