// Package sinktest is the conformance suite of event stores: every store of
// package eventsink passes it.
package sinktest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
)

// Backend is one place for a store. Open may be called again after the store
// was closed, and finds what was stored.
type Backend struct {
	Open func(t *testing.T) eventsink.Store
}

// Record is a good record with sequence seq of one of four tasks.
func Record(seq uint64) contract.EventRecord {
	task := seq % 4
	return contract.EventRecord{
		Seq: seq, EventID: fmt.Sprintf("ev-%d", seq), Tenant: "default",
		ThreadID: contract.ThreadID(fmt.Sprintf("thread %d", task/2)), RunID: contract.RunID(fmt.Sprintf("run-%d", task/2)),
		TaskID: contract.TaskID(fmt.Sprintf("task-%d", task)), EventType: contract.RecordStep, Category: contract.CategorySubagent,
		Content:   json.RawMessage(fmt.Sprintf(`{"kind":"ai","message_index":%d,"text":"hello","tool_calls":[{"args":{"path":"a.go"},"name":"read_file"}]}`, seq)),
		Metadata:  json.RawMessage(fmt.Sprintf(`{"message_index":%d,"task_id":"task-%d"}`, seq, task)),
		CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC).Add(time.Duration(seq) * time.Second),
	}
}

// Run runs the suite. fresh makes an empty backend that belongs to the test.
func Run(t *testing.T, fresh func(t *testing.T) Backend) {
	test := func(name string, f func(t *testing.T, ctx context.Context, b Backend)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			f(t, ctx, fresh(t))
		})
	}
	test("RoundTrip", roundTrip)
	test("Idempotent", idempotent)
	test("Atomic", atomic)
	test("Rejected", rejected)
	test("Cursor", cursor)
	test("Durable", durable)
	test("Filters", filters)
	test("Pages", pages)
	test("PageBytes", pageBytes)
	test("Origin", origin)
	test("ReadWhileWriting", readWhileWriting)
	test("Advance", advance)
	test("Prune", prune)
	test("Agents", agents)
	test("AgentsWhileWriting", agentsWhileWriting)
}

// EVT-10, EVT-20: what was structured comes back structured, the same to the
// last digit, whatever characters are in it.
func roundTrip(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	run := Record(7)
	run.TaskID, run.EventType, run.Category = "", contract.RecordRunStarted, contract.CategoryRun
	run.ThreadID = "Ünïcode / * > \" ' ; DROP TABLE events"
	run.Content = json.RawMessage(`{"big":12345678901234567890,"deep":[{"a":[null,true,1.50]}],"text":"<b>&  😀 \\u0000 �"}`)
	long := Record(8)
	long.EventType, long.Category = strings.Repeat("t", 32), strings.Repeat("c", 16)
	want := []contract.EventRecord{Record(3), run, long}
	mustAppend(t, ctx, s, 8, 3, want...)
	got := list(t, ctx, s, eventsink.Query{Limit: 10})
	equal(t, got, want)
	if got[1].TaskID != "" {
		t.Errorf("task id of a run's event = %q, want none", got[1].TaskID)
	}
	empty := Record(9)
	empty.Content, empty.Metadata = nil, nil
	mustAppend(t, ctx, s, 9, 1, empty)
	if got := list(t, ctx, s, eventsink.Query{AfterSeq: 8, Limit: 1}); string(got[0].Content) != "null" || string(got[0].Metadata) != "null" {
		t.Errorf("no content came back as %s and %s, want null", got[0].Content, got[0].Metadata)
	}
}

// EVT-14, EVT-15, F-144: the same event again, with the same sequence or a later
// one, changes nothing and is not counted; nor does another event with a
// sequence that is taken (EVT-18).
func idempotent(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	mustAppend(t, ctx, s, 2, 2, Record(1), Record(2))
	again := Record(1)
	again.Content = json.RawMessage(`{"changed":true}`)
	moved := Record(2)
	moved.Seq = 5
	taken := Record(9)
	taken.Seq = 2
	mustAppend(t, ctx, s, 5, 1, again, taken, Record(4), moved)
	equal(t, list(t, ctx, s, eventsink.Query{Limit: 10}), []contract.EventRecord{Record(1), Record(2), Record(4)})
}

