package invariant

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// History is what was recorded. Add events with [History.Event], the rest by its
// fields. It keeps of an event what the rules need, about 400 bytes, so that a
// long history fits into memory.
type History struct {
	// Mark says that the events up to this number were stored before Bucket and
	// Queue were read, and all others that are here after. With no Mark nothing is
	// known about their order, and they are not compared.
	Mark uint64
	// Bucket holds messages of the task bucket: those that it held when it was
	// read, or all that were ever stored. Where numbers are missing, something may
	// have happened that is not known.
	Bucket []Revision
	// Grants are grant messages that were read before the bucket was.
	Grants []Grant
	// Queue are the tasks whose requests were in the queue; QueueRead tells an empty
	// queue from one that was not looked at.
	Queue     []contract.TaskID
	QueueRead bool
	// Stored are the events that the event store holds, StoredTo is the number up to
	// which it has dealt with the stream, StoredFrom the first one that it has not let
	// go because of its age. No StoredTo does not look.
	Stored     []Held
	StoredFrom uint64
	StoredTo   uint64

	events []event
	texts  map[string]string
}

// Revision is a stored message of the task bucket.
type Revision struct {
	Seq uint64
	// At is the server's time.
	At  time.Time
	Key string
	// Deleted: it is the marker of a key that was deleted, purged or ran out.
	Deleted bool
	// Record of a task's key. Results and texts are not needed.
	Record contract.TaskRecord
	// Holder of the leader key.
	Holder string
}

// Grant is a stored grant message.
type Grant struct {
	Seq   uint64
	At    time.Time
	Grant contract.Grant
}

// Held is an event as the event store holds it.
type Held struct {
	Seq uint64
	sum uint64
}

// HeldOf is what is kept of an event of the store.
func HeldOf(e contract.EventRecord) Held { return Held{e.Seq, sum(e)} }

// sum is the hash of all that a store must give back as it got it. JSON that only
// differs in blanks, or in how <, > and & are written, is the same.
func sum(e contract.EventRecord) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, s := range []string{e.EventID, string(e.Tenant), string(e.ThreadID), string(e.RunID), string(e.TaskID), e.EventType, e.Category} {
		fmt.Fprintf(&h, "%d %s", len(s), s)
	}
	for _, raw := range []json.RawMessage{e.Content, e.Metadata} {
		b, err := json.Marshal(raw)
		if err != nil {
			b = raw // no JSON: as it is
		}
		fmt.Fprintf(&h, "%d %s", len(b), b)
	}
	fmt.Fprint(&h, e.CreatedAt.UnixMicro()) // what databases keep
	return h.Sum64()
}

// event is what the rules need of one.
type event struct {
	seq      uint64
	id       string
	task     string
	run      string
	thread   string
	tenant   string
	typ      string
	category string
	// executor, status, kind and pool are in the content of some types.
	executor, status, kind, pool string
	at                           time.Time
	content, sum                 uint64 // hashes of the content and of the whole
	attempt, index, slot         int
	// faults say how it breaks the contract.
	faults []fault
}

type fault struct{ rule, text string }

var seed = maphash.MakeSeed()

// Len is how many events the history holds, repeats included.
func (h *History) Len() int { return len(h.events) }

// Span is the time from the first to the last event.
func (h *History) Span() (from, to time.Time) {
	for _, e := range h.events {
		if from.IsZero() || e.at.Before(from) {
			from = e.at
		}
		if e.at.After(to) {
			to = e.at
		}
	}
	return from, to
}

// Tasks and runs that the events tell of.
func (h *History) Tasks() (tasks, runs int) {
	t, r := map[string]bool{}, map[string]bool{}
	for _, e := range h.events {
		if e.task != "" {
			t[e.task] = true
		} else {
			r[e.run] = true
		}
	}
	return len(t), len(r)
}

