// Package invariant judges recorded histories: given the stored events of some
// tasks and runs, it lists what should never have happened, with the events that
// prove it.
//
// [Check] is pure. Records may come in any order and more than once, as they do
// from feeds that were resumed; what counts is their place in the stream, and for
// capacity their time. A history must hold all events of the tasks and runs that
// are in it: an event that is not there counts as never stored.
package invariant

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// The rules, numbered as in docs/architecture.md.
const (
	Capacity = "I1 capacity"
	Order    = "I2 order"
	OneEnd   = "I4 one end"
	Fence    = "I5 fence"
	Events   = "I6 events"
)

// Options say what is known of a history beside its records.
type Options struct {
	// MaxRunning is how many tasks may hold a slot at once; 0 does not look.
	MaxRunning int
	// ClockSkew is how far the clocks of the processes may have been apart. Slots
	// are compared by the times that the processes gave, so that an overlap that is
	// no longer than this proves nothing.
	ClockSkew time.Duration
	// Settled says that nothing is under way any more: every task and run that the
	// history has a beginning of must have its end in it.
	Settled bool
}

// Violation is something that should never have happened.
type Violation struct {
	Rule string
	// Subject is the task or run it happened to.
	Subject string
	Text    string
	// Proof is the events that show it, in the order of the stream.
	Proof []contract.EventRecord
}

// String is the violation on one line, with its proof.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s: %s", v.Rule, v.Subject, v.Text)
	for i, e := range v.Proof {
		sep := ", "
		if i == 0 {
			sep = "; see "
		}
		fmt.Fprintf(&b, "%s#%d %s %s", sep, e.Seq, e.EventType, e.EventID)
	}
	return b.String()
}

// Check returns the violations in a history, those of one rule together, in the
// order of the rules.
func Check(records []contract.EventRecord, o Options) []Violation {
	h := &history{o: o, tasks: map[contract.TaskID]*life{}, runs: map[contract.RunID]*life{}}
	for _, e := range h.distinct(records) {
		switch {
		case e.TaskID != "":
			h.file(lifeOf(h.tasks, e.TaskID), e)
		case e.Category == contract.CategoryRun:
			h.file(lifeOf(h.runs, e.RunID), e)
		}
	}
	for _, id := range sortedKeys(h.tasks) {
		h.task(string(id), h.tasks[id])
	}
	for _, id := range sortedKeys(h.runs) {
		h.run(string(id), h.runs[id])
	}
	h.capacity()
	h.order()
	slices.SortStableFunc(h.found, func(a, b Violation) int { return strings.Compare(a.Rule, b.Rule) })
	return h.found
}

type history struct {
	o     Options
	tasks map[contract.TaskID]*life
	runs  map[contract.RunID]*life
	found []Violation
}

// life is the events of one task or run, in the order of the stream.
type life struct {
	events []entry
	queued *entry
	ends   []contract.EventRecord
}

type entry struct {
	contract.EventRecord
	attempt, index, slot int
}

func lifeOf[K comparable](m map[K]*life, id K) *life {
	if m[id] == nil {
		m[id] = &life{}
	}
	return m[id]
}

func sortedKeys[K cmp.Ordered](m map[K]*life) []K { return slices.Sorted(maps.Keys(m)) }

func (h *history) bad(rule, subject, text string, proof ...contract.EventRecord) {
	h.found = append(h.found, Violation{Rule: rule, Subject: subject, Text: text, Proof: proof})
}

func subjectOf(e contract.EventRecord) string {
	if e.TaskID != "" {
		return string(e.TaskID)
	}
	return string(e.RunID)
}

// distinct returns the records in the order of the stream, each once. The same
// record seen again is fine; the same event under two numbers, or two events
// under one, is not.
func (h *history) distinct(records []contract.EventRecord) []contract.EventRecord {
	sorted := slices.Clone(records)
	slices.SortStableFunc(sorted, func(a, b contract.EventRecord) int {
		return cmp.Or(cmp.Compare(a.Seq, b.Seq), strings.Compare(a.EventID, b.EventID))
	})
	var out []contract.EventRecord
	byID := map[string]contract.EventRecord{}
	for _, e := range sorted {
		if first, ok := byID[e.EventID]; ok {
			switch {
			case first.Seq != e.Seq:
				h.bad(Events, subjectOf(e), "the same event is stored twice", first, e)
			case first.EventType != e.EventType || string(first.Content) != string(e.Content):
				h.bad(Events, subjectOf(e), "one event was seen with two contents", first, e)
			}
			continue
		}
		if n := len(out); n > 0 && out[n-1].Seq == e.Seq {
			h.bad(Events, subjectOf(e), "two events have one number", out[n-1], e)
		}
		byID[e.EventID] = e
		out = append(out, e)
	}
	return out
}