// EVT-14: a batch is one transaction. One bad record keeps all of it out, the
// cursor included.
func atomic(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	bad := Record(3)
	bad.EventType = strings.Repeat("x", 33)
	if _, err := s.Append(ctx, []contract.EventRecord{Record(1), Record(2), bad}, 3); !errors.Is(err, eventsink.ErrRejected) {
		t.Fatalf("Append with a bad record = %v, want ErrRejected", err)
	}
	if got := list(t, ctx, s, eventsink.Query{Limit: 10}); len(got) != 0 {
		t.Errorf("%d records were stored by a refused batch, want none", len(got))
	}
	wantCursor(t, ctx, s, 0)
}

// EVT-10: each kind of bad record is refused as such, not as trouble that could
// pass.
func rejected(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	for name, change := range map[string]func(*contract.EventRecord){
		"no sequence":        func(r *contract.EventRecord) { r.Seq = 0 },
		"huge sequence":      func(r *contract.EventRecord) { r.Seq = 1 << 63 },
		"no event id":        func(r *contract.EventRecord) { r.EventID = "" },
		"no type":            func(r *contract.EventRecord) { r.EventType = "" },
		"long type":          func(r *contract.EventRecord) { r.EventType = strings.Repeat("x", 33) },
		"long category":      func(r *contract.EventRecord) { r.Category = strings.Repeat("x", 17) },
		"content not JSON":   func(r *contract.EventRecord) { r.Content = json.RawMessage(`{"a":`) },
		"metadata not JSON":  func(r *contract.EventRecord) { r.Metadata = json.RawMessage(`nope`) },
		"trailing rubbish":   func(r *contract.EventRecord) { r.Content = json.RawMessage(`{} {}`) },
		"content plain text": func(r *contract.EventRecord) { r.Content = json.RawMessage(`hello`) },
	} {
		r := Record(1)
		change(&r)
		if n, err := s.Append(ctx, []contract.EventRecord{r}, 1); !errors.Is(err, eventsink.ErrRejected) {
			t.Errorf("%s: Append = %d, %v, want ErrRejected", name, n, err)
		}
	}
	mustAppend(t, ctx, s, 1, 1, Record(1))
}

func cursor(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	wantCursor(t, ctx, s, 0)
	mustAppend(t, ctx, s, 12, 1, Record(4)) // 5 to 12 were not for the store
	wantCursor(t, ctx, s, 12)
	mustAppend(t, ctx, s, 10, 0)
	wantCursor(t, ctx, s, 12)
	mustAppend(t, ctx, s, 130, 0)
	wantCursor(t, ctx, s, 130)
}

func durable(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	at := eventsink.Origin{Stream: "HG_EVENTS", Created: time.Now()}
	if err := s.Bind(ctx, at); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, ctx, s, 2, 2, Record(1), Record(2))
	if err := s.Close(); err != nil {
		t.Fatalf("Close = %v", err)
	}
	s = b.Open(t)
	equal(t, list(t, ctx, s, eventsink.Query{Limit: 10}), []contract.EventRecord{Record(1), Record(2)})
	wantCursor(t, ctx, s, 2)
	if err := s.Bind(ctx, at); err != nil {
		t.Errorf("Bind after opening again = %v", err)
	}
}

