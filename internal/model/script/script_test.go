package script

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

func parse(t *testing.T, yaml string) *Model {
	t.Helper()
	s, err := Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return New("offline", s)
}

func user(s string) model.Message { return model.Message{Role: model.RoleUser, Text: s} }

// talk asks once and gives the conversation with the answer in it, and with a
// result for each call.
func talk(t *testing.T, m *Model, agent string, msgs []model.Message, results ...string) (model.Message, []model.Message) {
	t.Helper()
	res, err := m.Generate(t.Context(), model.Request{Agent: agent, Messages: msgs}, nil)
	if err != nil {
		t.Fatal(err)
	}
	msgs = append(append([]model.Message(nil), msgs...), res.Message)
	for i, r := range results {
		msgs = append(msgs, model.Message{Role: model.RoleTool, ToolCallID: res.Message.ToolCalls[i].ID, ToolName: res.Message.ToolCalls[i].Name, Text: r})
	}
	return res.Message, msgs
}

const flow = `
model: offline-1
rules:
  - agent: lead
    match: find
    turns:
      - text: looking
        tool_calls:
          - {name: grep, args: {pattern: "{{ .Input }}", max: 3, deep: [{a: "{{ .Agent }}"}], none: null}}
          - {name: ls, args: {}}
        usage: {input_tokens: 10, output_tokens: 5}
      - text: "found {{ .LastToolResult }} of {{ count .ToolResults }} in {{ count .AllToolResults }}"
        tool_calls: [{name: task, args: 'not {{ "json" }}'}]
  - agent: lead
    match_regex: '^path:\d+$'
    turns: [{text: matched the result}]
  - agent: "*"
    match: other
    turns: [{text: any agent, finish_reason: length}]
default:
  turns: [{text: "default for {{ .Agent }}"}]
`

// The turn is found by replaying the conversation; no state is needed.
func TestReplay(t *testing.T) {
	t.Parallel()
	ask := func(agent string, msgs []model.Message, results ...string) (model.Message, []model.Message) {
		t.Helper()
		return talk(t, parse(t, flow), agent, msgs, results...) // a new process every time
	}
	msgs := []model.Message{{Role: model.RoleSystem, Text: "be good"}, user("find x")}
	msg, msgs := ask("lead", msgs, "first", "second\nline")
	want := []model.ToolCall{
		{ID: "call_0_0", Name: "grep", Args: `{"deep":[{"a":"lead"}],"max":3,"none":null,"pattern":"find x"}`},
		{ID: "call_0_1", Name: "ls", Args: `{}`},
	}
	if msg.Text != "looking" || msg.FinishReason != "tool_calls" || !reflect.DeepEqual(msg.ToolCalls, want) {
		t.Errorf("turn 1 = %+v, want %+v", msg, want)
	}
	msg, msgs = ask("lead", msgs, "path:7") // both results are one step
	if msg.Text != "found second\nline of 3 in 3" || msg.ToolCalls[0].Args != "not json" || msg.ToolCalls[0].ID != "call_1_0" {
		t.Errorf("turn 2 = %+v", msg)
	}
	msg, msgs = ask("lead", msgs) // no turn left: the result selects
	if msg.Text != "matched the result" || msg.FinishReason != "stop" {
		t.Errorf("turn 3 = %+v", msg)
	}
	msg, msgs = ask("lead", append(msgs, user("some other thing")))
	if msg.Text != "any agent" || msg.FinishReason != "length" {
		t.Errorf("turn 4 = %+v", msg)
	}
	msg, msgs = ask("lead", append(msgs, user("find y")), "a", "b")
	if msg.Text != "looking" || msg.ToolCalls[0].ID == want[0].ID {
		t.Errorf("turn 5 = %+v, want the rule from its start with new ids", msg)
	}
	if msg, _ = ask("lead", msgs); !strings.HasPrefix(msg.Text, "found b") {
		t.Errorf("turn 6 = %+v", msg)
	}
	// A note of the program's beside the results changes nothing (GUARD-06).
	if msg, _ = ask("lead", append(msgs, user("some other warning"))); !strings.HasPrefix(msg.Text, "found b") {
		t.Errorf("turn 6 with a note = %+v", msg)
	}
	if msg, _ = ask("general-purpose", []model.Message{user("find x")}); msg.Text != "default for general-purpose" {
		t.Errorf("another agent = %+v", msg)
	}
}

