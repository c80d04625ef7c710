package event

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// worst are events that are as large as records of ours can make them: every text has
// characters that JSON makes six times longer, every name and id its full length.
func worst(t testing.TB) map[string]envelope.Event {
	t.Helper()
	long := strings.Repeat("<\x01\"\xff\x00", 1_500_000/5)
	name, id := strings.Repeat("<", 500), strings.Repeat("i", 64)
	usage := &contract.Usage{InputTokens: math.MaxInt64, OutputTokens: math.MaxInt64, TotalTokens: math.MaxInt64, CacheReadTokens: math.MaxInt64}
	rec := record(contract.StateRunning)
	rec.TaskID, rec.RunID, rec.ThreadID, rec.Tenant = contract.TaskID(id), contract.RunID(id), contract.ThreadID(strings.Repeat("\u2028", 512/3)), contract.Tenant(id)
	rec.TraceState, rec.SubagentType, rec.ModelName, rec.Executor, rec.Usage = strings.Repeat("<", envelope.MaxTraceState), name, name, name, usage
	rec.Description, rec.Result, rec.Error = long, long, long
	req := contract.TaskRequest{
		TaskID: rec.TaskID, RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Subagent: contract.Subagent{Name: name}, Description: long,
	}
	r := run(contract.RunCompleted)
	r.RunID, r.ThreadID, r.Tenant, r.Model, r.Owner, r.Input, r.Output, r.Error, r.Usage = rec.RunID, rec.ThreadID, rec.Tenant, name, name, long, long, long, usage
	src := "/herdgate/executor/" + strings.Repeat("<", 128)
	step := BuildStep(worstStep())
	at := time.Unix(1, 0)
	out := map[string]envelope.Event{
		"queued": Queued(req, traceparent, rec.TraceState, 1, src, at), "admitted": Admitted(rec, src, at),
		"started": Started(rec, contract.TaskStartedData{ModelName: name, Executor: name}, src, at),
		"running": Running(rec, 7, step, name, usage, src, at), "run_started": RunStarted(r, src, at), "run_message": RunMessage(r, 7, step, name, usage, src, at),
		"tool": Running(rec, 7, contract.Step{Kind: contract.StepTool, Text: long, ToolName: &name}, name, usage, src, at),
	}
	for _, s := range []contract.State{contract.StateCompleted, contract.StateFailed, contract.StateCancelled, contract.StateTimedOut} {
		rec.State, rec.FinishedAt = s, &at
		out[string(s)] = must(t.(*testing.T))(Terminal(rec, src))
	}
	for _, s := range []contract.RunStatus{contract.RunCompleted, contract.RunFailed, contract.RunCancelled} {
		r.Status = s
		out["run "+string(s)] = must(t.(*testing.T))(RunEnd(r, src))
	}
	return out
}

// I6, F-140, STEP-06, STEP-07, EVT-05: whatever is in an event, it fits, headers
// included, into what the server takes, from the smallest server on; what was cut for
// that is flagged, and the event is still one of its type.
func TestEncodeAlwaysFits(t *testing.T) {
	t.Parallel()
	for name, ev := range worst(t) {
		for _, limit := range []int{MinPayload, 64 << 10, 1 << 20, 0} {
			b, err := Encode(ev, limit)
			if err != nil {
				t.Errorf("%s, %d bytes: %v", name, limit, err)
				continue
			}
			if total := len(b) + headerBytes(ev); limit > 0 && total+512 > limit || len(b) > envelope.MaxBytes {
				t.Errorf("%s: %d bytes with headers, the server takes %d", name, total, limit)
			}
			if limit == MinPayload {
				if again, _ := Encode(ev, limit); string(again) != string(b) {
					t.Errorf("%s: the same event twice gives two texts", name)
				}
			}
			back, err := envelope.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := Record(back, 1); !ok || back.ID != ev.ID || back.Type != ev.Type {
				t.Errorf("%s, %d bytes: it has lost its shape: %.200s", name, limit, b)
			}
			text := string(back.Data)
			if flagged := strings.Contains(text, `truncated":true`); !flagged && !strings.Contains("queued admitted started", name) {
				t.Errorf("%s, %d bytes: nothing says that it was cut: %.200s", name, limit, text)
			}
		}
	}
}

// As much stays as fits: one more character would be too many.
func TestEncodeKeepsWhatFits(t *testing.T) {
	t.Parallel()
	const limit = MinPayload
	rec := record(contract.StateCompleted)
	rec.Result = strings.Repeat("界", contract.MaxStepChars)
	ev := must(t)(Terminal(rec, source))
	b, err := Encode(ev, limit)
	if err != nil {
		t.Fatal(err)
	}
	if left := limit - roomForExpectations - headerBytes(ev) - len(b); left < 0 || left > 3 {
		t.Errorf("%d bytes are left unused", left)
	}
	// What fits is what it always was, to the byte.
	want, err := envelope.Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := Encode(ev, 1<<20); err != nil || string(b) != string(want) {
		t.Errorf("an event that fits was changed: %v", err)
	}
}