// EVT-16, EVT-17: each filter by itself and together, before the limit; no types
// is no filter.
func filters(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	var all []contract.EventRecord
	for seq := uint64(1); seq <= 40; seq++ {
		r := Record(seq)
		switch {
		case seq%10 == 0:
			r.EventType = contract.RecordEnd
		case seq%7 == 0:
			r.EventType, r.Category, r.TaskID = contract.RecordRunMessage, contract.CategoryRun, ""
		}
		if seq > 30 {
			r.Tenant = "other" // the same thread, run and task names
		}
		all = append(all, r)
	}
	mustAppend(t, ctx, s, 40, 40, all...)
	for _, q := range []eventsink.Query{
		{},
		{Types: []string{}},
		{Tenant: "default"},
		{Tenant: "other", RunID: "run-1"},
		{ThreadID: "thread 1"},
		{ThreadID: "thread 1", Tenant: "other"},
		{RunID: "run-0"},
		{TaskID: "task-3"},
		{RunID: "run-1", TaskID: "task-3", ThreadID: "thread 1", Tenant: "default"},
		{Types: []string{contract.RecordEnd}},
		{Types: []string{contract.RecordEnd, contract.RecordRunMessage}, RunID: "run-1"},
		{Types: []string{contract.RecordEnd, contract.RecordRunMessage, contract.RecordEnd}, AfterSeq: 10},
		{Types: []string{contract.RecordEnd, contract.RecordStep, "nothing"}},
		{Tenant: "default", Types: []string{contract.RecordEnd}},
		{Tenant: "default", Types: []string{contract.RecordEnd, contract.RecordRunMessage}, AfterSeq: 8},
		{Tenant: "other", Types: []string{contract.RecordStep}},
		{Tenant: "other", Types: []string{contract.RecordEnd, contract.RecordStep}},
		{Tenant: "nobody", Types: []string{contract.RecordEnd}},
		{AfterSeq: 20},
		{AfterSeq: 20, TaskID: "task-1"},
		{AfterSeq: 40},
		{AfterSeq: 1<<64 - 1},
		{RunID: "nobody"},
		{Types: []string{"subagent.%"}},
		{RunID: "' OR 1=1 --"},
	} {
		want := []contract.EventRecord{}
		for _, r := range all {
			if (q.Tenant == "" || q.Tenant == r.Tenant) && (q.ThreadID == "" || q.ThreadID == r.ThreadID) && (q.RunID == "" || q.RunID == r.RunID) &&
				(q.TaskID == "" || q.TaskID == r.TaskID) && r.Seq > q.AfterSeq && (len(q.Types) == 0 || contains(q.Types, r.EventType)) {
				want = append(want, r)
			}
		}
		q.Limit = 100
		equal(t, list(t, ctx, s, q), want)
		if len(want) > 1 {
			q.Limit = len(want) - 1
			got, more, err := s.List(ctx, q)
			if err != nil || !more || len(got) != q.Limit {
				t.Errorf("List(%+v) = %d records, more %v, %v; want %d and more", q, len(got), more, err, q.Limit)
			}
		}
	}
	if _, _, err := s.List(ctx, eventsink.Query{}); err == nil {
		t.Error("List without a limit succeeded, want an error")
	}
}

// EVT-17, EVT-18: pages put together are everything, in ascending order, once.
func pages(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	var all []contract.EventRecord
	for seq := uint64(1); seq <= 100; seq += 3 { // sequences have gaps
		all = append(all, Record(seq))
	}
	mustAppend(t, ctx, s, 100, len(all), all...)
	for _, limit := range []int{1, 7, len(all), len(all) + 1} {
		var got []contract.EventRecord
		after := uint64(0)
		for more := true; more; {
			var page []contract.EventRecord
			var err error
			if page, more, err = s.List(ctx, eventsink.Query{AfterSeq: after, Limit: limit}); err != nil {
				t.Fatal(err)
			}
			if more && len(page) != limit {
				t.Fatalf("a page of %d of %d says that there is more", len(page), limit)
			}
			got = append(got, page...)
			if len(page) > 0 {
				after = page[len(page)-1].Seq
			}
		}
		equal(t, got, all)
	}
}

func pageBytes(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	var all []contract.EventRecord
	for seq := uint64(1); seq <= 5; seq++ {
		r := Record(seq)
		r.Content = json.RawMessage(`"` + strings.Repeat("x", 1000) + `"`)
		all = append(all, r)
	}
	mustAppend(t, ctx, s, 5, 5, all...)
	for _, c := range []struct {
		bytes, want int
		more        bool
	}{{10, 1, true}, {2500, 2, true}, {100_000, 5, false}, {0, 5, false}} {
		got, more, err := s.List(ctx, eventsink.Query{Limit: 10, MaxBytes: c.bytes})
		if err != nil || len(got) != c.want || more != c.more {
			t.Errorf("List up to %d bytes = %d records, more %v, %v; want %d, %v", c.bytes, len(got), more, err, c.want, c.more)
		}
	}
}