func TestResponse(t *testing.T) {
	t.Parallel()
	m := parse(t, flow)
	var shown strings.Builder
	var calls []string
	res, err := m.Generate(t.Context(), model.Request{Agent: "lead", Messages: []model.Message{user("find x")}}, func(d model.Delta) {
		shown.WriteString(d.Text)
		if d.ToolCall != "" {
			calls = append(calls, d.ToolCall)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if shown.String() != "looking" || !reflect.DeepEqual(calls, []string{"grep", "ls"}) {
		t.Errorf("shown = %q and %q", shown.String(), calls)
	}
	if want := (&contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}); !reflect.DeepEqual(res.Usage, want) || res.Model != "offline-1" || m.ModelName() != "offline-1" || m.Name() != "offline" {
		t.Errorf("response = %+v, want usage %+v", res, want)
	}
	// USAGE-06: what is not given stays absent.
	res, err = m.Generate(t.Context(), model.Request{Agent: "x", Messages: []model.Message{user("other")}}, nil)
	if err != nil || res.Usage != nil {
		t.Errorf("usage = %+v, %v; want none", res.Usage, err)
	}
	// Long texts come in several pieces that add up.
	long := strings.Repeat("wörter und mehr ", 30)
	pieces, all := 0, ""
	stream(model.Message{Text: long}, func(d model.Delta) { pieces++; all += d.Text })
	if pieces < 5 || all != long {
		t.Errorf("%d pieces give %q", pieces, all)
	}
}

func TestNoRule(t *testing.T) {
	t.Parallel()
	m := parse(t, `rules: [{match: x, turns: [{text: y}]}]`)
	msg, _ := talk(t, m, "bash", []model.Message{user("hello")})
	if !strings.Contains(msg.Text, `no rule for agent "bash"`) || !strings.Contains(msg.Text, "hello") || msg.FinishReason != "stop" {
		t.Errorf("answer = %+v", msg)
	}
	if msg, _ = talk(t, m, "bash", nil); !strings.Contains(msg.Text, "no rule") {
		t.Errorf("answer = %+v", msg)
	}
}

func attempt(m *Model, msgs []model.Message) string {
	res, err := m.Generate(context.Background(), model.Request{Agent: "a", Messages: msgs}, nil)
	var e *model.Error
	switch {
	case errors.As(err, &e):
		return string(e.Kind) + " " + e.Code
	case err != nil:
		return err.Error()
	}
	return res.Message.Text
}

// A retry of the same conversation gets the next turn; others are not touched.
func TestFaults(t *testing.T) {
	t.Parallel()
	m := parse(t, `
rules:
  - match: flaky
    turns:
      - {fault: http_500}
      - {fault: rate_limit}
      - {fault: timeout}
      - {fault: disconnect_mid_stream, text: half of this}
      - {text: first, tool_calls: [{name: ls, args: {}}]}
      - {fault: http_500}
      - {text: second}
  - match: dead
    turns: [{fault: http_500}]
`)
	first := []model.Message{user("flaky")}
	want := []string{"transient http_500", "transient rate_limited", "transient timeout", "transient disconnected", "first"}
	for round := range 2 { // after a success the faults are armed again
		for i, w := range want {
			if got := attempt(m, first); got != w {
				t.Errorf("round %d, attempt %d = %q, want %q", round, i, got, w)
			}
		}
	}
	if got := attempt(m, []model.Message{{ID: "other"}, user("flaky")}); got != want[0] {
		t.Errorf("another conversation = %q, want %q", got, want[0])
	}
	// The replay skips failed turns, also in another process.
	for range 4 {
		attempt(m, first)
	}
	_, msgs := talk(t, m, "a", first, "r")
	again := New("b", m.script)
	for i, w := range []string{"transient http_500", "second"} {
		if got := attempt(again, msgs); got != w {
			t.Errorf("step 2, attempt %d = %q, want %q", i, got, w)
		}
	}
	for range 3 {
		if got := attempt(m, []model.Message{user("dead")}); got != "transient http_500" {
			t.Errorf("attempt = %q, want the fault to stay", got)
		}
	}
}

func TestDisconnectStreamsHalf(t *testing.T) {
	t.Parallel()
	m := parse(t, `default: {turns: [{fault: disconnect_mid_stream, text: "0123456789"}]}`)
	shown := ""
	_, err := m.Generate(t.Context(), model.Request{Messages: []model.Message{user("x")}}, func(d model.Delta) { shown += d.Text })
	if err == nil || shown != "01234" {
		t.Errorf("shown = %q, error = %v; want half and an error", shown, err)
	}
}

func TestMalformedArgs(t *testing.T) {
	t.Parallel()
	m := parse(t, `default: {turns: [{fault: malformed_tool_args, tool_calls: [{name: ls, args: {path: somewhere}}, {name: ls, args: {}}]}, {text: ok}]}`)
	msg, msgs := talk(t, m, "a", []model.Message{user("x")}, "bad arguments", "bad arguments")
	if len(msg.ToolCalls) != 2 || strings.HasSuffix(msg.ToolCalls[0].Args, "}") || msg.ToolCalls[1].Args != `{"` {
		t.Errorf("calls = %+v, want broken arguments", msg.ToolCalls)
	}
	if msg, _ = talk(t, m, "a", msgs); msg.Text != "ok" {
		t.Errorf("next = %+v", msg)
	}
}

// The counters of faults do not grow without end.
func TestCountersAreBounded(t *testing.T) {
	t.Parallel()
	m := parse(t, `default: {turns: [{fault: timeout}]}`)
	for i := range maxArmed + 50 {
		attempt(m, []model.Message{user(fmt.Sprint(i))})
	}
	if len(m.tries) != maxArmed || len(m.order) != maxArmed {
		t.Errorf("%d counters in %d places, want %d", len(m.tries), len(m.order), maxArmed)
	}
}

// CANCEL-03: a delay ends with the context.
func TestDelay(t *testing.T) {
	t.Parallel()
	m := parse(t, `default: {turns: [{text: x, delay_ms: 60000}]}`)
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(stop) })
	start := time.Now()
	_, err := m.Generate(ctx, model.Request{Messages: []model.Message{user("x")}}, nil)
	if !errors.Is(err, stop) || time.Since(start) > 10*time.Second {
		t.Errorf("error = %v after %v, want the cause at once", err, time.Since(start))
	}
	m = parse(t, `default: {turns: [{text: x, delay_ms: 30}]}`)
	start = time.Now()
	if got := attempt(m, []model.Message{user("x")}); got != "x" || time.Since(start) < 30*time.Millisecond {
		t.Errorf("answer %q after %v, want x after 30 ms", got, time.Since(start))
	}
}