// file puts an event into its life.
func (h *history) file(l *life, e contract.EventRecord) {
	var meta struct {
		Attempt int `json:"attempt"`
		Index   int `json:"message_index"`
	}
	var content struct {
		Slot int `json:"slot"`
	}
	if err := json.Unmarshal(e.Metadata, &meta); err != nil {
		h.bad(Events, subjectOf(e), "the metadata of an event cannot be read: "+err.Error(), e)
	}
	if e.EventType == contract.RecordAdmitted {
		if err := json.Unmarshal(e.Content, &content); err != nil {
			h.bad(Events, subjectOf(e), "the content of an event cannot be read: "+err.Error(), e)
		}
	}
	x := entry{EventRecord: e, attempt: meta.Attempt, index: meta.Index, slot: content.Slot}
	l.events = append(l.events, x)
	switch e.EventType {
	case contract.RecordQueued:
		l.queued = &x
	case contract.RecordEnd, contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
		l.ends = append(l.ends, e)
	}
}

// task judges the life of one task.
func (h *history) task(id string, l *life) {
	h.oneEnd(id, l)
	var over *entry // the end
	newest := 0     // the newest attempt that was heard of
	var newestEvent contract.EventRecord
	admitted := map[int]entry{}
	started := map[int]contract.EventRecord{}
	index := map[int]int{} // the newest step of each attempt
	for i := range l.events {
		e := l.events[i]
		if over != nil && e.EventType != contract.RecordEnd {
			h.bad(Fence, id, fmt.Sprintf("%s after the task's end", e.EventType), over.EventRecord, e.EventRecord)
		}
		if e.attempt > 0 && e.attempt < newest && e.EventType != contract.RecordEnd {
			h.bad(Fence, id, fmt.Sprintf("%s of attempt %d after attempt %d was heard of", e.EventType, e.attempt, newest), newestEvent, e.EventRecord)
		}
		if e.attempt > newest {
			newest, newestEvent = e.attempt, e.EventRecord
		}
		switch e.EventType {
		case contract.RecordQueued:
			if i > 0 && over == nil {
				h.bad(Events, id, "its first event is not that it was queued", l.events[0].EventRecord, e.EventRecord)
			}
		case contract.RecordAdmitted:
			admitted[e.attempt] = e
			if before, ok := admitted[e.attempt-1]; ok && before.slot != e.slot {
				h.bad(Capacity, id, fmt.Sprintf("attempt %d moved from slot %d to slot %d", e.attempt, before.slot, e.slot), before.EventRecord, e.EventRecord)
			}
			if s, ok := started[e.attempt]; ok {
				h.bad(Events, id, fmt.Sprintf("attempt %d began before it was admitted", e.attempt), s, e.EventRecord)
			}
		case contract.RecordStart:
			if _, ok := admitted[e.attempt]; !ok {
				h.bad(Events, id, fmt.Sprintf("attempt %d began and was not admitted", e.attempt), e.EventRecord)
			}
			started[e.attempt] = e.EventRecord
		case contract.RecordStep:
			if _, ok := started[e.attempt]; !ok {
				h.bad(Events, id, fmt.Sprintf("a step of attempt %d, which has not begun", e.attempt), e.EventRecord)
			}
			h.next(id, fmt.Sprintf("attempt %d", e.attempt), index[e.attempt], e)
			index[e.attempt] = e.index
		case contract.RecordEnd:
			over = &l.events[i]
		}
	}
}