// A stream that was made anew counts from 1 again. Its events must not be taken
// for those that are there.
func origin(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	first := eventsink.Origin{Stream: "HG_EVENTS", Created: time.Date(2026, 1, 1, 0, 0, 0, 123456789, time.UTC)}
	second := eventsink.Origin{Stream: "HG_EVENTS", Created: first.Created.Add(time.Hour)}
	other := eventsink.Origin{Stream: "ACME_EVENTS", Created: first.Created}
	for _, o := range []eventsink.Origin{first, second, first, first} {
		if err := s.Bind(ctx, o); err != nil {
			t.Fatalf("Bind of an empty store to %v = %v", o, err)
		}
	}
	mustAppend(t, ctx, s, 1, 1, Record(1))
	for _, o := range []eventsink.Origin{second, other} {
		err := s.Bind(ctx, o)
		if !errors.Is(err, eventsink.ErrForeign) {
			t.Fatalf("Bind to %v = %v, want ErrForeign", o, err)
		}
		for _, want := range []string{"move", "HG_EVENTS", "2026-01-01T00:00:00.123456789Z"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not tell %q", err, want)
			}
		}
	}
	in := eventsink.Origin{Stream: first.Stream, Created: first.Created.In(time.FixedZone("", 3600))}
	if err := s.Bind(ctx, in); err != nil {
		t.Errorf("Bind to the same moment in another zone = %v", err)
	}
}

// Sinks that share the work store first and move the cursor afterwards. A
// database that has gone back behind what a sink saw is not the same one.
func advance(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	mustAppend(t, ctx, s, 0, 2, Record(1), Record(3))
	wantCursor(t, ctx, s, 0)
	for _, step := range []struct{ from, to, want uint64 }{{0, 2, 2}, {2, 2, 2}, {0, 1, 2}, {1, 3, 3}} {
		if err := s.Advance(ctx, step.from, step.to); err != nil {
			t.Fatalf("Advance(%d, %d) = %v", step.from, step.to, err)
		}
		wantCursor(t, ctx, s, step.want)
	}
	equal(t, list(t, ctx, s, eventsink.Query{Limit: 10}), []contract.EventRecord{Record(1), Record(3)})
	if err := s.Advance(ctx, 4, 9); !errors.Is(err, eventsink.ErrLost) {
		t.Errorf("Advance from beyond the cursor = %v, want ErrLost", err)
	}
	wantCursor(t, ctx, s, 3)
}

// Retention: what was stored before a time goes, oldest first and in small steps,
// whatever the events say of their own time; the rest stays, and the place up to
// which all is gone is known.
func prune(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	var all []contract.EventRecord
	for seq := uint64(1); seq <= 20; seq++ {
		r := Record(seq)
		// Times that their writer made up, long ago and far ahead.
		r.CreatedAt = time.Date(1970+int(seq)*7, 1, 1, 0, 0, 0, 0, time.UTC)
		all = append(all, r)
	}
	check := func(before time.Time, limit, wantDeleted int, wantPruned uint64, left []contract.EventRecord) {
		t.Helper()
		n, err := s.Prune(ctx, before, limit)
		if err != nil || n != wantDeleted {
			t.Errorf("Prune = %d, %v, want %d", n, err, wantDeleted)
		}
		if got, err := s.Pruned(ctx); err != nil || got != wantPruned {
			t.Errorf("Pruned = %d, %v, want %d", got, err, wantPruned)
		}
		equal(t, list(t, ctx, s, eventsink.Query{Limit: 50}), left)
	}
	mark := func(at time.Time) {
		t.Helper()
		if err := s.Mark(ctx, at); err != nil {
			t.Fatalf("Mark = %v", err)
		}
	}
	mark(noon.Add(-time.Hour)) // an empty store
	mustAppend(t, ctx, s, 10, 8, all[:8]...)
	check(noon.Add(time.Hour), 100, 0, 0, all[:8]) // nobody knows how old they are
	all = append(all[:8:8], all[10:]...)           // 9 and 10 were not for the store
	mark(noon)
	mark(noon.Add(time.Minute)) // nothing new: the older mark counts
	mustAppend(t, ctx, s, 20, 10, all[8:]...)
	mark(noon.Add(2 * time.Hour))
	check(noon.Add(-time.Second), 100, 0, 0, all)
	check(noon, 3, 3, 3, all[3:])
	check(noon, 3, 3, 6, all[6:])
	check(noon, 3, 2, 10, all[8:])
	check(noon.Add(time.Hour), 3, 0, 10, all[8:])
	again := Record(2) // a late repeat of what is gone
	mustAppend(t, ctx, s, 20, 1, again)
	check(noon.Add(2*time.Hour), 100, 11, 20, nil)
	wantCursor(t, ctx, s, 20)
}