func TestTemplates(t *testing.T) {
	t.Parallel()
	msgs := []model.Message{
		user("the input"), {Role: model.RoleAssistant},
		{Role: model.RoleTool, ToolName: "old", Text: "z:1: z\n"}, {Role: model.RoleAssistant},
		{Role: model.RoleTool, ToolName: "grep", Text: "b:1: x\na:2: y\nnoise\n\nb:1: x\n"},
		{Role: model.RoleTool, ToolName: "ls", Text: "c:3: w"},
	}
	for tmpl, want := range map[string]string{
		`{{ .Agent }} {{ .Input }} {{ .LastToolResult }}`:                                                    "lead the input c:3: w",
		`{{ join "\n" .ToolResults | grep "^[a-z]+:[0-9]+:" | uniq | sort }}`:                                "a:2: y\nb:1: x\nc:3: w",
		`{{ join "\n" .ToolResults | grep "^[a-z]+:" | count }}`:                                             "4",
		`{{ range .AllToolResults }}{{ .Name }}={{ .Text | lines | count }} {{ end }}`:                       "old=1 grep=4 ls=1 ",
		`{{ (index .ToolResults 0).Text | grep "y" | indent 2 }}`:                                            "  a:2: y",
		`{{ .LastToolResult | grep "nope" | default "nothing" }}`:                                            "nothing",
		`{{ " x " | trim }}|{{ lines "a\n\nb" | join ", " }}|{{ json .Input }}|{{ (index .ToolResults 1) }}`: `x|a, b|"the input"|c:3: w`,
		`{{ lines "b\na\nb" | sort | uniq | join "," }}`:                                                     "a,b",
		`{{ "{{" }}`: "{{",
	} {
		tx, err := parseTemplate(tmpl)
		if err != nil {
			t.Errorf("%s: %v", tmpl, err)
			continue
		}
		got, err := text{tmpl: tx}.render(newView("lead", msgs))
		if err != nil || got != want {
			t.Errorf("%s = %q, %v; want %q", tmpl, got, err, want)
		}
	}
	for _, tmpl := range []string{`{{ range lines .Input }}{{ range $.AllToolResults }}{{ end }}{{ end }}{{ indent 200 "x" }}`, `{{ printf "%d" 1 }}`, `{{ .Nope }}`, `{{ grep "(" .Input }}`, `{{ count 1.5 }}`,
		`{{ define "a" }}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{{ template "a" . }}{{ end }}{{ template "a" . }}`} {
		tx, err := parseTemplate(tmpl)
		if err != nil {
			continue
		}
		if got, err := (text{tmpl: tx}).render(newView("lead", msgs)); err == nil {
			t.Errorf("%s = %d bytes, want an error", tmpl, len(got))
		}
	}
	m := parse(t, `default: {turns: [{text: "{{ .Nope }}"}]}`)
	if got := attempt(m, []model.Message{user("x")}); got != "permanent script" {
		t.Errorf("a broken template = %q", got)
	}
}

