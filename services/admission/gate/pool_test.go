package gate

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ADM-05, ADM-14: over a long time, with many keys, the pool chooses the oldest
// that fits, knows every place, and leaves nothing behind.
func TestPoolChoosesTheOldestThatFits(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := newPool("p", Pool{MaxRunning: rapid.IntRange(1, 6).Draw(t, "max_running"), Limits: Limits{
			PerTenant: rapid.IntRange(0, 3).Draw(t, "per tenant"), PerThread: rapid.IntRange(0, 2).Draw(t, "per thread"),
			PerType: map[string]int{"t0": rapid.IntRange(0, 2).Draw(t, "per t0"), "t1": 1},
		}})
		cfg := Config{Pools: map[contract.Pool]Pool{"p": p.Pool}}
		u := newUse(cfg)
		var waiting []*task
		running := map[contract.TaskID]traits{}
		seq := uint64(0)
		word := func(prefix string, n int) string { return fmt.Sprint(prefix, rapid.IntRange(0, n).Draw(t, prefix)) }
		leave := func(id contract.TaskID) {
			for k := range u.bounds("p", running[id]) {
				u.counts[k]--
			}
			delete(running, id)
			p.leave(id)
		}
		check := func() {
			var want *task
			for i, w := range waiting {
				if got := p.ranks.rank(w.rank); got != i+1 {
					t.Fatalf("ADM-18: %s is at place %d, the rank is %d", w.id, i+1, got)
				}
				if want == nil && u.room("p", w.req.traits()) {
					want = w
				}
			}
			if got := p.pick(); got != want {
				t.Fatalf("chosen is %+v, want %+v", got, want)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) {},
			"wait": func(*rapid.T) {
				seq++
				w := &task{id: contract.TaskID(fmt.Sprint("id", seq)), req: &Request{
					Seq: seq, Tenant: contract.Tenant(word("n", 3)), ThreadID: contract.ThreadID(word("h", 2)), Type: word("t", 2),
				}}
				waiting = append(waiting, w)
				p.add(w)
			},
			"go away": func(t *rapid.T) {
				if len(waiting) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(waiting)-1).Draw(t, "who")
				p.remove(waiting[i])
				waiting = append(waiting[:i:i], waiting[i+1:]...)
			},
			"grant": func(t *rapid.T) {
				check()
				w := p.pick()
				if w == nil {
					t.Skip()
				}
				number := p.take(w.id, 0, w.req.traits())
				if number < 1 || number > p.MaxRunning {
					t.Fatalf("slot %d of %d", number, p.MaxRunning)
				}
				running[w.id] = w.req.traits()
				u.add("p", w.req.traits())
				if rapid.IntRange(0, 9).Draw(t, "does not land") == 0 {
					leave(w.id)
					return
				}
				p.remove(w)
				for i := range waiting {
					if waiting[i] == w {
						waiting = append(waiting[:i:i], waiting[i+1:]...)
						break
					}
				}
			},
			"end": func(t *rapid.T) {
				for id := range p.slots.by { // the lowest number, so that a run can be repeated
					n := id
					for m := range p.slots.by {
						n = min(n, m)
					}
					leave(p.slots.by[n])
					return
				}
				t.Skip()
			},
		})
		for len(waiting)+len(running) > 0 {
			check()
			if w := p.pick(); w != nil {
				p.take(w.id, 0, w.req.traits())
				running[w.id] = w.req.traits()
				u.add("p", w.req.traits())
				p.remove(w)
				waiting = append([]*task{}, without(waiting, w)...)
				continue
			}
			if len(running) == 0 {
				t.Fatalf("%d wait, nobody runs and nobody is chosen", len(waiting))
			}
			for id := range running {
				leave(id)
				break
			}
		}
		if len(p.keys)+len(p.groups)+p.order.Len()+p.slots.used() != 0 {
			t.Fatalf("left behind: %d keys, %d groups", len(p.keys), len(p.groups))
		}
	})
}

func without(all []*task, w *task) []*task {
	var out []*task
	for _, t := range all {
		if t != w {
			out = append(out, t)
		}
	}
	return out
}

// ADM-04, ADM-14: where nobody may wait, a request that does not fit at once is
// turned away, in the order of the queue, also by a leader that has just begun.
func TestRejectTurnsAwayTheLast(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		g := New(Config{MaxRunning: 1, Limits: Limits{}, Pools: map[contract.Pool]Pool{"big": {MaxRunning: 3, Limits: Limits{PerTenant: 2}}}, Reject: true, LeaseTTL: 1e9, Retention: 1e9, MarkerTTL: 1e9})
		var events []Event
		for i, r := range []Request{
			{TaskID: "a", Tenant: "n"}, {TaskID: "b", Tenant: "n"},
			{TaskID: "c", Tenant: "n", Pool: "big"}, {TaskID: "d", Tenant: "n", Pool: "big"}, {TaskID: "e", Tenant: "n", Pool: "big"}, {TaskID: "f", Tenant: "m", Pool: "big"}, {TaskID: "g", Tenant: "o", Pool: "big"},
		} {
			r.Seq, r.Deadline = uint64(i+1), at.Add(1e12)
			events = append(events, RequestStored{r})
		}
		open := []Event{ViewRead{}, WorkRead{}}
		if late {
			events = append(events, open...)
		} else {
			events = append(open, events...)
		}
		got := map[contract.TaskID]contract.State{}
		rev := uint64(0)
		for len(events) > 0 {
			ev := events[0]
			events = events[1:]
			for _, a := range g.Apply(ev, at) {
				if a, ok := a.(FirstWrite); ok {
					got[a.TaskID] = a.Record.State
					if a.Record.State == contract.StateFailed && (a.Record.ErrorCode != contract.ErrQueueFull || !a.Record.AdmissionFailure) {
						t.Errorf("%s: %+v", a.TaskID, a.Record)
					}
					rec := a.Record
					if a.TaskID > "b" {
						rec.Pool = "big"
					}
					rev++
					events = append(events, FirstWritten{TaskID: a.TaskID, Outcome: Stored, Revision: rev, Record: rec})
				}
			}
		}
		want := map[contract.TaskID]contract.State{"a": contract.StateGranted, "b": contract.StateFailed, "c": contract.StateGranted, "d": contract.StateGranted, "e": contract.StateFailed, "f": contract.StateGranted, "g": contract.StateFailed}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("late=%v: %v, want %v", late, got, want)
		}
	}
}

var at = time.Unix(1_000_000, 0)