// Definitions come in the order of the bytes of their names, in pages, and stay; every
// change raises the revision, also that of a store that was closed meanwhile.
func agents(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	var last uint64
	done := func(what string, revision uint64, err error) {
		t.Helper()
		if err != nil || revision <= last {
			t.Fatalf("%s = %d, %v, want above %d", what, revision, err, last)
		}
		last = revision
	}
	list := func(q eventsink.AgentQuery, more bool, want ...string) {
		t.Helper()
		l, err := s.Agents(ctx, q)
		var got []string
		for _, a := range l.Agents {
			got = append(got, a.Name+string(a.Definition))
		}
		if err != nil || !reflect.DeepEqual(got, want) || l.More != more || l.Revision < last {
			t.Errorf("Agents(%+v) = %q, more %v, at %d, %v; want %q, %v, %d", q, got, l.More, l.Revision, err, want, more, last)
		}
	}
	empty, err := s.Agents(ctx, eventsink.AgentQuery{Limit: 9})
	done("revision of an empty store", empty.Revision, err)
	list(eventsink.AgentQuery{Limit: 9}, false)
	var first uint64
	for _, name := range []string{"b", "a1", "a-2"} {
		revision, err := s.PutAgent(ctx, name, []byte(`{"n" : 1.50}`), 0)
		done("PutAgent", revision, err)
		first = max(first, revision)
	}
	list(eventsink.AgentQuery{Limit: 3}, false, `a-2{"n" : 1.50}`, `a1{"n" : 1.50}`, `b{"n" : 1.50}`)
	list(eventsink.AgentQuery{Limit: 2}, true, `a-2{"n" : 1.50}`, `a1{"n" : 1.50}`)
	list(eventsink.AgentQuery{Limit: 9, MaxBytes: 5}, true, `a-2{"n" : 1.50}`)
	list(eventsink.AgentQuery{Limit: 9, AfterName: "a1"}, false, `b{"n" : 1.50}`)
	list(eventsink.AgentQuery{Limit: 9, AfterName: "b"}, false)
	list(eventsink.AgentQuery{Limit: 9, Name: "a1"}, false, `a1{"n" : 1.50}`)
	list(eventsink.AgentQuery{Limit: 9, Name: "x"}, false)
	stale := func(what string, _ uint64, err error) {
		t.Helper()
		if !errors.Is(err, eventsink.ErrStale) {
			t.Errorf("%s: %v, want ErrStale", what, err)
		}
	}
	put := func(name string, expect uint64) (string, uint64, error) {
		n, err := s.PutAgent(ctx, name, []byte(`{}`), expect)
		return fmt.Sprintf("PutAgent(%s, %d)", name, expect), n, err
	}
	stale(put("a-2", 0))
	stale(put("a-2", first-1))
	stale(put("a-2", 1<<63))
	stale(put("x", first))
	n, err := s.DeleteAgent(ctx, "a-2", first-1)
	stale("DeleteAgent", n, err)
	n, err = s.DeleteAgent(ctx, "a-2", 1<<63+first)
	stale("DeleteAgent", n, err)
	if _, err := s.PutAgent(ctx, "y", []byte(`{"n":`), 0); !errors.Is(err, eventsink.ErrRejected) {
		t.Errorf("PutAgent of no JSON: %v, want ErrRejected", err)
	}
	n, err = s.DeleteAgent(ctx, "a-2", first)
	done("DeleteAgent", n, err)
	list(eventsink.AgentQuery{Limit: 9}, false, `a1{"n" : 1.50}`, `b{"n" : 1.50}`)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = b.Open(t)
	list(eventsink.AgentQuery{Limit: 9}, false, `a1{"n" : 1.50}`, `b{"n" : 1.50}`)
	done(put("a-2", 0))
}

