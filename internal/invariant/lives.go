package invariant

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// life is the events of one task or run, in the order of the stream.
type life struct {
	events []*event
	queued *event
	ends   []*event
	// old: it began before the history did.
	old bool
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// file puts an event into its life.
func (j *judge) file(lives map[string]*life, id string, e *event) {
	l := lives[id]
	if l == nil {
		l = &life{old: !j.o.Since.IsZero() && e.typ != contract.RecordQueued && e.typ != contract.RecordRunStarted}
		lives[id] = l
	}
	for _, f := range e.faults {
		j.bad(f.rule, id, f.text, e.proof())
	}
	l.events = append(l.events, e)
	switch e.typ {
	case contract.RecordQueued:
		l.queued = e
	case contract.RecordEnd, contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
		l.ends = append(l.ends, e)
	}
}

// task judges the life of one task.
func (j *judge) task(id string, l *life) {
	if l.old {
		return
	}
	j.oneEnd(id, l)
	j.oneOwner(id, l)
	var over *event // the end
	newest := 0     // the newest attempt that was heard of
	var newestEvent *event
	admitted := map[int]*event{}
	started := map[int]*event{}
	index := map[int]int{} // the newest step of each attempt
	for i, e := range l.events {
		if over != nil && e.typ != contract.RecordEnd {
			j.bad(Fence, id, e.typ+" after the task's end", over.proof(), e.proof())
		}
		if e.attempt < newest && (e.attempt > 0 || e.typ == contract.RecordEnd) {
			j.bad(Fence, id, fmt.Sprintf("%s of attempt %d after attempt %d was heard of", e.typ, e.attempt, newest), newestEvent.proof(), e.proof())
		}
		if e.attempt > newest {
			newest, newestEvent = e.attempt, e
		}
		switch e.typ {
		case contract.RecordQueued:
			if i > 0 && over == nil {
				j.bad(Events, id, "its first event is not that it was queued", l.events[0].proof(), e.proof())
			}
		case contract.RecordAdmitted:
			admitted[e.attempt] = e
			before, ok := admitted[e.attempt-1]
			switch {
			case ok && before.slot != e.slot:
				j.bad(Capacity, id, fmt.Sprintf("attempt %d moved from slot %d to slot %d", e.attempt, before.slot, e.slot), before.proof(), e.proof())
			case !ok && e.attempt > 1:
				j.bad(Events, id, fmt.Sprintf("attempt %d was admitted, attempt %d never was", e.attempt, e.attempt-1), e.proof())
			}
			if s, ok := started[e.attempt]; ok {
				j.bad(Events, id, fmt.Sprintf("attempt %d began before it was admitted", e.attempt), s.proof(), e.proof())
			}
		case contract.RecordStart:
			if _, ok := admitted[e.attempt]; !ok {
				j.bad(Events, id, fmt.Sprintf("attempt %d began and was not admitted", e.attempt), e.proof())
			}
			if s, ok := started[e.attempt]; ok {
				j.bad(Fence, id, fmt.Sprintf("attempt %d began twice", e.attempt), s.proof(), e.proof())
			}
			started[e.attempt] = e
		case contract.RecordStep:
			if _, ok := started[e.attempt]; !ok {
				j.bad(Events, id, fmt.Sprintf("a step of attempt %d, which has not begun", e.attempt), e.proof())
			}
			j.next(id, fmt.Sprintf("attempt %d", e.attempt), index[e.attempt], e)
			index[e.attempt] = e.index
		case contract.RecordEnd:
			if _, ok := started[e.attempt]; !ok && e.status == string(contract.TaskCompleted) && over == nil {
				j.bad(Events, id, fmt.Sprintf("attempt %d completed and has not begun", e.attempt), e.proof())
			}
			over = e
		}
	}
}

// oneOwner looks for events of a task under more than one tenant, thread or run.
func (j *judge) oneOwner(id string, l *life) {
	first := l.events[0]
	for _, e := range l.events[1:] {
		if e.tenant != first.tenant || e.thread != first.thread || e.run != first.run {
			j.bad(Events, id, "its events name more than one tenant, thread or run", first.proof(), e.proof())
			return
		}
	}
}

// run judges the life of one run's own events.
func (j *judge) run(id string, l *life) {
	if l.old {
		return
	}
	j.oneEnd(id, l)
	j.oneOwner(id, l)
	index := 0
	var over *event
	for _, e := range l.events {
		switch e.typ {
		case contract.RecordRunMessage:
			j.next(id, "the run", index, e)
			index = e.index
		case contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
			if over == nil {
				over = e
			}
			continue
		}
		if over != nil {
			j.bad(Fence, id, e.typ+" after the run's end", over.proof(), e.proof())
		}
	}
	if l.events[0].typ != contract.RecordRunStarted {
		j.bad(Events, id, "its first event is not that it was started", l.events[0].proof())
	}
}

func (j *judge) oneEnd(id string, l *life) {
	switch {
	case len(l.ends) > 1:
		var proof []Evidence
		for _, e := range l.ends {
			proof = append(proof, e.proof())
		}
		j.bad(OneEnd, id, fmt.Sprintf("it has %d ends", len(l.ends)), proof...)
	case len(l.ends) == 0 && j.o.Settled:
		j.bad(OneEnd, id, "it has no end", l.events[len(l.events)-1].proof())
	}
}

func (j *judge) next(id, whose string, before int, e *event) {
	if e.index != before+1 {
		j.bad(Events, id, fmt.Sprintf("message_index %d of %s follows %d", e.index, whose, before), e.proof())
	}
}

// admission is the first event that tells of a slot, or nil.
func (l *life) admission() *event {
	for _, e := range l.events {
		if e.typ == contract.RecordAdmitted {
			return e
		}
	}
	return nil
}

// traits of a task: what its events say of themselves, and else its record.
func (j *judge) traits(id string) traits {
	var t traits
	if l := j.tasks[id]; l != nil {
		t = l.events[0].traits()
		if l.queued != nil {
			t.kind = l.queued.kind
		}
		if a := l.admission(); a != nil {
			t.pool = contract.Pool(a.pool)
		}
	}
	if rec, ok := j.newest(id); ok {
		t = traits{rec.Record.Pool, rec.Record.Tenant, rec.Record.ThreadID, rec.Record.SubagentType}
	}
	if t.pool == contract.DefaultPool {
		t.pool = ""
	}
	return t
}

// capacity looks for more slots in use than there are, and for one slot used
// twice. A slot is used from before the event that it was admitted until after
// the time of the end, so that what overlaps here has overlapped.
func (j *judge) capacity() {
	type edge struct {
		at   time.Time
		take bool
		h    holding
	}
	var edges []edge
	for id, l := range j.tasks {
		first := l.admission()
		if first == nil {
			continue
		}
		t := j.traits(id)
		h := holding{id, t, slot{t.pool, first.slot}, first.proof()}
		edges = append(edges, edge{first.at, true, h})
		if len(l.ends) > 0 {
			edges = append(edges, edge{l.ends[0].at.Add(-j.o.ClockSkew), false, h})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if c := a.at.Compare(b.at); c != 0 {
			return c
		}
		if a.take != b.take { // a slot that comes free at the same time is free
			if b.take {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.h.proof.Seq, b.h.proof.Seq)
	})
	u := j.newUse()
	gone := map[string]bool{} // ended before it began, within the skew
	for _, x := range edges {
		switch {
		case !x.take:
			gone[x.h.id] = true
			u.leave(x.h.id)
		case !gone[x.h.id]:
			u.take(x.h, x.at.Before(j.o.LimitsSince))
		}
	}
}

// order looks for tasks that were admitted before others that had been stored
// earlier. The time of a queued event is the server's own time of the request,
// which no two requests share.
func (j *judge) order() {
	var grants []first
	for id, l := range j.tasks {
		a := l.admission()
		if l.queued == nil || a == nil {
			continue
		}
		grants = append(grants, first{
			id: id, traits: j.traits(id), proof: []Evidence{l.queued.proof(), a.proof()}, at: l.queued.at, seq: a.seq,
			before: func(o first) bool { return l.queued.at.Before(o.at) },
		})
	}
	slices.SortFunc(grants, func(a, b first) int { return cmp.Compare(a.seq, b.seq) })
	j.overtaken(grants)
}

// bound looks for more requests in the queue than it may hold. A request is there
// from the time of its queued event until after the time of the task's end.
func (j *judge) bound() {
	if j.o.MaxStored < 1 {
		return
	}
	type edge struct {
		at     time.Time
		stored int
		e      *event
	}
	var edges []edge
	for _, l := range j.tasks {
		if l.queued == nil || len(l.ends) == 0 {
			continue
		}
		edges = append(edges, edge{l.queued.at, 1, l.queued}, edge{l.ends[0].at.Add(-j.o.ClockSkew), -1, l.queued})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.stored, b.stored)) })
	there := map[string]*event{}
	gone := map[string]bool{}
	for _, x := range edges {
		switch {
		case x.stored < 0:
			gone[x.e.task] = true
			delete(there, x.e.task)
		case !gone[x.e.task]:
			there[x.e.task] = x.e
			if n := len(there); n == j.o.MaxStored+1 && !x.at.Before(j.o.LimitsSince) {
				proof := make([]Evidence, 0, n)
				for _, e := range there {
					proof = append(proof, e.proof())
				}
				j.bad(Bound, x.e.task, fmt.Sprintf("%d requests were in the queue, which has room for %d", n, j.o.MaxStored), proof...)
			}
		}
	}
}
