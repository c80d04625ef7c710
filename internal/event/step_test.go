package event

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// STEP-05: kind, text and the keys of each kind. STEP-10: this bounded step is
// what live events carry.
func TestBuildStep(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		m    model.Message
		want string
	}{
		{"answer", model.Message{Role: model.RoleAssistant, Text: "hi", ToolCalls: []model.ToolCall{{ID: "c1", Name: "ls", Args: ` {"path": "/a", "n": 1.0} `}}},
			`{"kind":"ai","text":"hi","truncated":false,"tool_calls":[{"name":"ls","args":{"path":"/a","n":1.0}}]}`},
		{"no calls", model.Message{Role: model.RoleAssistant}, `{"kind":"ai","text":"","truncated":false,"tool_calls":[]}`},
		{"broken arguments", model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{Name: "x", Args: `{"a":`}, {Name: "y"}, {Name: "z", Args: `[1]`}}},
			`{"kind":"ai","text":"","truncated":false,"tool_calls":[{"name":"x","args":"{\"a\":"},{"name":"y","args":""},{"name":"z","args":"[1]"}]}`},
		{"tool", model.Message{Role: model.RoleTool, Text: "out", ToolName: "bash"}, `{"kind":"tool","text":"out","truncated":false,"tool_name":"bash"}`},
		{"unknown tool", model.Message{Role: model.RoleTool, Text: "out"}, `{"kind":"tool","text":"out","truncated":false,"tool_name":null}`},
		{"unstorable", model.Message{Role: model.RoleAssistant, Text: "a\x00", ToolCalls: []model.ToolCall{{Name: "n\xff", Args: `{"k":"\u0000"}`}}},
			`{"kind":"ai","text":"a` + "\ufffd" + `","truncated":false,"tool_calls":[{"name":"n` + "\ufffd" + `","args":{"k":"` + "\ufffd" + `"}}]}`},
	} {
		b, err := json.Marshal(BuildStep(c.m))
		if err != nil {
			t.Fatal(err)
		}
		if string(b) != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, b, c.want)
		}
	}
}

// STEP-07: arguments at the bound stay structured, one more code point makes
// them a cut string.
func TestBuildStepArgumentBound(t *testing.T) {
	t.Parallel()
	frame := len(`{"c":""}`)
	for _, c := range []struct {
		chars int
		cut   bool
	}{{contract.MaxStepChars - frame, false}, {contract.MaxStepChars - frame + 1, true}} {
		args := `{"c":"` + strings.Repeat("界", c.chars) + `"}`
		call := BuildStep(model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{Name: "w", Args: args}}}).ToolCalls[0]
		if call.ArgsTruncated != c.cut {
			t.Errorf("%d characters: truncated = %v, want %v", c.chars, call.ArgsTruncated, c.cut)
		}
		var text string
		if c.cut {
			if err := json.Unmarshal(call.Args, &text); err != nil || utf8.RuneCountInString(text) != contract.MaxStepChars || !strings.HasPrefix(args, text) {
				t.Errorf("cut arguments = %.40s…, want the first %d code points as a string (%v)", call.Args, contract.MaxStepChars, err)
			}
		} else if string(call.Args) != args {
			t.Errorf("arguments at the bound = %.40s…, want them structured", call.Args)
		}
	}
}

// worstStep is as large as its parts may become: every character needs six
// bytes in JSON, and there are far too many calls.
func worstStep() model.Message {
	m := model.Message{Role: model.RoleAssistant, Text: strings.Repeat("\x01", 100_000)}
	for range 300 {
		m.ToolCalls = append(m.ToolCalls, model.ToolCall{Name: strings.Repeat("<", 500), Args: strings.Repeat("\x01", 9_000)})
	}
	return m
}

// STEP-06, STEP-07, EVT-10: whatever the model did, the event of its step can
// be published.
func TestStepAlwaysFits(t *testing.T) {
	t.Parallel()
	step := BuildStep(worstStep())
	if !step.Truncated || len(step.ToolCalls) != maxStepCalls {
		t.Fatalf("truncated = %v with %d calls", step.Truncated, len(step.ToolCalls))
	}
	usage := &contract.Usage{InputTokens: 1 << 60, OutputTokens: 1 << 60, TotalTokens: 1 << 61}
	rec := record(contract.StateRunning)
	for _, s := range []contract.Step{step, {Kind: "ai", Text: strings.Repeat("\x01", 1<<18), ToolCalls: []contract.StepCall{
		{Name: "x", Args: json.RawMessage(`not json`)}, {Name: "y"}, {Name: "z", Args: json.RawMessage(`"` + strings.Repeat("<", 1<<18) + `"`)},
	}}} {
		for _, ev := range []envelope.Event{
			Running(rec, 7, s, strings.Repeat("m", 1000), usage, "/herdgate/executor/x", time.Unix(1, 0)),
			RunMessage(run(contract.RunRunning), 7, s, "m", usage, "/herdgate/lead/x", time.Unix(1, 0)),
		} {
			b, err := envelope.Encode(ev)
			if err != nil {
				t.Fatalf("%s cannot be encoded: %v", ev.Type, err)
			}
			if len(b) > envelope.MaxBytes {
				t.Errorf("%s has %d bytes, want at most %d", ev.Type, len(b), envelope.MaxBytes)
			}
			if _, ok := Record(ev, 1); !ok {
				t.Errorf("no record of our own %s", ev.Type)
			}
		}
	}
}

// boundStep must not change what BuildStep made: a step is bounded once.
func TestBoundStepKeepsBuiltSteps(t *testing.T) {
	t.Parallel()
	for _, m := range []model.Message{
		worstStep(), {Role: model.RoleTool, Text: strings.Repeat("x", 9000), ToolName: "bash"},
		{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{Name: "a", Args: `{"b":[1,"<"]}`}, {Name: "c", Args: strings.Repeat("y", 9000)}}},
	} {
		step := BuildStep(m)
		want, _ := json.Marshal(step)
		got, _ := json.Marshal(boundStep(step))
		if string(got) != string(want) {
			t.Errorf("boundStep changed %.200s to %.200s", want, got)
		}
	}
}

func FuzzBuildStep(f *testing.F) {
	f.Add("text", `{"a":1}`, "name", true)
	f.Add("\x00\xff", `{"a":"\ud800"}`, "", false)
	f.Add("", `[`, "x", true)
	f.Fuzz(func(t *testing.T, text, args, name string, tool bool) {
		m := model.Message{Role: model.RoleAssistant, Text: text, ToolName: name, ToolCalls: []model.ToolCall{{Name: name, Args: args}}}
		if tool {
			m.Role = model.RoleTool
		}
		b, err := json.Marshal(BuildStep(m))
		if err != nil {
			t.Fatalf("BuildStep gives what cannot be encoded: %v", err)
		}
		if _, changed := SanitizeJSON(b); changed {
			t.Fatalf("step is not clean: %q", b)
		}
	})
}