// Who has seen a revision has seen everything up to it: the newest definition has the
// store's revision, whenever one looks.
func agentsWhileWriting(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	const writersOfAgents, agentsOfEach = 4, 6
	var writers, reader sync.WaitGroup
	written := make(chan struct{})
	reader.Go(func() {
		for last := false; !last; {
			select {
			case <-written:
				last = true
			default:
			}
			l, err := s.Agents(ctx, eventsink.AgentQuery{Limit: 200})
			if err != nil {
				t.Errorf("Agents beside writers: %v", err)
				return
			}
			newest := uint64(0)
			for _, a := range l.Agents {
				newest = max(newest, a.Revision)
			}
			if len(l.Agents) > 0 && newest != l.Revision || last && len(l.Agents) != writersOfAgents*agentsOfEach {
				t.Errorf("%d definitions up to %d at revision %d", len(l.Agents), newest, l.Revision)
				return
			}
		}
	})
	for i := range writersOfAgents {
		writers.Go(func() {
			for j := range agentsOfEach {
				name := fmt.Sprintf("w-%d-%d", i, j)
				n, err := s.PutAgent(ctx, name, []byte(`{}`), 0)
				if err == nil {
					_, err = s.PutAgent(ctx, name, []byte(`{"again":1}`), n)
				}
				if err != nil {
					t.Errorf("PutAgent: %v", err)
				}
			}
		})
	}
	writers.Wait()
	close(written)
	reader.Wait()
}

// EVT-18: readers see whole batches in order while a writer writes.
func readWhileWriting(t *testing.T, ctx context.Context, b Backend) {
	s := b.Open(t)
	const batches, size = 40, 25
	var readers sync.WaitGroup
	done := make(chan struct{})
	for range 3 {
		readers.Go(func() {
			for {
				last := false
				select {
				case <-done:
					last = true
				default:
				}
				got, _, err := s.List(ctx, eventsink.Query{Limit: batches * size})
				if err != nil {
					t.Errorf("List beside a writer = %v", err)
					return
				}
				if len(got)%size != 0 {
					t.Errorf("%d records are visible, want whole batches of %d", len(got), size)
				}
				for i := range got {
					if got[i].Seq != uint64(i+1) {
						t.Errorf("record %d has sequence %d", i+1, got[i].Seq)
						return
					}
				}
				if last {
					if len(got) != batches*size {
						t.Errorf("%d records in the end, want %d", len(got), batches*size)
					}
					return
				}
			}
		})
	}
	for i := range batches {
		var batch []contract.EventRecord
		for j := range size {
			batch = append(batch, Record(uint64(i*size+j+1)))
		}
		mustAppend(t, ctx, s, uint64((i+1)*size), size, batch...)
	}
	close(done)
	readers.Wait()
}

func contains(list []string, s string) bool {
	for _, e := range list {
		if e == s {
			return true
		}
	}
	return false
}

func mustAppend(t *testing.T, ctx context.Context, s eventsink.Store, upTo uint64, want int, records ...contract.EventRecord) {
	t.Helper()
	n, err := s.Append(ctx, records, upTo)
	if err != nil {
		t.Fatalf("Append = %v", err)
	}
	if n != want {
		t.Errorf("Append stored %d records, want %d", n, want)
	}
}

func list(t *testing.T, ctx context.Context, s eventsink.Store, q eventsink.Query) []contract.EventRecord {
	t.Helper()
	got, more, err := s.List(ctx, q)
	if err != nil || more {
		t.Fatalf("List(%+v) = more %v, %v", q, more, err)
	}
	return got
}

func wantCursor(t *testing.T, ctx context.Context, s eventsink.Store, want uint64) {
	t.Helper()
	if got, err := s.LastSeq(ctx); err != nil || got != want {
		t.Errorf("LastSeq = %d, %v, want %d", got, err, want)
	}
}

func equal(t *testing.T, got, want []contract.EventRecord) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d", len(got), len(want))
	}
	for i := range got {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Fatalf("record %d:\n got %+v\nwant %+v", i, got[i], want[i])
		}
	}
}