// Event adds an event. What is not needed of it is not kept.
func (h *History) Event(e contract.EventRecord) {
	x := event{
		seq: e.Seq, id: e.EventID, task: h.text(string(e.TaskID)), run: h.text(string(e.RunID)), thread: h.text(string(e.ThreadID)), tenant: h.text(string(e.Tenant)),
		typ: h.text(e.EventType), category: h.text(e.Category), at: e.CreatedAt, content: maphash.Bytes(seed, e.Content), sum: sum(e),
	}
	bad := func(rule, format string, a ...any) {
		x.faults = append(x.faults, fault{rule, fmt.Sprintf(format, a...)})
	}
	var meta struct {
		Attempt int `json:"attempt"`
		Index   int `json:"message_index"`
	}
	if err := json.Unmarshal(e.Metadata, &meta); err != nil {
		bad(Events, "the metadata of an event cannot be read: %v", err)
	}
	x.attempt, x.index = meta.Attempt, meta.Index
	var content map[string]json.RawMessage
	if err := json.Unmarshal(e.Content, &content); err != nil {
		bad(Events, "the content of an event cannot be read: %v", err)
	} else {
		for _, f := range promised[e.EventType] {
			if !f.kept(content[f.name]) {
				bad(Contract, "%s lacks %s, or it is not %s", e.EventType, f.name, f.what)
			}
		}
		x.slot = intOf(content["slot"])
		for name, to := range map[string]*string{"executor": &x.executor, "status": &x.status, "subagent_type": &x.kind, "pool": &x.pool} {
			*to = h.text(stringOf(content[name]))
		}
	}
	switch e.EventType {
	case contract.RecordEnd:
		if !contract.TaskStatus(x.status).Terminal() {
			bad(Contract, "the status of an end is %q", x.status)
		}
	case contract.RecordRunCompleted, contract.RecordRunFailed, contract.RecordRunCancelled:
		if x.status != "" && "run."+x.status != e.EventType {
			bad(Contract, "the status of %s is %q", e.EventType, x.status)
		}
	}
	if want, ok := categories[e.EventType]; ok && want != e.Category {
		bad(Contract, "the category of %s is %q", e.EventType, e.Category)
	}
	h.events = append(h.events, x)
}

// text is s, each text once.
func (h *History) text(s string) string {
	if s == "" {
		return ""
	}
	if known, ok := h.texts[s]; ok {
		return known
	}
	if h.texts == nil {
		h.texts = map[string]string{}
	}
	s = strings.Clone(s)
	h.texts[s] = s
	return s
}

// field is something that readers of a stored event rely on.
type field struct {
	name, what string
	kept       func(json.RawMessage) bool
}

func textField(name string) field {
	return field{name, "a text", func(b json.RawMessage) bool { return len(b) > 0 && b[0] == '"' }}
}

func numberField(name string) field {
	return field{name, "a whole number", func(b json.RawMessage) bool {
		var n int64
		return len(b) > 0 && b[0] != 'n' && json.Unmarshal(b, &n) == nil
	}}
}

func flagField(name string) field {
	return field{name, "true or false", func(b json.RawMessage) bool { return string(b) == "true" || string(b) == "false" }}
}

// promised are the fields that were there from the first version on, and that no
// later one may take away (I11). Types that are not here are newer than this.
var promised = map[string][]field{
	contract.RecordQueued:       {textField("task_id"), textField("subagent_type"), numberField("queue_position")},
	contract.RecordAdmitted:     {textField("task_id"), numberField("slot"), numberField("waited_ms")},
	contract.RecordStart:        {textField("task_id"), textField("subagent_type"), textField("executor")},
	contract.RecordStep:         {textField("task_id"), numberField("message_index"), textField("kind"), textField("text"), flagField("truncated")},
	contract.RecordEnd:          {textField("task_id"), textField("status"), numberField("duration_ms"), numberField("queue_ms")},
	contract.RecordRunStarted:   {textField("run_id"), textField("input")},
	contract.RecordRunMessage:   {textField("run_id"), numberField("message_index")},
	contract.RecordRunCompleted: {textField("run_id"), textField("status")},
	contract.RecordRunFailed:    {textField("run_id"), textField("status")},
	contract.RecordRunCancelled: {textField("run_id"), textField("status")},
}