// run judges the life of one run's own events.
func (h *history) run(id string, l *life) {
	h.oneEnd(id, l)
	index := 0
	ended := contract.EventRecord{}
	for _, e := range l.events {
		switch e.EventType {
		case contract.RecordRunMessage:
			h.next(id, "the run", index, e)
			index = e.index
		case contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
			if ended.EventID == "" {
				ended = e.EventRecord
			}
			continue
		}
		if ended.EventID != "" {
			h.bad(Fence, id, fmt.Sprintf("%s after the run's end", e.EventType), ended, e.EventRecord)
		}
	}
	if l.events[0].EventType != contract.RecordRunStarted {
		h.bad(Events, id, "its first event is not that it was started", l.events[0].EventRecord)
	}
}

func (h *history) oneEnd(id string, l *life) {
	switch {
	case len(l.ends) > 1:
		h.bad(OneEnd, id, fmt.Sprintf("it has %d ends", len(l.ends)), l.ends...)
	case len(l.ends) == 0 && h.o.Settled:
		h.bad(OneEnd, id, "it has no end", l.events[len(l.events)-1].EventRecord)
	}
}

func (h *history) next(id, whose string, before int, e entry) {
	if e.index != before+1 {
		h.bad(Events, id, fmt.Sprintf("message_index %d of %s follows %d", e.index, whose, before), e.EventRecord)
	}
}

// capacity looks for more slots in use than there are, and for one slot used
// twice. A slot is used from before the event that it was admitted until after
// the time of the end, so that what overlaps here has overlapped.
func (h *history) capacity() {
	type edge struct {
		at   time.Time
		take bool
		e    entry
	}
	var edges []edge
	for _, l := range h.tasks {
		var first *entry
		for i := range l.events {
			if l.events[i].EventType == contract.RecordAdmitted {
				first = &l.events[i]
				break
			}
		}
		if first == nil {
			continue
		}
		edges = append(edges, edge{first.CreatedAt, true, *first})
		if len(l.ends) > 0 {
			edges = append(edges, edge{l.ends[0].CreatedAt.Add(-h.o.ClockSkew), false, *first})
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
		return cmp.Compare(a.e.Seq, b.e.Seq)
	})
	held := map[contract.TaskID]entry{}
	slots := map[int]entry{}
	gone := map[contract.TaskID]bool{} // ended before it began, within the skew
	for _, x := range edges {
		id := x.e.TaskID
		if !x.take {
			gone[id] = true
			delete(held, id)
			if slots[x.e.slot].TaskID == id {
				delete(slots, x.e.slot)
			}
			continue
		}
		if gone[id] {
			continue
		}
		if other, ok := slots[x.e.slot]; ok && x.e.slot > 0 {
			h.bad(Capacity, string(id), fmt.Sprintf("it got slot %d, which %s had", x.e.slot, other.TaskID), inOrder(other, x.e)...)
		}
		held[id], slots[x.e.slot] = x.e, x.e
		if h.o.MaxRunning > 0 && len(held) > h.o.MaxRunning {
			h.bad(Capacity, string(id), fmt.Sprintf("%d tasks had a slot at once, allowed are %d", len(held), h.o.MaxRunning), inOrder(slices.Collect(maps.Values(held))...)...)
		}
	}
}

// order looks for tasks that were admitted before others that had been stored
// earlier. The time of a queued event is the server's own time of the request,
// which no two requests share.
func (h *history) order() {
	var first []entry
	for _, l := range h.tasks {
		if l.queued == nil {
			continue
		}
		for _, e := range l.events {
			if e.EventType == contract.RecordAdmitted {
				first = append(first, e)
				break
			}
		}
	}
	slices.SortFunc(first, func(a, b entry) int { return cmp.Compare(a.Seq, b.Seq) })
	var latest *entry // of those admitted so far, the one that was stored last
	for i := range first {
		e := &first[i]
		if latest != nil {
			a, b := h.tasks[latest.TaskID].queued, h.tasks[e.TaskID].queued
			if b.CreatedAt.Before(a.CreatedAt) {
				h.bad(Order, string(e.TaskID), fmt.Sprintf("%s was stored later and admitted earlier", latest.TaskID), inOrder(*b, *a, *latest, *e)...)
				continue
			}
		}
		latest = e
	}
}

func inOrder(entries ...entry) []contract.EventRecord {
	out := make([]contract.EventRecord, len(entries))
	for i, e := range entries {
		out[i] = e.EventRecord
	}
	slices.SortFunc(out, func(a, b contract.EventRecord) int { return cmp.Compare(a.Seq, b.Seq) })
	return out
}
