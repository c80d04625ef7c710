package history

import (
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/herdgate/herdgate/pkg/contract"
)

// op is an operation from call to back.
func op(call, back int64, in, out any) porcupine.Operation {
	return porcupine.Operation{Call: call, Return: back, Input: in, Output: out}
}

func slotOp(call, back int64, what string, task contract.TaskID) porcupine.Operation {
	return op(call, back, SlotCall{Op: what, Slot: 1, Task: task}, nil)
}

func write(call, back int64, expect, seq uint64, end contract.TaskStatus) porcupine.Operation {
	return op(call, back, RecordCall{Op: "write", Task: "t", Expect: expect, First: expect == 0, End: end}, RecordReturn{Seq: seq, Refused: seq == 0})
}

func read(call, back int64, seq uint64) porcupine.Operation {
	return op(call, back, RecordCall{Op: "read", Task: "t"}, RecordReturn{Seq: seq})
}

func ask(call, back int64, what string, status contract.TaskStatus) porcupine.Operation {
	return op(call, back, RecordCall{Op: what, Task: "t"}, RecordReturn{Status: status, Refused: what == "cancel" && status != ""})
}

// I1, I4: the models take what may happen and refuse what may not.
func TestModels(t *testing.T) {
	t.Parallel()
	const done, failed = contract.TaskCompleted, contract.TaskFailed
	life := []porcupine.Operation{write(1, 2, 0, 5, ""), write(3, 4, 5, 6, "")}
	after := func(more ...porcupine.Operation) []porcupine.Operation {
		return append(append([]porcupine.Operation(nil), life...), more...)
	}
	cases := []struct {
		name  string
		model porcupine.Model
		ops   []porcupine.Operation
		good  bool
	}{
		{"one after the other", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 4, "keep", "a"), slotOp(5, 6, "release", "a"), slotOp(7, 8, "acquire", "b")}, true},
		{"at the same time, in one order", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 9, "release", "a"), slotOp(4, 8, "acquire", "b")}, true},
		{"two slots", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), op(3, 4, SlotCall{Op: "acquire", Slot: 2, Task: "b"}, nil)}, true},
		{"two holders", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 4, "acquire", "b")}, false},
		{"two holders at the same time", SlotModel, []porcupine.Operation{slotOp(1, 4, "acquire", "a"), slotOp(2, 3, "acquire", "b")}, false},
		{"taken before it was given back", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 4, "acquire", "b"), slotOp(5, 6, "release", "a")}, false},
		{"given back by another", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 4, "release", "b")}, false},
		{"kept after it was given back", SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a"), slotOp(3, 4, "release", "a"), slotOp(5, 6, "keep", "a")}, false},

		{"one winner", RecordModel, after(write(5, 9, 6, 7, done), write(6, 8, 6, 0, failed), read(10, 11, 7), ask(12, 13, "cancel", done), ask(14, 15, "get", done)), true},
		{"read before or after", RecordModel, after(write(5, 9, 6, 7, done), read(6, 8, 6), read(6, 8, 7)), true},
		{"cancelled just before", RecordModel, after(write(5, 9, 6, 7, done), ask(6, 8, "cancel", ""), ask(10, 11, "get", done)), true},
		{"two winners", RecordModel, after(write(5, 9, 6, 7, done), write(6, 8, 6, 8, failed)), false},
		{"an end that changes", RecordModel, after(write(5, 6, 6, 7, done), write(7, 8, 7, 8, failed)), false},
		{"an end that is taken back", RecordModel, after(write(5, 6, 6, 7, done), write(7, 8, 7, 8, "")), false},
		{"granted over an end", RecordModel, after(write(5, 6, 6, 7, done), write(7, 8, 0, 8, "")), false},
		{"a read that goes back", RecordModel, after(write(5, 6, 6, 7, done), read(7, 8, 6)), false},
		{"two readers that disagree", RecordModel, after(write(5, 20, 6, 7, done), read(6, 7, 7), read(8, 9, 6)), false},
		{"refused although nothing had moved", RecordModel, after(write(5, 6, 6, 0, done)), false},
		{"told another end", RecordModel, after(write(5, 6, 6, 7, done), ask(7, 8, "get", failed)), false},
		{"a cancellation that was taken too late", RecordModel, after(write(5, 6, 6, 7, done), ask(7, 8, "cancel", "")), false},
		{"told an end that is not there yet", RecordModel, after(ask(5, 6, "cancel", done), write(7, 8, 6, 7, done)), false},
	}
	for _, c := range cases {
		err := Linearizable(c.model, c.ops, 10*time.Second)
		if (err == nil) != c.good {
			t.Errorf("%s: %v", c.name, err)
		}
		if err != nil && !strings.Contains(err.Error(), "Illegal") {
			t.Errorf("%s: %v; want it found illegal", c.name, err)
		}
	}
}

// What cannot be decided in time is not right.
func TestUndecidedIsWrong(t *testing.T) {
	t.Parallel()
	if err := Linearizable(SlotModel, []porcupine.Operation{slotOp(1, 2, "acquire", "a")}, 0); err == nil {
		t.Error("no time at all was enough")
	}
}

// What the tap makes of the bytes of a connection, however they are cut.
func TestProtocol(t *testing.T) {
	t.Parallel()
	const stream = "CONNECT {}\r\nPUB a _INBOX.1 2\r\nhi\r\nHPUB b _INBOX.2 18 20\r\nNATS/1.0\r\nA: b\r\n\r\nyo\r\nPING\r\nPUB quiet 0\r\n\r\n" +
		"MSG _INBOX.1 7 4\r\n{}\r\n\r\nHMSG c 7 r 12 12\r\nNATS/1.0\r\n\r\n\r\n"
	for size := 1; size < 40; size++ {
		var got []string
		p := protocol{each: func(m wireMessage) {
			got = append(got, m.subject+" "+m.reply+" "+m.header().Get("A")+" "+string(m.body()))
		}}
		for rest := stream; rest != ""; {
			n := min(size, len(rest))
			p.feed([]byte(rest[:n]))
			rest = rest[n:]
		}
		if want := "a _INBOX.1  hi|b _INBOX.2 b yo|quiet   |_INBOX.1   {}\r\n|c r  "; strings.Join(got, "|") != want {
			t.Fatalf("in pieces of %d: %q, want %q", size, strings.Join(got, "|"), want)
		}
	}
}
