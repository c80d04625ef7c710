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
// run, task, thread, type and tenant, of the whole stream, and of a type or tenant
// that only ten events have. A small store and a large one are asked in turn, each
// page a few times: what counts is the time once it is in memory. The first time is
// told beside it; it is mostly what the database reads from outside its own memory.
func TestPagesOfALargeStore(t *testing.T) {
	growing(t)
	for _, kind := range stores {
		t.Run(kind.name, func(t *testing.T) {
			sizes := [2]int{min(10_000, *sinkEvents/2), *sinkEvents}
			var both [2]eventsink.Store
			for i, n := range sizes {
				st, err := kind.open(t)(t.Context(), nil)
				if err != nil {
					t.Fatal(err)
				}
				defer st.Close()
				for from := 0; from < n; from += 1000 {
					var batch []contract.EventRecord
					for i := from; i < min(from+1000, n); i++ {
						batch = append(batch, grown(i, n))
					}
					if _, err := st.Append(t.Context(), batch, batch[len(batch)-1].Seq); err != nil {
						t.Fatal(err)
					}
				}
				both[i] = st
			}
			for _, page := range grownPages {
				// A busy machine gets a second and third chance.
				const limit = 1.5
				var first, again [2]time.Duration
				for range 3 {
					if first, again = pageTimes(t, both, sizes, page.query); float64(again[1]) <= limit*float64(again[0]) {
						break
					}
				}
				ratio := func(d [2]time.Duration) float64 { return float64(d[1]) / float64(d[0]) }
				t.Logf("page by %s: %v at %d events, %v at %d: %.2f times (the first time %v, %v: %.2f times)",
					page.by, again[0], sizes[0], again[1], sizes[1], ratio(again), first[0], first[1], ratio(first))
				if ratio(again) > limit {
					t.Errorf("a page by %s takes %v at %d events and %v at %d, which is %.2f times; want at most %.1f", page.by, again[0], sizes[0], again[1], sizes[1], ratio(again), limit)
				}
			}
		})
	}
}

const (
	rareTenant = "rare"
	rareType   = contract.RecordRunFailed
)

// grownPages are the pages that are measured; r is where they begin.
var grownPages = []struct {
	by    string
	query func(r contract.EventRecord) eventsink.Query
}{
	{"run", func(r contract.EventRecord) eventsink.Query { return eventsink.Query{RunID: r.RunID} }},
	{"task", func(r contract.EventRecord) eventsink.Query { return eventsink.Query{TaskID: r.TaskID} }},
	{"thread", func(r contract.EventRecord) eventsink.Query { return eventsink.Query{ThreadID: r.ThreadID} }},
	{"thread of a tenant", func(r contract.EventRecord) eventsink.Query {
		return eventsink.Query{ThreadID: r.ThreadID, Tenant: r.Tenant}
	}},
	{"whole stream", func(contract.EventRecord) eventsink.Query { return eventsink.Query{} }},
	{"tenant", func(r contract.EventRecord) eventsink.Query { return eventsink.Query{Tenant: r.Tenant} }},
	{"type", func(contract.EventRecord) eventsink.Query {
		return eventsink.Query{Types: []string{contract.RecordEnd}}
	}},
	{"two types", func(contract.EventRecord) eventsink.Query {
		return eventsink.Query{Types: []string{contract.RecordStart, contract.RecordEnd}}
	}},
	{"tenant and type", func(r contract.EventRecord) eventsink.Query {
		return eventsink.Query{Tenant: r.Tenant, Types: []string{contract.RecordEnd}}
	}},
	{"rare type", func(contract.EventRecord) eventsink.Query { return eventsink.Query{Types: []string{rareType}} }},
	{"rare type or another", func(contract.EventRecord) eventsink.Query {
		return eventsink.Query{Types: []string{rareType, contract.RecordRunCancelled}}
	}},
	{"rare tenant", func(contract.EventRecord) eventsink.Query { return eventsink.Query{Tenant: rareTenant} }},
	{"rare tenant and type", func(contract.EventRecord) eventsink.Query {
		return eventsink.Query{Tenant: rareTenant, Types: []string{rareType}}
	}},
	{"type nobody has", func(contract.EventRecord) eventsink.Query {
		return eventsink.Query{Types: []string{contract.RecordRunCancelled}}
	}},
}

// grown is the record with the number i, from 0, of a store of n: 20 events a task, 200
// a run, 400 a thread, and ten of a tenant and type of their own.
func grown(i, n int) contract.EventRecord {
	tenant, typ := contract.Tenant("default"), contract.RecordStep
	switch i % 20 {
	case 0:
		typ = contract.RecordStart
	case 19:
		typ = contract.RecordEnd
	}
	if i%(n/10) == n/10-1 {
		tenant, typ = rareTenant, rareType
	}
	return contract.EventRecord{
		Seq: uint64(i + 1), EventID: fmt.Sprintf("grown/%d", i), Tenant: tenant, ThreadID: contract.ThreadID(fmt.Sprintf("thread-%d", i/400)),
		RunID: contract.RunID(fmt.Sprintf("run-%d", i/200)), TaskID: contract.TaskID(fmt.Sprintf("task-%d", i/20)), EventType: typ, Category: contract.CategorySubagent,
		Content: fmt.Appendf(nil, `{"text":"%0700d"}`, i), Metadata: []byte(`{}`), CreatedAt: time.Unix(1_800_000_000+int64(i), 0).UTC(),
	}
}

// pageTimes are the medians of pages of 50 that begin all over two stores: of the
// first time that a page is read, and of the times after that.
func pageTimes(t *testing.T, both [2]eventsink.Store, sizes [2]int, query func(contract.EventRecord) eventsink.Query) (first, again [2]time.Duration) {
	t.Helper()
	const looks, times = 101, 5
	var one, more [2][]time.Duration
	for i := range looks {
		for k, st := range both {
			n := sizes[k]
			// Not on the border of a run, so that the page is not empty, nor at the
			// end of the store.
			r := grown(i*(n-2000)/looks/400*400+4, n)
			q := query(r)
			q.AfterSeq, q.Limit = r.Seq, 50
			for j := range times {
				begin := time.Now()
				_, _, err := st.List(t.Context(), q)
				took := time.Since(begin)
				if err != nil {
					t.Fatalf("page %+v: %v", q, err)
				}
				if j == 0 {
					one[k] = append(one[k], took)
				} else {
					more[k] = append(more[k], took)
				}
			}
		}
	}
	median := func(d []time.Duration) time.Duration { slices.Sort(d); return d[len(d)/2] }
	for k := range both {
		first[k], again[k] = median(one[k]), median(more[k])
	}
	return first, again
}