var categories = map[string]string{
	contract.RecordQueued: contract.CategorySubagent, contract.RecordAdmitted: contract.CategorySubagent, contract.RecordStart: contract.CategorySubagent,
	contract.RecordStep: contract.CategorySubagent, contract.RecordEnd: contract.CategorySubagent,
	contract.RecordRunStarted: contract.CategoryRun, contract.RecordRunMessage: contract.CategoryRun, contract.RecordRunCompleted: contract.CategoryRun,
	contract.RecordRunFailed: contract.CategoryRun, contract.RecordRunCancelled: contract.CategoryRun,
}

func intOf(b json.RawMessage) int {
	n := 0
	if len(b) == 0 || json.Unmarshal(b, &n) != nil {
		return 0
	}
	return n
}

func stringOf(b json.RawMessage) string {
	s := ""
	if len(b) == 0 || json.Unmarshal(b, &s) != nil {
		return ""
	}
	return s
}

func (e *event) proof() Evidence {
	return Evidence{Source: FromEvents, Seq: e.seq, What: e.typ, ID: e.id, At: e.at}
}

func (e *event) subject() string {
	if e.task != "" {
		return e.task
	}
	return e.run
}

func (e *event) traits() traits {
	return traits{pool: contract.Pool(e.pool), tenant: contract.Tenant(e.tenant), thread: contract.ThreadID(e.thread), kind: e.kind}
}

// same reports whether two sightings of an event agree.
func (e *event) same(o *event) bool {
	return e.typ == o.typ && e.content == o.content && e.task == o.task && e.run == o.run && e.attempt == o.attempt && e.index == o.index
}

// distinct returns the events in the order of the stream, each once. The same
// event seen again is fine; the same event under two numbers, or two events
// under one, is not.
func (j *judge) distinct() []*event {
	sorted := make([]*event, len(j.h.events))
	for i := range j.h.events {
		sorted[i] = &j.h.events[i]
	}
	slices.SortStableFunc(sorted, func(a, b *event) int {
		return cmp.Or(cmp.Compare(a.seq, b.seq), strings.Compare(a.id, b.id))
	})
	out := sorted[:0]
	byID := make(map[string]*event, len(sorted))
	for _, e := range sorted {
		if first, ok := byID[e.id]; ok {
			switch {
			case first.seq != e.seq:
				j.bad(Events, e.subject(), "the same event is stored twice", first.proof(), e.proof())
			case !first.same(e):
				j.bad(Events, e.subject(), "one event was seen with two contents", first.proof(), e.proof())
			}
			continue
		}
		if n := len(out); n > 0 && out[n-1].seq == e.seq {
			j.bad(Events, e.subject(), "two events have one number", out[n-1].proof(), e.proof())
		}
		byID[e.id] = e
		out = append(out, e)
	}
	return out
}

// stored looks for events that the store has passed by and does not hold, or holds
// otherwise, and for what it holds and was never in the stream.
func (j *judge) stored(events []*event) {
	if j.h.StoredTo == 0 || len(events) == 0 {
		return
	}
	held := make(map[uint64]uint64, len(j.h.Stored))
	for _, s := range j.h.Stored {
		held[s.Seq] = s.sum
	}
	there := make(map[uint64]bool, len(events))
	for _, e := range events {
		there[e.seq] = true
		if e.seq > j.h.StoredTo {
			continue
		}
		switch sum, ok := held[e.seq]; {
		case ok && sum != e.sum:
			j.bad(Events, e.subject(), "the store holds an event otherwise than the stream", e.proof(), Evidence{Source: FromStore, Seq: e.seq})
		case !ok && e.seq >= j.h.StoredFrom:
			j.bad(Events, e.subject(), "an event of the stream is not in the store, which has come further", e.proof())
		}
	}
	for _, s := range j.h.Stored {
		if s.Seq >= events[0].seq && s.Seq <= j.h.StoredTo && !there[s.Seq] {
			j.bad(Events, fmt.Sprint("event ", s.Seq), "the store holds an event that the stream does not have", Evidence{Source: FromStore, Seq: s.Seq})
		}
	}
}
