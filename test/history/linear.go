package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Two objects are looked at, each with the operations of real clients and the time
// from call to return. A history is right when each operation can be thought to
// happen at one moment of its time, so that all of them together are what the
// object's model says.
//
// A slot is held by at most one task: the first grant takes it, every later write
// that leaves the record alive keeps it, the end gives it back.
//
// A terminal record is written once: by whoever is first, executor or gate. Every
// other write is refused, and from then on everybody reads the same end and is told
// that a cancellation comes too late.

// SlotCall is an operation on a slot.
type SlotCall struct {
	// Op is acquire, keep or release.
	Op   string
	Pool contract.Pool
	Slot int
	Task contract.TaskID
}

// SlotModel is the model of all slots.
var SlotModel = porcupine.Model{
	Partition: partition(func(in any) string { c := in.(SlotCall); return fmt.Sprintf("%s/%d", c.Pool, c.Slot) }),
	Init:      func() any { return contract.TaskID("") },
	Step: func(state, input, _ any) (bool, any) {
		holder, c := state.(contract.TaskID), input.(SlotCall)
		switch c.Op {
		case "acquire":
			return holder == "", c.Task
		case "keep":
			return holder == c.Task, c.Task
		case "release":
			return holder == c.Task, contract.TaskID("")
		}
		return false, state
	},
	DescribeOperation: func(in, _ any) string {
		c := in.(SlotCall)
		return fmt.Sprintf("slot %d: %s by %s", c.Slot, c.Op, c.Task)
	},
}

// RecordCall is an operation on a task's record.
type RecordCall struct {
	// Op is write, purge or read of the record; cancel and get of the task, over the API.
	Op   string
	Task contract.TaskID
	// Expect is the revision that a write expects; without one it is a first write,
	// which expects the leader's.
	Expect uint64
	First  bool
	// End is the state that a write ends the task with; empty when it goes on.
	End contract.TaskStatus
}

// RecordReturn is what came of it.
type RecordReturn struct {
	// Refused: the write was, or the cancellation came too late.
	Refused bool
	// Seq is the revision that was written or read; 0 when there is none.
	Seq uint64
	// Status is what the API said, of a task that has ended.
	Status contract.TaskStatus
}

// recordState is the newest revision of a record, and the task's end.
type recordState struct {
	seq uint64
	end contract.TaskStatus
}

// RecordModel is the model of all terminal records.
var RecordModel = porcupine.Model{
	Partition: partition(func(in any) string { return string(in.(RecordCall).Task) }),
	Init:      func() any { return recordState{} },
	Step: func(state, input, output any) (bool, any) {
		s, c, r := state.(recordState), input.(RecordCall), output.(RecordReturn)
		switch c.Op {
		case "write", "purge":
			switch {
			case r.Refused && c.First:
				return true, s // whether the leader was deposed is another object's story
			case r.Refused:
				return s.seq != c.Expect, s
			case c.Op == "purge":
				return s.end != "" && s.seq == c.Expect && r.Seq > s.seq, recordState{r.Seq, s.end}
			case c.First:
				return s.seq == 0, recordState{r.Seq, c.End}
			}
			return s.end == "" && s.seq == c.Expect && r.Seq > s.seq, recordState{r.Seq, c.End}
		case "read":
			return s.seq == r.Seq, s
		case "cancel", "get":
			return s.end == r.Status, s
		}
		return false, s
	},
	DescribeOperation: func(in, out any) string {
		c, r := in.(RecordCall), out.(RecordReturn)
		what := c.Op
		switch {
		case c.First:
			what += " as the leader"
		case c.Op == "write" || c.Op == "purge":
			what += fmt.Sprintf(" over %d", c.Expect)
		}
		if c.End != "" {
			what += " the end " + string(c.End)
		}
		switch {
		case r.Refused && r.Status == "":
			return what + ": refused"
		case r.Status != "":
			return what + ": it has ended, " + string(r.Status)
		case c.Op == "cancel" || c.Op == "get":
			return what + ": it goes on"
		}
		return fmt.Sprintf("%s: revision %d", what, r.Seq)
	},
}

// partition tells objects of one model apart.
func partition(of func(any) string) func([]porcupine.Operation) [][]porcupine.Operation {
	return func(all []porcupine.Operation) [][]porcupine.Operation {
		byKey := map[string][]porcupine.Operation{}
		var keys []string
		for _, op := range all {
			k := of(op.Input)
			if byKey[k] == nil {
				keys = append(keys, k)
			}
			byKey[k] = append(byKey[k], op)
		}
		slices.Sort(keys)
		out := make([][]porcupine.Operation, len(keys))
		for i, k := range keys {
			out[i] = byKey[k]
		}
		return out
	}
}