// What cannot fit, or is no event, says so.
func TestEncodeRefuses(t *testing.T) {
	t.Parallel()
	ev := must(t)(Terminal(record(contract.StateCompleted), source))
	if _, err := Encode(ev, 600); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), "max_payload of 16384") {
		t.Errorf("err = %v", err)
	}
	ev.Type = "task_paused" // of a type whose texts nobody knows
	ev.Data = json.RawMessage(`{"x":"` + strings.Repeat("x", 1<<20) + `"}`)
	if _, err := Encode(ev, 1<<20); !errors.Is(err, ErrTooLarge) {
		t.Errorf("err = %v", err)
	}
	ev.ID = "a\r\nPUB x 0\r\n"
	if _, err := Encode(ev, 1<<20); !errors.Is(err, envelope.ErrInvalid) {
		t.Errorf("err = %v", err)
	}
}

// STATUS-16, USAGE-06: figures that are none are not told, and never keep an event
// from being made.
func TestUsageIsClean(t *testing.T) {
	t.Parallel()
	cost := func(f float64) *contract.Money { m := contract.Money(f); return &m }
	for _, c := range []struct {
		in   contract.Usage
		want string
	}{
		{contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3, CostUSD: cost(0.25)}, `{"input_tokens":1,"output_tokens":2,"total_tokens":3,"cost_usd":0.25}`},
		{contract.Usage{InputTokens: -1, OutputTokens: 2, TotalTokens: 3}, `null`},
		{contract.Usage{InputTokens: 1, CostUSD: cost(math.NaN())}, `{"input_tokens":1,"output_tokens":0,"total_tokens":0}`},
		{contract.Usage{InputTokens: 1, CostUSD: cost(math.Inf(1))}, `{"input_tokens":1,"output_tokens":0,"total_tokens":0}`},
		{contract.Usage{InputTokens: 1, CostUSD: cost(-3)}, `{"input_tokens":1,"output_tokens":0,"total_tokens":0}`},
	} {
		rec := record(contract.StateCompleted)
		rec.Usage = &c.in
		b, err := Encode(must(t)(Terminal(rec, source)), 0)
		if err != nil {
			t.Errorf("%+v: %v", c.in, err)
			continue
		}
		ev, _ := envelope.Decode(b)
		var data struct {
			Usage json.RawMessage `json:"usage"`
		}
		if err := json.Unmarshal(ev.Data, &data); err != nil {
			t.Fatal(err)
		}
		if got := string(data.Usage); got != c.want && (c.want != "null" || got != "") {
			t.Errorf("usage = %s, want %s", got, c.want)
		}
	}
}

// Whatever texts and arguments a model or a tool gives, the event can be made, read,
// stored, and read again by anyone with ordinary numbers; and it fits.
func FuzzEncode(f *testing.F) {
	f.Add("text", `{"a":1}`, "name", uint16(0))
	f.Add("\x00\xff\ud7ff\r\nPUB x", `{"a":"\ud800","n":1e400,"\u0000":[`+strings.Repeat("9", 400)+`]}`, "\xff", uint16(100))
	f.Add(strings.Repeat("<", 9000), strings.Repeat("[", 20000), "", uint16(1))
	f.Fuzz(func(t *testing.T, text, args, name string, more uint16) {
		rec := record(contract.StateFailed)
		rec.Error, rec.ModelName, rec.Description = text, name, text
		end, err := Terminal(rec, source)
		if err != nil {
			t.Fatal(err)
		}
		step := contract.Step{Kind: contract.StepAI, Text: text, ToolCalls: []contract.StepCall{{Name: name, Args: json.RawMessage(args)}}}
		for _, ev := range []envelope.Event{end, Running(rec, 1, step, name, nil, source, queued), Started(rec, contract.TaskStartedData{ModelName: name}, source, queued)} {
			b, err := Encode(ev, MinPayload+int(more))
			if err != nil {
				t.Fatalf("%s: %v", ev.Type, err)
			}
			var plain any // without any care for numbers
			if err := json.Unmarshal(b, &plain); err != nil || !utf8.Valid(b) {
				t.Fatalf("an ordinary reader cannot read %q: %v", b, err)
			}
			back, err := envelope.Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			got, ok := Record(back, 1)
			if !ok || strings.Contains(string(got.Metadata), "sanitized") {
				t.Fatalf("the event is stored (%v) as %s %s", ok, got.Content, got.Metadata)
			}
		}
	})
}
