package invariant

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// tape records events as the system would store them.
type tape struct {
	records []contract.EventRecord
	now     time.Time
}

func newTape() *tape { return &tape{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)} }

// add stores one event, a millisecond after the one before.
func (p *tape) add(task, typ string, attempt, number int) *tape {
	p.now = p.now.Add(time.Millisecond)
	content, metadata := map[string]any{"task_id": task}, map[string]any{}
	if attempt > 0 {
		metadata["attempt"] = attempt
	}
	e := contract.EventRecord{
		Seq: uint64(len(p.records) + 1), EventID: fmt.Sprintf("%s.%d.%s", task, attempt, typ), RunID: "r_1", TaskID: contract.TaskID(task),
		EventType: typ, Category: contract.CategorySubagent, CreatedAt: p.now,
	}
	switch typ {
	case contract.RecordQueued:
		content["subagent_type"], content["queue_position"] = "general-purpose", 0
	case contract.RecordAdmitted:
		content["slot"], content["waited_ms"] = number, 1
	case contract.RecordStart:
		content["subagent_type"], content["executor"] = "general-purpose", "ex-1"
	case contract.RecordStep, contract.RecordRunMessage:
		metadata["message_index"] = number
		content["message_index"], content["kind"], content["text"], content["truncated"] = number, "ai", "a step", false
		e.EventID += fmt.Sprint(".", number)
	case contract.RecordEnd:
		e.EventID = task + ".end"
		content["status"], content["duration_ms"], content["queue_ms"] = "failed", 1, 1
	}
	if strings.HasPrefix(typ, "run.") {
		e.TaskID, e.RunID, e.Category = "", contract.RunID(task), contract.CategoryRun
		content["run_id"], content["input"], content["status"] = task, "", strings.TrimPrefix(typ, "run.")
	}
	e.Content, _ = json.Marshal(content)
	e.Metadata, _ = json.Marshal(metadata)
	p.records = append(p.records, e)
	return p
}

func (p *tape) queued(task string) *tape { return p.add(task, contract.RecordQueued, 0, 0) }
func (p *tape) admit(task string, slot int) *tape {
	return p.add(task, contract.RecordAdmitted, 1, slot)
}
func (p *tape) start(task string) *tape       { return p.add(task, contract.RecordStart, 1, 0) }
func (p *tape) step(task string, n int) *tape { return p.add(task, contract.RecordStep, 1, n) }
func (p *tape) end(task string) *tape         { return p.add(task, contract.RecordEnd, 1, 0) }

func (p *tape) check() []Violation { return Check(p.records, Options{MaxRunning: 2, Settled: true}) }

// good is a history with a bit of everything that may happen.
func good() *tape {
	p := newTape().add("r_1", contract.RecordRunStarted, 0, 0).add("r_1", contract.RecordRunMessage, 0, 1)
	p.queued("a").queued("b").queued("c").queued("d")
	p.admit("a", 1).admit("b", 2).start("b").start("a").step("a", 1).step("b", 1).step("a", 2)
	// d is cancelled while it waits; b is handed back and granted again in its slot.
	p.add("d", contract.RecordEnd, 0, 0)
	p.add("b", contract.RecordAdmitted, 2, 2).add("b", contract.RecordStart, 2, 0).add("b", contract.RecordStep, 2, 1)
	// The slot is free with the record, so c may be admitted before the event of a's
	// end is stored, but not before its time.
	p.end("a").admit("c", 1)
	n := len(p.records)
	p.records[n-1].Seq, p.records[n-2].Seq = p.records[n-2].Seq, p.records[n-1].Seq
	p.start("c").add("b", contract.RecordEnd, 2, 0).end("c")
	return p.add("r_1", contract.RecordRunMessage, 0, 2).add("r_1", contract.RecordRunCompleted, 0, 0)
}

// I1, I2, I4, I5, I6: what may happen is not complained of, in whatever order
// and however often it is told.
func TestGoodHistory(t *testing.T) {
	t.Parallel()
	p := good()
	for round := range 20 {
		if found := p.check(); len(found) > 0 {
			t.Fatalf("round %d: %v", round, found)
		}
		p.records = append(p.records, p.records[rand.IntN(len(p.records))])
		rand.Shuffle(len(p.records), func(i, j int) { p.records[i], p.records[j] = p.records[j], p.records[i] })
	}
	if found := Check(nil, Options{Settled: true}); len(found) > 0 {
		t.Errorf("an empty history: %v", found)
	}
}