// A fault is told with its place and what would be right; all at once.
func TestParseErrors(t *testing.T) {
	t.Parallel()
	for yaml, want := range map[string]string{
		"":                                    "1:1: the file is empty",
		"[]":                                  "1:1: the script is a list; want a mapping",
		"rules: []":                           "1:1: the script has neither rules nor a default",
		"rulez: []":                           `1:1: the script has no key "rulez"; it has default, model, rules`,
		"rules: 3":                            "1:8: rules is int 3; want a list",
		"rules:\n  - {match: x}":              "2:5: rule has no turns",
		"rules:\n  - {match: 7, turns: [{}]}": "2:13: match is int 7; want a string",
		"rules:\n  - {match_regex: '(', turns: [{}]}":                             "2:19: match_regex: error parsing regexp",
		"rules:\n  - {turns: [{txet: x}]}":                                        `2:15: turn has no key "txet"`,
		"rules:\n  - {turns: [{fault: nope}]}":                                    `2:22: fault is "nope"; want one of`,
		"rules:\n  - {turns: [{delay_ms: -1}]}":                                   "2:25: delay_ms is -1; want 0 to 600000",
		"rules:\n  - {turns: [{delay_ms: soon}]}":                                 `2:25: delay_ms is the string "soon"; want a whole number`,
		"rules:\n  - {turns: [{text: '{{ nope }}'}]}":                             `2:21: template: template: text:1: function "nope" not defined`,
		"rules:\n  - {turns: [{fault: malformed_tool_args}]}":                     "needs tool_calls",
		"rules:\n  - {turns: [{tool_calls: [{name: x, args: [1]}]}]}":             "args is a list; want a mapping",
		"rules:\n  - {turns: [{tool_calls: [{name: x, args: {a: .nan}}]}]}":       "is no JSON number",
		"rules:\n  - {turns: [{tool_calls: [{name: x, args: {a: 2020-01-01}}]}]}": "cannot stand in arguments",
		"rules:\n  - {turns: [{usage: {input_tokens: x}}]}":                       "input_tokens is the string",
		"default: {}": "default has no turns",
		"rules: &a [{turns: [{text: x}]}]\ndefault: *a": "2:10: default is an alias; want a mapping",
		"rules:\n  - {agent: a, agent: b, turns: [{}]}": `key "agent" is given twice`,
		"rules: [": "test.yaml",
		"default: {turns: [{tool_calls: [{name: x, args: {a: " + strings.Repeat("[", 50) + strings.Repeat("]", 50) + "}}]}]}": "nest deeper",
		strings.Repeat("#", MaxBytes+1): "want at most 1048576",
	} {
		_, err := Parse("test.yaml", []byte(yaml))
		if !errors.Is(err, ErrScript) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "test.yaml") {
			t.Errorf("Parse(%.60q) = %v, want %q", yaml, err, want)
		}
	}
	_, err := Parse("f", []byte("rules:\n  - {a: 1}\n  - {b: 1, turns: [{c: 1}]}"))
	if err == nil || strings.Count(err.Error(), "has no key") != 3 {
		t.Errorf("Parse = %v, want all faults", err)
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := filepath.Join(dir, "s.yaml")
	if err := os.WriteFile(p, []byte(flow), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(p); err != nil {
		t.Error(err)
	}
	for _, p := range []string{dir, filepath.Join(dir, "none")} {
		if _, err := Load(p); err == nil {
			t.Errorf("Load(%s) = nil error", p)
		}
	}
}

// Any file is either refused or answers without a panic.
func FuzzParse(f *testing.F) {
	f.Add([]byte(flow))
	f.Add([]byte("rules:\n  - {turns: [{fault: timeout}, {text: x, tool_calls: [{name: a, args: 'x'}]}]}"))
	f.Add([]byte("default: {turns: [{tool_calls: [{name: x, args: {a: [1, {b: ~}]}}]}]}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Parse("f", b)
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		msgs := []model.Message{user("find"), {Role: model.RoleAssistant}, {Role: model.RoleTool, Text: "x"}}
		for n := range len(msgs) + 1 {
			_, _ = New("f", s).Generate(ctx, model.Request{Agent: "lead", Messages: msgs[:n]}, nil) // no panic
		}
	})
}