// Linearizable checks a history within a time; what could not be decided by then
// counts as wrong. The error shows the operations on the object that is.
func Linearizable(m porcupine.Model, ops []porcupine.Operation, within time.Duration) error {
	end := time.Now().Add(within)
	one := m
	one.Partition = nil
	for _, part := range m.Partition(ops) {
		left := time.Until(end)
		if left <= 0 {
			return fmt.Errorf("not decided within %s", within)
		}
		res := porcupine.CheckOperationsTimeout(one, part, left)
		if res == porcupine.Ok {
			continue
		}
		slices.SortStableFunc(part, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
		var b strings.Builder
		fmt.Fprintf(&b, "a history of %d operations is not linearizable (%s):", len(part), res)
		for _, op := range part {
			back := "never"
			if op.Return != math.MaxInt64 {
				back = time.Duration(op.Return).String()
			}
			fmt.Fprintf(&b, "\n  %s to %s  %s", time.Duration(op.Call), back, m.DescribeOperation(op.Input, op.Output))
		}
		return errors.New(b.String())
	}
	return nil
}

// KeepRecords selects what is written to and read from the records of conn's
// bucket.
func KeepRecords(names contract.Names) func(subject string) bool {
	writes := contract.KVSubject(names.TaskBucket(), "task.")
	reads := "$JS.API.STREAM.MSG.GET." + contract.KVStream(names.TaskBucket())
	return func(subject string) bool { return strings.HasPrefix(subject, writes) || subject == reads }
}

// Operations are the operations on slots and records that clients have made on the
// wire. Whether a write without an answer was made is told by what the bucket
// stored: then it happened at some time after its call, and else never.
func Operations(names contract.Names, exchanges []Exchange, stored []invariant.Revision) (slots, records []porcupine.Operation, err error) {
	byWriter := map[string]uint64{}
	for _, r := range stored {
		if r.Record.Writer != "" {
			byWriter[r.Record.Writer] = r.Seq
		}
	}
	clients := map[string]int{}
	bucket := contract.KVSubject(names.TaskBucket(), "")
	for _, x := range exchanges {
		if _, ok := clients[x.Client]; !ok {
			clients[x.Client] = len(clients)
		}
		op := porcupine.Operation{ClientId: clients[x.Client], Call: int64(x.Call), Return: int64(x.Return)}
		if !x.Answered {
			op.Return = math.MaxInt64
		}
		if !strings.HasPrefix(x.Subject, bucket) {
			in, out, ok, err := readOf(bucket, x)
			if err != nil {
				return nil, nil, err
			}
			if ok {
				op.Input, op.Output = in, out
				records = append(records, op)
			}
			continue
		}
		in, out, rec, ok, err := writeOf(bucket, x, byWriter)
		if err != nil {
			return nil, nil, err
		}
		if !ok {
			continue
		}
		op.Input, op.Output = in, out
		records = append(records, op)
		if out.Refused || rec.Slot == 0 || in.Op != "write" {
			continue
		}
		call := SlotCall{Op: "keep", Pool: rec.Pool, Slot: rec.Slot, Task: in.Task}
		switch {
		case in.First:
			call.Op = "acquire"
		case rec.State.Terminal():
			call.Op = "release"
		}
		op.Input, op.Output = call, nil
		slots = append(slots, op)
	}
	return slots, records, nil
}

// answer is what the server says to a write or a read.
type answer struct {
	Seq   uint64 `json:"seq"`
	Error *struct {
		Code int `json:"err_code"`
	} `json:"error"`
	Message *struct {
		Seq uint64 `json:"seq"`
	} `json:"message"`
}

// Codes of the server: the expectation did not hold; there is no message.
const (
	wrongLast = 10071
	notFound  = 10037
)

func writeOf(bucket string, x Exchange, stored map[string]uint64) (RecordCall, RecordReturn, contract.TaskRecord, bool, error) {
	var rec contract.TaskRecord
	in := RecordCall{Op: "write", Task: contract.TaskID(strings.TrimPrefix(x.Subject, bucket+"task."))}
	fail := func(err error) (RecordCall, RecordReturn, contract.TaskRecord, bool, error) {
		return in, RecordReturn{}, rec, false, fmt.Errorf("%s, write of %s: %w", x.Client, x.Subject, err)
	}
	var a answer
	if x.Answered && json.Unmarshal(x.Answer, &a) != nil {
		return fail(fmt.Errorf("answer %.100q", x.Answer))
	}
	if (bus.Message{Header: x.Header}).Deleted() {
		in.Op = "purge"
	} else {
		var err error
		if rec, err = contract.DecodeTaskRecord(x.Data); err != nil {
			return fail(err)
		}
		if rec.State.Terminal() {
			in.End = rec.State.Status()
		}
	}
	expect, err := strconv.ParseUint(x.Header.Get("Nats-Expected-Last-Subject-Sequence"), 10, 64)
	if err != nil {
		return fail(errors.New("it expects nothing"))
	}
	in.Expect, in.First = expect, x.Header.Get("Nats-Expected-Last-Subject-Sequence-Subject") != ""
	switch {
	case x.Answered && a.Error == nil && a.Seq > 0:
		return in, RecordReturn{Seq: a.Seq}, rec, true, nil
	case x.Answered && a.Error != nil && a.Error.Code == wrongLast:
		return in, RecordReturn{Refused: true}, rec, true, nil
	}
	// Nobody knows from the answer. Its writer is new for each write.
	seq, landed := stored[rec.Writer]
	return in, RecordReturn{Seq: seq}, rec, landed && rec.Writer != "", nil
}

func readOf(bucket string, x Exchange) (RecordCall, RecordReturn, bool, error) {
	var q struct {
		Last string `json:"last_by_subj"`
	}
	_ = json.Unmarshal(x.Data, &q)
	id, ok := strings.CutPrefix(q.Last, bucket+"task.")
	in := RecordCall{Op: "read", Task: contract.TaskID(id)}
	if !ok || !x.Answered {
		return in, RecordReturn{}, false, nil
	}
	var a answer
	if err := json.Unmarshal(x.Answer, &a); err != nil {
		return in, RecordReturn{}, false, fmt.Errorf("%s, read of %s: answer %.100q: %w", x.Client, id, x.Answer, err)
	}
	switch {
	case a.Message != nil:
		return in, RecordReturn{Seq: a.Message.Seq}, true, nil
	case a.Error != nil && a.Error.Code == notFound:
		return in, RecordReturn{}, true, nil
	}
	return in, RecordReturn{}, false, nil
}