// Each rule finds what breaks it, and nothing else.
func TestViolations(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, rule, text string
		proof            int
		tape             *tape
	}{
		{"three in two slots", Capacity, "3 tasks had a slot", 3,
			newTape().queued("a").queued("b").queued("c").admit("a", 1).admit("b", 2).admit("c", 3).end("a").end("b").end("c")},
		{"one slot twice", Capacity, "slot 1, which a had", 2,
			newTape().queued("a").queued("b").admit("a", 1).admit("b", 1).end("a").end("b")},
		{"another slot for another attempt", Capacity, "from slot 1 to slot 2", 2,
			newTape().queued("a").admit("a", 1).add("a", contract.RecordAdmitted, 2, 2).add("a", contract.RecordEnd, 2, 0)},
		{"overtaken", Order, "b was stored later", 4,
			newTape().queued("a").queued("b").admit("b", 1).admit("a", 2).end("a").end("b")},
		{"no end", OneEnd, "no end", 1, newTape().queued("a").admit("a", 1)},
		{"two ends", OneEnd, "2 ends", 2, func() *tape {
			p := newTape().queued("a").admit("a", 1).end("a").end("a")
			p.records[3].EventID = "another"
			return p
		}()},
		{"a step after the end", Fence, "subagent.step after", 2, newTape().queued("a").admit("a", 1).start("a").end("a").step("a", 1)},
		{"queued after the end", Fence, "subagent.queued after", 2, newTape().add("a", contract.RecordEnd, 0, 0).queued("a")},
		{"an attempt that was replaced", Fence, "attempt 1 after attempt 2", 2,
			newTape().queued("a").admit("a", 1).start("a").add("a", contract.RecordAdmitted, 2, 1).step("a", 1).add("a", contract.RecordEnd, 2, 0)},
		{"a gap", Events, "message_index 3 of attempt 1 follows 1", 1,
			newTape().queued("a").admit("a", 1).start("a").step("a", 1).step("a", 3).end("a")},
		{"an event stored twice", Events, "stored twice", 2, newTape().queued("a").queued("a").admit("a", 1).end("a")},
		{"queued late", Events, "first event", 2, newTape().admit("a", 1).queued("a").end("a")},
		{"begun without a slot", Events, "was not admitted", 1, newTape().queued("a").start("a").end("a")},
		{"a step before the start", Events, "has not begun", 1, newTape().queued("a").admit("a", 1).step("a", 1).end("a")},
		{"two events under one number", Events, "one number", 2, func() *tape {
			p := newTape().queued("a").admit("a", 1).end("a")
			p.records[1].Seq = p.records[2].Seq
			return p
		}()},
		{"one event with two contents", Events, "two contents", 2, func() *tape {
			p := newTape().queued("a").admit("a", 1).end("a")
			other := p.records[2]
			other.Content = json.RawMessage(strings.Replace(string(other.Content), "failed", "cancelled", 1))
			p.records = append(p.records, other)
			return p
		}()},
		{"a message of the lead is missing", Events, "message_index 2 of the run follows 0", 1,
			newTape().add("r", contract.RecordRunStarted, 0, 0).add("r", contract.RecordRunMessage, 0, 2).add("r", contract.RecordRunFailed, 0, 0)},
		{"a run without a beginning", Events, "first event", 1, newTape().add("r", contract.RecordRunFailed, 0, 0)},
		{"a message after the run's end", Fence, "run.message after", 2,
			newTape().add("r", contract.RecordRunStarted, 0, 0).add("r", contract.RecordRunFailed, 0, 0).add("r", contract.RecordRunMessage, 0, 1)},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			found := c.tape.check()
			if len(found) != 1 || found[0].Rule != c.rule || !strings.Contains(found[0].Text, c.text) || len(found[0].Proof) != c.proof {
				t.Fatalf("found %v; want one of %s with %q and %d proofs", found, c.rule, c.text, c.proof)
			}
			if !slices.IsSortedFunc(found[0].Proof, func(a, b Evidence) int { return int(a.Seq) - int(b.Seq) }) {
				t.Errorf("the proof is not in order: %v", found[0])
			}
		})
	}
}

// I1: an overlap that the clocks can explain proves nothing.
func TestClockSkew(t *testing.T) {
	t.Parallel()
	p := newTape().queued("a").queued("b").admit("a", 1).admit("b", 1).end("a").end("b")
	if found := Check(p.records, Options{Settled: true, ClockSkew: time.Second}); len(found) != 0 {
		t.Error(found)
	}
	if found := Check(p.records, Options{Settled: true, ClockSkew: time.Millisecond / 2}); len(found) != 1 {
		t.Errorf("found %v, want the shared slot", found)
	}
}

// I4: a history that goes on may have tasks without an end.
func TestUnsettled(t *testing.T) {
	t.Parallel()
	p := newTape().queued("a").admit("a", 1)
	if found := Check(p.records, Options{}); len(found) != 0 {
		t.Error(found)
	}
}
