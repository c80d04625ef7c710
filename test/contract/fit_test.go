package contract

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// author writes texts and records by chance, at and around every bound.
type author struct{ *rand.Rand }

// text is what a model or a tool may say: some characters take one byte, some four,
// some become six in JSON, some are none.
func (a author) text(lengths ...int) string {
	unit := []string{"a", "界", "😀", "<", "\x01", "\"\\", "e\u0301", "\u2028", "\xff", "\x00", "\xed\xa0\x80", "line\r\n"}[a.IntN(12)]
	n := lengths[a.IntN(len(lengths))]
	return strings.Repeat(unit, n/max(1, utf8.RuneCountInString(unit))) + []string{"", "z", "界"}[a.IntN(3)]
}

func (a author) long() string { return a.text(0, 1, 500, 8191, 8192, 8193, 30_000, 70_000) }
func (a author) name() string { return a.text(1, 20, 127, 128, 129, 500) }
func (a author) id(prefix string) string {
	return prefix + strings.Repeat("i", []int{1, 30, 64 - len(prefix)}[a.IntN(3)])
}

func (a author) usage() *contract.Usage {
	if a.IntN(3) == 0 {
		return nil
	}
	n := []int64{0, 1, 1 << 53, 1<<63 - 1}[a.IntN(4)]
	return &contract.Usage{InputTokens: n, OutputTokens: n, TotalTokens: n}
}

// message is a message and the arguments of its calls as the text that is counted.
func (a author) message() (m model.Message, args []string) {
	m = model.Message{Role: model.RoleAssistant, Text: a.long()}
	if a.IntN(3) == 0 {
		m.Role, m.ToolName = model.RoleTool, a.name()
		return m, nil
	}
	for range []int{0, 1, 3, 255, 257}[a.IntN(5)] {
		text := event.Sanitize(a.text(0, 10, 200, 8191, 9000))
		if a.IntN(2) == 0 {
			b, err := json.Marshal(map[string]string{"k": text})
			if err != nil {
				panic(err)
			}
			text = string(b)
		}
		m.ToolCalls = append(m.ToolCalls, model.ToolCall{ID: "c", Name: a.name(), Args: text})
		args = append(args, text)
	}
	return m, args
}

// told is an event, and how to see from its data as it was read that it says what it
// was made of, or less with a flag.
type told struct {
	ev    envelope.Event
	check func(t *testing.T, data []byte)
}

// isCut checks a text that may have been cut: it begins as the whole one does, and
// is flagged if and only if something is missing.
func isCut(t *testing.T, what, got, whole string, flag bool) {
	t.Helper()
	whole = event.Sanitize(whole)
	if !strings.HasPrefix(whole, got) || !utf8.ValidString(got) {
		t.Errorf("%s is no beginning of what it was: %.80q of %.80q", what, got, whole)
	}
	if cut := got != whole; cut != flag {
		t.Errorf("%s has %d of %d bytes, and its flag says %v", what, len(got), len(whole), flag)
	}
}

func isCutStep(t *testing.T, got contract.Step, m model.Message, args []string) {
	t.Helper()
	isCut(t, "text", got.Text, m.Text, got.Truncated && got.Text != event.Sanitize(m.Text))
	if missing := got.Text != event.Sanitize(m.Text) || len(got.ToolCalls) < len(args); missing != got.Truncated {
		t.Errorf("the step has %d of %d calls, and its flag says %v", len(got.ToolCalls), len(args), got.Truncated)
	}
	for i, c := range got.ToolCalls {
		text := string(c.Args)
		var s string
		if json.Unmarshal(c.Args, &s) == nil {
			text = s
		}
		isCut(t, "arguments", text, args[i], c.ArgsTruncated)
	}
}

func read[T any](t *testing.T, b []byte) (data T) {
	t.Helper()
	if err := json.Unmarshal(b, &data); err != nil {
		t.Fatal(err)
	}
	return data
}

