package eventsink_test

import (
	"flag"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

var sinkEvents = flag.Int("sink.events", 0, "how many events the tests of growth store, at least 20,000; 0 leaves these tests out")

func growing(t *testing.T) {
	t.Helper()
	if *sinkEvents < 20_000 {
		t.Skip("takes a minute: run make bench-sink")
	}
}

// What the sink holds does not grow with what it has stored. The heap is that of
// the server in this process as well.
func TestMemoryIsFlat(t *testing.T) {
	growing(t)
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	live := func(seq uint64) float64 {
		for reached(t, conn, seq) < seq {
			continue // each look waits for it
		}
		runtime.GC()
		runtime.GC() // what has finalizers
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc) / (1 << 20)
	}
	const step = 10_000
	early, at := 0.0, max(*sinkEvents/10, 1)
	for n := 0; n < *sinkEvents; n += step {
		if early == 0 && n >= at {
			early = live(uint64(n))
		}
		fillFrom(t, conn, n, min(step, *sinkEvents-n))
	}
	late := live(uint64(*sinkEvents))
	t.Logf("live heap after %d events: %.1f MiB, after %d: %.1f MiB", at, early, *sinkEvents, late)
	// The server keeps some 10 bytes of each message that it stores.
	if limit := early*1.2 + 12 + float64(*sinkEvents)*24/(1<<20); late > limit {
		t.Errorf("the live heap grew from %.1f to %.1f MiB; want at most %.1f", early, late, limit)
	}
}

// EVT-17: a page costs the same wherever it begins and however much is stored: by
// run, task, thread and type, and of the whole stream.
func TestPagesOfALargeStore(t *testing.T) {
	growing(t)
	for _, kind := range stores {
		t.Run(kind.name, func(t *testing.T) {
			st, err := kind.open(t)(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer st.Close()
			appendUpTo := func(from, to int) {
				for i := from; i < to; i += 1000 {
					var batch []contract.EventRecord
					for n := i + 1; n <= min(i+1000, to); n++ {
						batch = append(batch, grown(uint64(n)))
					}
					if _, err := st.Append(t.Context(), batch, batch[len(batch)-1].Seq); err != nil {
						t.Fatal(err)
					}
				}
			}
			few := min(10_000, *sinkEvents/2)
			appendUpTo(0, few)
			small := pageTimes(t, st, few)
			appendUpTo(few, *sinkEvents)
			large := pageTimes(t, st, *sinkEvents)
			for _, name := range []string{"run", "task", "thread", "whole stream", "type"} {
				t.Logf("page by %s: %v at %d events, %v at %d: %.2f times", name, small[name], few, large[name], *sinkEvents, float64(large[name])/float64(small[name]))
				// Times that a busy machine makes are no reason to fail make test.
				if *sinkEvents >= 1_000_000 && float64(large[name]) > 1.5*float64(small[name]) && large[name] > 5*time.Millisecond {
					t.Errorf("a page by %s takes %v at %d events and %v at %d", name, small[name], few, large[name], *sinkEvents)
				}
			}
		})
	}
}

// grown is a record of a large store: 20 events a task, 200 a run, 400 a thread.
func grown(seq uint64) contract.EventRecord {
	i := int(seq - 1)
	typ := contract.RecordStep
	switch i % 20 {
	case 0:
		typ = contract.RecordStart
	case 19:
		typ = contract.RecordEnd
	}
	return contract.EventRecord{
		Seq: seq, EventID: fmt.Sprintf("grown/%d", seq), Tenant: "default", ThreadID: contract.ThreadID(fmt.Sprintf("thread-%d", i/400)),
		RunID: contract.RunID(fmt.Sprintf("run-%d", i/200)), TaskID: contract.TaskID(fmt.Sprintf("task-%d", i/20)), EventType: typ, Category: contract.CategorySubagent,
		Content: fmt.Appendf(nil, `{"text":"%0700d"}`, i), Metadata: []byte(`{}`), CreatedAt: time.Unix(1_800_000_000+int64(i), 0).UTC(),
	}
}

// pageTimes is the median of pages of 50 that begin all over the store.
func pageTimes(t *testing.T, st eventsink.Store, n int) map[string]time.Duration {
	t.Helper()
	const looks = 101
	out := map[string]time.Duration{}
	for name, of := range map[string]func(eventsink.Query, contract.EventRecord) eventsink.Query{
		"run":          func(q eventsink.Query, r contract.EventRecord) eventsink.Query { q.RunID = r.RunID; return q },
		"task":         func(q eventsink.Query, r contract.EventRecord) eventsink.Query { q.TaskID = r.TaskID; return q },
		"thread":       func(q eventsink.Query, r contract.EventRecord) eventsink.Query { q.ThreadID = r.ThreadID; return q },
		"whole stream": func(q eventsink.Query, r contract.EventRecord) eventsink.Query { return q },
		"type": func(q eventsink.Query, r contract.EventRecord) eventsink.Query {
			q.Types = []string{contract.RecordEnd}
			return q
		},
	} {
		var took []time.Duration
		for i := range looks {
			// Not on the border of a run, so that the page is not empty, nor at the
			// end of the store.
			r := grown(uint64(i*(n-2000)/looks/400*400 + 5))
			begin := time.Now()
			got, _, err := st.List(t.Context(), of(eventsink.Query{AfterSeq: r.Seq, Limit: 50}, r))
			if err != nil || len(got) == 0 {
				t.Fatalf("page by %s after %d: %d records, %v", name, r.Seq, len(got), err)
			}
			took = append(took, time.Since(begin))
		}
		slices.Sort(took)
		out[name] = took[looks/2]
	}
	return out
}