// events is one event of every type.
func (a author) events(t *testing.T) []told {
	t.Helper()
	at := time.Unix(1_800_000_000, 0)
	const source = "/herdgate/executor/ex-1"
	parent, state := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", strings.Repeat("<", []int{0, 30, envelope.MaxTraceState}[a.IntN(3)])
	rec := contract.TaskRecord{
		TaskID: contract.TaskID(a.id("t_")), RunID: contract.RunID(a.id("r_")), ThreadID: contract.ThreadID(strings.Repeat("界", []int{1, 170}[a.IntN(2)])), Tenant: contract.Tenant(a.id("x")),
		Attempt: 1 + a.IntN(3), Slot: a.IntN(9), QueuedAt: at, GrantedAt: &at, StartedAt: &at, FinishedAt: &at, SubagentType: a.name(), Description: a.long(), ModelName: a.name(),
		Result: a.long(), Error: a.long(), ErrorCode: contract.ErrLLM, StopReason: contract.StopTurnCapped, Usage: a.usage(), TraceParent: parent, TraceState: state,
	}
	run := contract.RunRecord{
		RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Input: a.long(), Output: a.text(0, 8193, 65_535, 65_536, 65_537, 200_000), Error: a.long(),
		Model: a.name(), Owner: a.name(), Usage: a.usage(), TraceParent: parent, CreatedAt: at, FinishedAt: &at,
	}
	req := contract.TaskRequest{TaskID: rec.TaskID, RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Subagent: contract.Subagent{Name: a.name()}, Description: rec.Description}
	msg, args := a.message()
	index := 1 + a.IntN(1_000_000)
	// A description has its own bound, 1,000 characters, and no flag.
	described := func(t *testing.T, b []byte) {
		t.Helper()
		want, _ := event.Truncate(event.Sanitize(rec.Description), contract.MaxDescriptionChars)
		if got := read[contract.TaskQueuedData](t, b).Description; got != want {
			t.Errorf("the description has %d bytes, want %d", len(got), len(want))
		}
	}
	list := []told{
		{event.Queued(req, parent, state, index, source, at), described},
		{event.Admitted(rec, source, at), func(*testing.T, []byte) {}},
		{event.Started(rec, contract.TaskStartedData{ModelName: rec.ModelName, Executor: a.name(), MaxTurns: 1, TimeoutSeconds: 1}, source, at), described},
		{event.Running(rec, index, event.BuildStep(msg), rec.ModelName, rec.Usage, source, at), func(t *testing.T, b []byte) {
			t.Helper()
			d := read[contract.TaskRunningData](t, b)
			isCutStep(t, d.Message, msg, args)
			if d.MessageIndex != index {
				t.Errorf("index %d, want %d", d.MessageIndex, index)
			}
		}},
		{event.RunStarted(run, source, at), func(t *testing.T, b []byte) {
			t.Helper()
			d := read[contract.RunStartedData](t, b)
			isCut(t, "input", d.Input, run.Input, d.Truncated)
		}},
		{event.RunMessage(run, index, event.BuildStep(msg), run.Model, run.Usage, source, at), func(t *testing.T, b []byte) {
			t.Helper()
			isCutStep(t, read[contract.RunMessageData](t, b).Message, msg, args)
		}},
	}
	for _, s := range []contract.State{contract.StateCompleted, contract.StateFailed, contract.StateCancelled, contract.StateTimedOut} {
		rec.State = s
		ev, err := event.Terminal(rec, source)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, told{ev, func(t *testing.T, b []byte) {
			t.Helper()
			d := read[contract.TaskEndData](t, b)
			if s == contract.StateCompleted {
				isCut(t, "result", d.Result, rec.Result, d.ResultTruncated)
			} else {
				isCut(t, "error", d.Error, rec.Error, d.ErrorTruncated)
			}
			if d.Status != s.Status() || (d.Usage == nil) != (rec.Usage == nil) || d.Usage != nil && *d.Usage != *rec.Usage {
				t.Errorf("status %s, usage %+v; want %s, %+v", d.Status, d.Usage, s, rec.Usage)
			}
		}})
	}
	for _, s := range []contract.RunStatus{contract.RunCompleted, contract.RunFailed, contract.RunCancelled} {
		run.Status = s
		ev, err := event.RunEnd(run, source)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, told{ev, func(t *testing.T, b []byte) {
			t.Helper()
			d := read[contract.RunEndData](t, b)
			isCut(t, "output", d.Output, run.Output, d.OutputTruncated)
			isCut(t, "error", d.Error, run.Error, d.ErrorTruncated)
		}})
	}
	return list
}

// FuzzEveryEventFits: I4, I6, I11, STEP-06, STEP-07, EVT-05, EVT-10, F-140. Whatever
// is told, in events of every type and with every bound of theirs reached at once, an
// event takes no more than the server does, from the smallest one on, and is valid
// against its schema. What was cut ends with a whole character and is flagged, nothing
// else is; ids stay.
func FuzzEveryEventFits(f *testing.F) {
	f.Add(uint64(1), uint32(0))
	f.Add(uint64(2), uint32(64<<10-event.MinPayload))
	f.Add(uint64(3), uint32(1<<20-event.MinPayload))
	var schemas map[string]*jsonschema.Schema
	f.Fuzz(func(t *testing.T, seed uint64, limit uint32) {
		if schemas == nil {
			schemas = compile(t, published(t))
		}
		limit = event.MinPayload + limit%(8<<20)
		for _, e := range (author{rand.New(rand.NewPCG(seed, 1))}).events(t) {
			b, err := event.Encode(e.ev, int(limit))
			if err != nil {
				t.Errorf("seed %d, %d bytes: %v", seed, limit, err)
				continue
			}
			total := len(b)
			for name, values := range e.ev.Headers() {
				for _, v := range values {
					total += len(name) + len(v) + len(": \r\n")
				}
			}
			if total > int(limit) || len(b) > envelope.MaxBytes {
				t.Errorf("%s has %d bytes with its headers, the server takes %d", e.ev.Type, total, limit)
			}
			if err := validate(schemas["event."+string(e.ev.Type)], b); err != nil {
				t.Errorf("%s is not of its schema: %v", e.ev.Type, err)
			}
			back, err := envelope.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			ids := e.ev
			ids.Data, back.Data = nil, append(json.RawMessage(nil), back.Data...)
			e.check(t, back.Data)
			back.Data = nil
			if !back.Time.Equal(ids.Time) {
				t.Errorf("%s: the time is %v, was %v", ids.Type, back.Time, ids.Time)
			}
			back.Time = ids.Time
			if string(encoded(back)) != string(encoded(ids)) {
				t.Errorf("an attribute has changed: %+v, was %+v", back, ids)
			}
			if t.Failed() {
				t.Fatalf("%s, seed %d, %d bytes: %.300s", e.ev.Type, seed, limit, b)
			}
		}
	})
}
