package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// fakeModel answers as its function says, and keeps the requests.
type fakeModel struct {
	generate func(ctx context.Context, req model.Request, n int) (model.Response, error)

	mu       sync.Mutex
	requests []model.Request
}

func (*fakeModel) Name() string      { return "fake" }
func (*fakeModel) ModelName() string { return "fake-1" }
func (f *fakeModel) Generate(ctx context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	f.mu.Lock()
	f.requests = append(f.requests, req)
	n := len(f.requests)
	f.mu.Unlock()
	return f.generate(ctx, req, n)
}

// says gives answers in order; the last one again and again.
func says(answers ...model.Message) *fakeModel {
	return &fakeModel{generate: func(_ context.Context, _ model.Request, n int) (model.Response, error) {
		return model.Response{Message: answers[min(n, len(answers))-1], Model: "fake-1-2026"}, nil
	}}
}

func text(s string) model.Message { return model.Message{Text: s, FinishReason: "stop"} }

func calls(c ...model.ToolCall) model.Message {
	return model.Message{ToolCalls: c, FinishReason: "tool_calls"}
}

func call(id, name, args string) model.ToolCall {
	return model.ToolCall{ID: id, Name: name, Args: args}
}

// fakeTool does what its function says.
type fakeTool struct {
	name string
	do   func(ctx context.Context, c tool.Call) (tool.Result, error)
}

func (f *fakeTool) Spec() model.ToolSpec { return model.ToolSpec{Name: f.name} }
func (f *fakeTool) Call(ctx context.Context, c tool.Call) (tool.Result, error) {
	if f.do == nil {
		return tool.Result{Text: f.name + " got " + string(c.Args)}, nil
	}
	return f.do(ctx, c)
}

type sequenced struct{ *fakeTool }

func (sequenced) Sequenced() {}

type onFiles struct {
	*fakeTool
	writes bool
}

func (f onFiles) Writes() bool { return f.writes }

func user(s string) []model.Message {
	return []model.Message{{ID: "m0", Role: model.RoleUser, Text: s}}
}

// run drives a conversation that must end by itself.
func run(t *testing.T, cfg Config) Result {
	t.Helper()
	res, err := Run(limit(t), with(cfg), user("go"))
	if err != nil {
		t.Fatal(err)
	}
	pairs(t, res.Messages)
	return res
}

func with(cfg Config) Config {
	if cfg.MaxTurns == 0 {
		cfg.MaxTurns = 10
	}
	return cfg
}

func limit(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// pairs checks that every call is answered once, directly after its message.
func pairs(t testing.TB, messages []model.Message) {
	t.Helper()
	if why := unpaired(messages); why != "" {
		t.Errorf("%s in %+v", why, messages)
	}
}

func unpaired(messages []model.Message) string {
	open, seen := map[string]bool{}, map[string]bool{}
	for i, m := range messages {
		if m.Role == model.RoleTool {
			if !open[m.ToolCallID] {
				return fmt.Sprintf("message %d answers no open call", i)
			}
			delete(open, m.ToolCallID)
			continue
		}
		if len(open) > 0 {
			return fmt.Sprintf("message %d comes before %d results", i, len(open))
		}
		for _, c := range m.ToolCalls {
			if strings.TrimSpace(c.ID) == "" || strings.TrimSpace(c.Name) == "" || seen[c.ID] {
				return fmt.Sprintf("message %d has a call with id %q and name %q", i, c.ID, c.Name)
			}
			open[c.ID], seen[c.ID] = true, true
		}
	}
	if len(open) > 0 {
		return fmt.Sprintf("%d calls at the end have no result", len(open))
	}
	return ""
}

func results(messages []model.Message) (out []string) {
	for _, m := range messages {
		if m.Role == model.RoleTool {
			out = append(out, m.Text)
		}
	}
	return out
}

// EXEC-02, STEP-02, F-008: calls run side by side, and their results and what is
// told of them come in the order of the calls, whoever is done first.
func TestResultsInOrderOfCalls(t *testing.T) {
	t.Parallel()
	both := make(chan struct{})
	var here sync.WaitGroup
	here.Add(2)
	go func() { here.Wait(); close(both) }()
	secondDone := make(chan struct{})
	meet := func(ctx context.Context, c tool.Call) (tool.Result, error) {
		here.Done()
		select {
		case <-both:
		case <-ctx.Done():
			return tool.Result{}, ctx.Err()
		}
		if c.Position == 1 {
			close(secondDone)
		} else {
			<-secondDone
		}
		return tool.Result{Text: fmt.Sprint("message ", c.Message, " call ", c.Position), Metadata: map[string]any{"n": c.Position}}, nil
	}
	var told []string
	res := run(t, Config{
		Model: says(calls(call("a", "meet", ""), call("b", "meet", "{}")), text("done")),
		Tools: []tool.Tool{&fakeTool{"meet", meet}},
		OnMessage: func(_ context.Context, m model.Message, _ *contract.Usage, name string) error {
			told = append(told, string(m.Role)+":"+m.ID+":"+m.ToolCallID+":"+name)
			return nil
		},
	})
	if want := []string{"message 0 call 0", "message 0 call 1"}; !slices.Equal(results(res.Messages), want) {
		t.Errorf("results = %q, want %q", results(res.Messages), want)
	}
	if want := []string{"assistant:m1::fake-1-2026", "tool:m2:a:fake-1-2026", "tool:m3:b:fake-1-2026", "assistant:m4::fake-1-2026"}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	if res.End != EndAnswered || res.LastAssistant().Text != "done" || res.Turns != 2 || res.Messages[2].Metadata["n"] != 0 {
		t.Errorf("result = %+v", res)
	}
}

// No more tools run at once than MaxParallel says.
func TestMaxParallel(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	running, most := 0, 0
	busy := func(context.Context, tool.Call) (tool.Result, error) {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		defer func() { mu.Lock(); running--; mu.Unlock() }()
		return tool.Result{Text: "x"}, nil
	}
	var many []model.ToolCall
	for i := range 40 {
		many = append(many, call(fmt.Sprint(i), "busy", ""))
	}
	res := run(t, Config{Model: says(calls(many...), text("done")), Tools: []tool.Tool{&fakeTool{"busy", busy}}, MaxParallel: 3})
	if most > 3 || len(results(res.Messages)) != 40 {
		t.Errorf("%d ran at once, %d results; want at most 3, and 40", most, len(results(res.Messages)))
	}
}

// CAP, I2: sequenced calls begin in the order in which they were written, also
// when one between them fails before it begins.
func TestSequencedCalls(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var begun []string
	thirdWaits := make(chan struct{})
	tools := []tool.Tool{
		sequenced{&fakeTool{"task", func(ctx context.Context, c tool.Call) (tool.Result, error) {
			if c.ID == "third" {
				close(thirdWaits)
			}
			if c.ID == "first" {
				<-thirdWaits // the others get all the time they want to overtake
			}
			if err := tool.AwaitTurn(ctx); err != nil {
				return tool.Result{}, err
			}
			mu.Lock()
			begun = append(begun, c.ID)
			mu.Unlock()
			tool.EndTurn(ctx)
			return tool.Result{Text: c.ID}, nil
		}}},
	}
	run(t, Config{
		Model: says(calls(call("first", "task", "{}"), call("broken", "task", `{"prompt":`), call("third", "task", "{}")), text("done")),
		Tools: tools,
	})
	if want := []string{"first", "third"}; !slices.Equal(begun, want) {
		t.Errorf("begun = %q, want %q", begun, want)
	}
}

// TOOL-07, I2: a sequenced call that panics before its turn ends lets the next one begin.
func TestSequencedCallPanics(t *testing.T) {
	t.Parallel()
	task := sequenced{&fakeTool{"task", func(ctx context.Context, c tool.Call) (tool.Result, error) {
		if err := tool.AwaitTurn(ctx); err != nil {
			return tool.Result{}, err
		}
		if c.ID == "a" {
			panic("oh")
		}
		return tool.Result{Text: "ran"}, nil
	}}}
	res := run(t, Config{Model: says(calls(call("a", "task", ""), call("b", "task", "")), text("done")), Tools: []tool.Tool{task}})
	if r := results(res.Messages); !strings.Contains(r[0], "oh") || r[1] != "ran" {
		t.Errorf("results = %q", r)
	}
}

// Calls on files keep their order where one of them writes; reads side by side
// do not wait for each other.
func TestFileCallsInOrder(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var log []string
	note := func(s string) { mu.Lock(); log = append(log, s); mu.Unlock() }
	var readers sync.WaitGroup
	readers.Add(2)
	read := onFiles{&fakeTool{"read", func(_ context.Context, c tool.Call) (tool.Result, error) {
		if c.Position < 2 {
			readers.Done()
			readers.Wait() // both of them at once, or never
		}
		note(c.ID)
		return tool.Result{Text: c.ID}, nil
	}}, false}
	write := onFiles{&fakeTool{"write", func(_ context.Context, c tool.Call) (tool.Result, error) { note(c.ID); return tool.Result{}, nil }}, true}
	run(t, Config{
		Model: says(calls(call("r1", "read", ""), call("r2", "read", ""), call("w1", "write", ""), call("bad", "write", "nonsense"), call("w2", "write", ""), call("r3", "read", "")), text("done")),
		Tools: []tool.Tool{read, write},
	})
	if len(log) != 5 {
		t.Fatalf("log = %q", log)
	}
	slices.Sort(log[:2])
	if want := []string{"r1", "r2", "w1", "w2", "r3"}; !slices.Equal(log, want) {
		t.Errorf("log = %q, want %q", log, want)
	}
}

// TOOL-07, F-008, F-102, F-104, F-126: what is wrong with one call is told to the
// model; its siblings run.
func TestWrongCalls(t *testing.T) {
	t.Parallel()
	deep := `{"x":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}`
	for _, c := range []struct {
		name string
		call model.ToolCall
		want []string // in the result
	}{
		{"error", call("x", "fails", "{}"), []string{"Tool fails failed", "disk is full", "Go on"}},
		{"long error", call("x", "fails", `{"long":1}`), []string{"…"}},
		{"panic", call("x", "panics", "{}"), []string{"Tool panics failed", "kaboom"}},
		{"unknown", call("x", "nope", "{}"), []string{`no tool "nope"`, "good, fails, panics"}},
		{"blank name", call("x", " ", "{}"), []string{`no tool "unnamed_tool"`}},
		{"name that no provider takes", call("x", "functions.good!"+strings.Repeat("x", 300_000), "{}"), []string{"functions_good_xx"}},
		{"half an object", call("x", "good", `{"{"prompt":`), []string{"not JSON at character 5"}},
		{"single quotes", call("x", "good", `{'a': 1}`), []string{"not JSON at character 2"}},
		{"trailing comma", call("x", "good", `{"a":1,}`), []string{"not JSON at character 8"}},
		{"code fence", call("x", "good", "```json\n{}\n```"), []string{"not JSON at character 1"}},
		{"two objects", call("x", "good", `{} {}`), []string{"not JSON at character 4"}},
		{"prose", call("x", "good", "look into it"), []string{"not JSON", "look into it"}},
		{"raw newline", call("x", "good", "{\"a\":\"x\ny\"}"), []string{"not JSON at character 8"}},
		{"null", call("x", "good", "null"), []string{"want an object, got null"}},
		{"list", call("x", "good", "[]"), []string{"want an object, got []"}},
		{"string", call("x", "good", `"x"`), []string{"want an object"}},
		{"number", call("x", "good", "7"), []string{"want an object"}},
		{"bool", call("x", "good", "true"), []string{"want an object"}},
		{"300 KB", call("x", "good", strings.Repeat("no json ", 40_000)), []string{"not JSON", "…"}},
		{"too long", call("x", "good", `{"a":"`+strings.Repeat("x", MaxArgsBytes)+`"}`), []string{"the limit is 1048576"}},
		{"deep", call("x", "good", deep), []string{"nested too deeply"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := says(calls(call("s1", "good", ""), c.call, call("s2", "good", `{"n":2}`)), text("done"))
			res := run(t, Config{Model: m, Tools: []tool.Tool{
				&fakeTool{name: "good"},
				&fakeTool{"fails", func(_ context.Context, c tool.Call) (tool.Result, error) {
					if string(c.Args) != "{}" {
						return tool.Result{}, errors.New(strings.Repeat("界", 10_000))
					}
					return tool.Result{}, errors.New("disk is full")
				}},
				&fakeTool{"panics", func(context.Context, tool.Call) (tool.Result, error) { panic("kaboom") }},
			}})
			r := results(res.Messages)
			if len(r) != 3 || r[0] != "good got {}" || r[2] != `good got {"n":2}` {
				t.Fatalf("results = %q", r)
			}
			if !res.Messages[3].IsError || len(r[1]) > 2000 {
				t.Errorf("error %v, %d bytes; want an error of some hundred characters", res.Messages[3].IsError, len(r[1]))
			}
			for _, w := range c.want {
				if !strings.Contains(r[1], w) {
					t.Errorf("result = %q, want %q in it", r[1], w)
				}
			}
			replayed(t, m.requests[1].Messages)
		})
	}
}

// replayed checks that a strict provider takes a conversation back.
func replayed(t *testing.T, messages []model.Message) {
	t.Helper()
	pairs(t, messages)
	for _, m := range messages {
		for _, c := range m.ToolCalls {
			var args map[string]any
			if json.Unmarshal([]byte(c.Args), &args) != nil || args == nil {
				t.Errorf("arguments %.100q are replayed", c.Args)
			}
			if len(c.Name) == 0 || len(c.Name) > 64 || strings.ContainsAny(c.Name, " .!") {
				t.Errorf("name %.100q is replayed", c.Name)
			}
		}
	}
}

// TOOL-07: a panic is logged with its stack, by the log of the loop.
func TestPanicIsLogged(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	run(t, Config{
		Model: says(calls(call("x", "panics", "")), text("done")), Log: zerolog.New(&b),
		Tools: []tool.Tool{&fakeTool{"panics", func(context.Context, tool.Call) (tool.Result, error) { panic("kaboom") }}},
	})
	if !strings.Contains(b.String(), "kaboom") || !strings.Contains(b.String(), "agent_test.go") {
		t.Errorf("log = %s", b.String())
	}
}

// F-006, F-100: blank and repeated ids and blank names are made good, within a
// message and over the conversation; every call runs.
func TestCallIDs(t *testing.T) {
	t.Parallel()
	m := says(
		calls(call("call_1", "good", `{"n":1}`), call("call_1", "good", `{"n":2}`), call("", "good", `{"n":3}`), call(" ", " good ", `{"n":4}`)),
		calls(call("call_1", "good", `{"n":5}`), call("call_1_2", "good", `{"n":6}`)),
		text("done"))
	res := run(t, Config{Model: m, Tools: []tool.Tool{&fakeTool{name: "good"}}})
	want := []string{`good got {"n":1}`, `good got {"n":2}`, `good got {"n":3}`, `good got {"n":4}`, `good got {"n":5}`, `good got {"n":6}`}
	if !slices.Equal(results(res.Messages), want) {
		t.Errorf("results = %q", results(res.Messages))
	}
	if res.Messages[1].ToolCalls[0].ID != "call_1" {
		t.Errorf("the first id became %q", res.Messages[1].ToolCalls[0].ID)
	}
	for _, r := range m.requests {
		replayed(t, r.Messages)
	}
}

// F-106: a reply that was cut at the token limit runs none of its calls.
func TestCutReply(t *testing.T) {
	t.Parallel()
	ran := false
	cut := calls(call("a", "write", `{"path":"a.txt"}`), call("b", "write", `{}`))
	cut.FinishReason = "length"
	res := run(t, Config{Model: says(cut, text("done")), Tools: []tool.Tool{&fakeTool{"write", func(context.Context, tool.Call) (tool.Result, error) {
		ran = true
		return tool.Result{}, nil
	}}}})
	r := results(res.Messages)
	if ran || len(r) != 2 || !strings.Contains(r[0], "token limit") || !strings.Contains(r[1], "token limit") {
		t.Errorf("ran %v, results %q", ran, r)
	}
}

// F-010: text before calls is kept, and the calls run.
func TestTextWithCalls(t *testing.T) {
	t.Parallel()
	both := calls(call("a", "good", ""))
	both.Text = "Let me look."
	res := run(t, Config{Model: says(both, text("done")), Tools: []tool.Tool{&fakeTool{name: "good"}}})
	if res.Messages[1].Text != "Let me look." || len(results(res.Messages)) != 1 || res.LastAssistant().Text != "done" {
		t.Errorf("messages = %+v", res.Messages)
	}
}

// F-012: an empty answer is asked for again, a few times in all, and then stands.
func TestEmptyAnswers(t *testing.T) {
	t.Parallel()
	good := &fakeTool{name: "good"}
	for _, c := range []struct {
		name    string
		answers []model.Message
		turns   int
		last    string
	}{
		{"for ever", []model.Message{text("")}, 3, ""},
		{"blanks for ever", []model.Message{text(" \n\t")}, 3, " \n\t"},
		{"once", []model.Message{text(""), text("here")}, 2, "here"},
		{"over and over with calls between", []model.Message{text(""), calls(call("a", "good", "")), text(""), calls(call("b", "good", "")), text("")}, 5, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			told := 0
			res := run(t, Config{Model: says(c.answers...), Tools: []tool.Tool{good}, MaxTurns: 50, OnMessage: func(_ context.Context, m model.Message, _ *contract.Usage, _ string) error {
				if m.Role == model.RoleUser {
					t.Error("told of a message that is no step (STEP-01)")
				}
				told++
				return nil
			}})
			if res.End != EndAnswered || res.Turns != c.turns || res.LastAssistant().Text != c.last || told < c.turns {
				t.Errorf("end %s after %d turns with %q; want %d and %q", res.End, res.Turns, res.LastAssistant().Text, c.turns, c.last)
			}
		})
	}
}

// GUARD-11: one turn is one model call; the results of the last one's calls are there.
func TestTurnLimit(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{-1, 1, 3} {
		m := says(calls(call("a", "good", "")))
		res, err := Run(context.Background(), Config{Model: m, Tools: []tool.Tool{&fakeTool{name: "good"}}, MaxTurns: limit}, user("go"))
		want := max(limit, 1)
		if err != nil || res.End != EndTurns || res.Turns != want || len(m.requests) != want || len(results(res.Messages)) != want {
			t.Errorf("limit %d: %v, end %s after %d turns", limit, err, res.End, res.Turns)
		}
		pairs(t, res.Messages)
	}
}

var errNo = errors.New("not yours any more")

// EXEC-03, I5: when the gate refuses, no model call and no tool begins any more.
func TestGateRefuses(t *testing.T) {
	t.Parallel()
	m := says(text("x"))
	res, err := Run(context.Background(), with(Config{Model: m, Gate: func() error { return errNo }}), user("go"))
	if !errors.Is(err, errNo) || len(m.requests) != 0 || len(res.Messages) != 1 {
		t.Errorf("%v after %d model calls", err, len(m.requests))
	}
	asked, ran := 0, false
	_, err = Run(context.Background(), with(Config{
		Model: says(calls(call("a", "good", ""))), Tools: []tool.Tool{&fakeTool{"good", func(context.Context, tool.Call) (tool.Result, error) { ran = true; return tool.Result{}, nil }}},
		Gate: func() error {
			if asked++; asked > 1 {
				return errNo
			}
			return nil
		},
	}), user("go"))
	if !errors.Is(err, errNo) || ran {
		t.Errorf("%v, the tool ran: %v", err, ran)
	}
}

// EXEC-03, I5: the gate is asked when a tool really begins, not when it begins to
// wait, and a refusal stops what still runs.
func TestGateIsAskedAfterTheWait(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var shut bool
	began := make(chan struct{})
	slow := &fakeTool{"slow", func(ctx context.Context, _ tool.Call) (tool.Result, error) {
		close(began)
		<-ctx.Done() // nobody else stops it
		return tool.Result{}, ctx.Err()
	}}
	first := onFiles{&fakeTool{"first", func(context.Context, tool.Call) (tool.Result, error) {
		<-began
		mu.Lock()
		shut = true
		mu.Unlock()
		return tool.Result{}, nil
	}}, true}
	second := onFiles{&fakeTool{"second", func(context.Context, tool.Call) (tool.Result, error) {
		t.Error("a tool began after the gate was shut")
		return tool.Result{}, nil
	}}, true}
	_, err := Run(limit(t), with(Config{
		Model: says(calls(call("a", "slow", ""), call("b", "first", ""), call("c", "second", ""))), Tools: []tool.Tool{slow, first, second},
		Gate: func() error {
			mu.Lock()
			defer mu.Unlock()
			if shut {
				return errNo
			}
			return nil
		},
	}), user("go"))
	if !errors.Is(err, errNo) {
		t.Errorf("err = %v", err)
	}
}

// CANCEL-01: whoever waits for a place is not started when the work is over.
func TestCancelledBeforeAPlace(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(limit(t))
	n := 0
	_, err := Run(ctx, with(Config{
		MaxParallel: 1, Model: says(calls(call("a", "x", ""), call("b", "x", ""), call("c", "x", ""))),
		Tools: []tool.Tool{&fakeTool{"x", func(context.Context, tool.Call) (tool.Result, error) { n++; cancel(errNo); return tool.Result{}, nil }}},
	}), user("go"))
	if !errors.Is(err, errNo) || n != 1 {
		t.Errorf("%v after %d calls, want one", err, n)
	}
}

// EXEC-03: what cannot be recorded ends the loop.
func TestOnMessageRefuses(t *testing.T) {
	t.Parallel()
	for _, role := range []model.Role{model.RoleAssistant, model.RoleTool} {
		_, err := Run(context.Background(), with(Config{
			Model: says(calls(call("a", "good", ""))), Tools: []tool.Tool{&fakeTool{name: "good"}},
			OnMessage: func(_ context.Context, m model.Message, _ *contract.Usage, _ string) error {
				if m.Role == role {
					return errNo
				}
				return nil
			},
		}), user("go"))
		if !errors.Is(err, errNo) {
			t.Errorf("%s: %v", role, err)
		}
	}
}

// STATUS-05, STATUS-06: a provider's failure is a marked last message and a clean
// end; any other error is none of the conversation's.
func TestProviderFailure(t *testing.T) {
	t.Parallel()
	failing := &fakeModel{generate: func(context.Context, model.Request, int) (model.Response, error) {
		return model.Response{Usage: &contract.Usage{InputTokens: 3}}, fmt.Errorf("after 3 tries: %w", &model.Error{Kind: model.KindTransient, Code: "http_503", Message: "overloaded"})
	}}
	res := run(t, Config{Model: failing})
	last := res.LastAssistant()
	if res.End != EndAnswered || !last.ErrorFallback || !strings.Contains(last.Text, "overloaded") || !strings.Contains(last.ErrorDetail, "http_503") || len(failing.requests) != 1 {
		t.Errorf("last = %+v after %d calls", last, len(failing.requests))
	}
	if res.Usage == nil || res.Usage.TotalTokens != 3 || res.ModelName != "fake-1" {
		t.Errorf("usage = %+v of %q", res.Usage, res.ModelName)
	}
	ours := &fakeModel{generate: func(context.Context, model.Request, int) (model.Response, error) { return model.Response{}, errNo }}
	res, err := Run(context.Background(), with(Config{Model: ours}), user("go"))
	if !errors.Is(err, errNo) || res.LastAssistant() != nil {
		t.Errorf("%v, last = %+v", err, res.LastAssistant())
	}
	if text := run(t, Config{Model: says(text("The model provider failed: no"))}); text.LastAssistant().ErrorFallback {
		t.Error("prose was taken for a failure")
	}
}

// A fault of the program in one conversation does not take the process with it.
func TestModelPanics(t *testing.T) {
	t.Parallel()
	res, err := Run(context.Background(), with(Config{Model: &fakeModel{generate: func(_ context.Context, _ model.Request, n int) (model.Response, error) {
		if n == 2 {
			panic("kaboom")
		}
		return model.Response{Message: calls(call("a", "good", "")), Usage: &contract.Usage{InputTokens: 2}}, nil
	}}, Tools: []tool.Tool{&fakeTool{name: "good"}}}), user("go"))
	if err == nil || !strings.Contains(err.Error(), "kaboom") || res.Usage == nil || len(res.Messages) != 3 {
		t.Errorf("%v, result %+v", err, res)
	}
}

type speechless struct{ *fakeTool }

func (speechless) Spec() model.ToolSpec { panic("no words") }

// The same of what is asked before the first turn.
func TestToolCannotBeAsked(t *testing.T) {
	t.Parallel()
	res, err := Run(limit(t), with(Config{Model: says(text("done")), Tools: []tool.Tool{speechless{}}}), user("go"))
	if err == nil || !strings.Contains(err.Error(), "no words") || len(res.Messages) != 1 {
		t.Errorf("%v, result %+v", err, res)
	}
}

// The same beside a tool, in a goroutine of its own: the other tools end first.
func TestPanicBesideATool(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	var ended atomic.Bool
	began := make(chan struct{})
	res, err := Run(context.Background(), with(Config{
		Model: says(calls(call("a", "waits", ""), call("b", "waits", ""))),
		Gate: func() error {
			if asked.Add(1) == 3 { // after the model and the first tool
				<-began
				panic("kaboom")
			}
			return nil
		},
		Tools: []tool.Tool{&fakeTool{"waits", func(ctx context.Context, _ tool.Call) (tool.Result, error) {
			close(began)
			<-ctx.Done()
			ended.Store(true)
			return tool.Result{}, nil
		}}},
	}), user("go"))
	if fault.As(err) == nil || !strings.Contains(err.Error(), "kaboom") || !ended.Load() || len(res.Messages) != 2 {
		t.Errorf("%v, the other tool has ended: %v, result %+v", err, ended.Load(), res)
	}
}

// USAGE-01, USAGE-06, F-112: usage is summed; unknown is not zero; nothing is negative.
func TestUsage(t *testing.T) {
	t.Parallel()
	u := func(in, out, total, cached int64) *contract.Usage {
		return &contract.Usage{InputTokens: in, OutputTokens: out, TotalTokens: total, CacheReadTokens: cached}
	}
	for _, c := range []struct {
		reported []*contract.Usage
		want     *contract.Usage
	}{
		{[]*contract.Usage{nil, nil}, nil},
		{[]*contract.Usage{u(10, 5, 15, 4), u(20, 5, 0, 0)}, u(30, 10, 40, 4)},
		{[]*contract.Usage{nil, u(1, 1, 2, 0)}, u(1, 1, 2, 0)},
		{[]*contract.Usage{u(20, 0, 520, 0), u(-5, 3, -2, -7)}, u(20, 3, 523, 0)},
	} {
		var snapshots []*contract.Usage
		m := &fakeModel{}
		m.generate = func(_ context.Context, _ model.Request, n int) (model.Response, error) {
			msg := text("done")
			if n < len(c.reported) {
				msg = calls(call("", "good", ""))
			}
			return model.Response{Message: msg, Usage: c.reported[n-1]}, nil
		}
		res := run(t, Config{Model: m, Tools: []tool.Tool{&fakeTool{name: "good"}}, OnMessage: func(_ context.Context, _ model.Message, u *contract.Usage, _ string) error {
			snapshots = append(snapshots, u)
			return nil
		}})
		if !reflect.DeepEqual(res.Usage, c.want) || !reflect.DeepEqual(snapshots[len(snapshots)-1], c.want) {
			t.Errorf("usage = %+v, told %+v, want %+v", res.Usage, snapshots, c.want)
		}
	}
}

// CANCEL-01, CANCEL-03: when the work is cancelled while tools run, Run returns
// with the cause after all of them have, and keeps what was spent.
func TestCancelWhileToolsRun(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(context.Background())
	var running sync.WaitGroup
	running.Add(2)
	go func() { running.Wait(); cancel(errNo) }()
	var mu sync.Mutex
	returned := 0
	wait := func(ctx context.Context, _ tool.Call) (tool.Result, error) {
		running.Done()
		<-ctx.Done()
		mu.Lock()
		returned++
		mu.Unlock()
		return tool.Result{}, ctx.Err()
	}
	m := &fakeModel{generate: func(context.Context, model.Request, int) (model.Response, error) {
		return model.Response{Message: calls(call("a", "wait", ""), call("b", "wait", "")), Usage: &contract.Usage{InputTokens: 5}}, nil
	}}
	res, err := Run(ctx, with(Config{Model: m, Tools: []tool.Tool{&fakeTool{"wait", wait}}}), user("go"))
	if !errors.Is(err, errNo) || returned != 2 {
		t.Errorf("%v with %d tools returned", err, returned)
	}
	if res.Usage == nil || res.Usage.TotalTokens != 5 || len(results(res.Messages)) != 0 {
		t.Errorf("result = %+v", res)
	}
}

// CANCEL-01, CANCEL-03: cancelled during a model call, whose usage still counts.
func TestCancelWhileTheModelAnswers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(context.Background())
	m := &fakeModel{generate: func(context.Context, model.Request, int) (model.Response, error) {
		cancel(errNo)
		return model.Response{Message: text("too late"), Usage: &contract.Usage{InputTokens: 5}, Model: "m"}, nil
	}}
	res, err := Run(ctx, with(Config{Model: m}), user("go"))
	if !errors.Is(err, errNo) || res.LastAssistant() != nil || res.Usage == nil || res.Usage.TotalTokens != 5 || res.ModelName != "m" {
		t.Errorf("%v, result %+v", err, res)
	}
}

// F-020: a conversation that was left with open calls goes on with those, and
// those only, before the model is asked again.
func TestResumeWithOpenCalls(t *testing.T) {
	t.Parallel()
	var ran []string
	good := &fakeTool{"good", func(_ context.Context, c tool.Call) (tool.Result, error) {
		ran = append(ran, fmt.Sprint(c.ID, " ", c.Message, " ", c.Position))
		return tool.Result{Text: "now"}, nil
	}}
	history := append(user("go"),
		model.Message{ID: "m1", Role: model.RoleAssistant, Text: "first"},
		model.Message{ID: "m2", Role: model.RoleAssistant, ToolCalls: []model.ToolCall{call("a", "good", ""), call("b", "good", "")}},
		model.Message{ID: "m3", Role: model.RoleTool, ToolCallID: "a", Text: "before"})
	m := says(text("done"))
	res, err := Run(context.Background(), with(Config{Model: m, Tools: []tool.Tool{good}}), history)
	if err != nil || !slices.Equal(ran, []string{"b 1 1"}) || !slices.Equal(results(res.Messages), []string{"before", "now"}) {
		t.Errorf("%v: ran %q, results %q", err, ran, results(res.Messages))
	}
	replayed(t, m.requests[0].Messages)
	if res.Messages[4].ID != "m4" || len(history) != 4 {
		t.Errorf("messages = %+v", res.Messages)
	}
	// Nothing is open: the model is asked at once.
	ran = nil
	if _, err := Run(context.Background(), with(Config{Model: says(text("done")), Tools: []tool.Tool{good}}), res.Messages); err != nil || ran != nil {
		t.Errorf("%v: ran %q again", err, ran)
	}
}

// EXEC-10: middleware wraps from the outside in, in the order of the list; an
// error or a panic of its own is a result like a tool's.
func TestMiddleware(t *testing.T) {
	t.Parallel()
	var log []string
	outer := func(name string) ToolMiddleware {
		return func(next Invoke) Invoke {
			return func(ctx context.Context, t tool.Tool, c tool.Call) (tool.Result, error) {
				log = append(log, name)
				res, err := next(ctx, t, c)
				log = append(log, name+" back")
				return res, err
			}
		}
	}
	asks := func(name string) ModelMiddleware {
		return func(next Generate) Generate {
			return func(ctx context.Context, req model.Request, d func(model.Delta)) (model.Response, error) {
				log = append(log, name)
				return next(ctx, req, d)
			}
		}
	}
	hook := func(name string) Hook {
		return func(_ context.Context, m model.Message) model.Message {
			log = append(log, name)
			m.Text += name
			return m
		}
	}
	good := []tool.Tool{&fakeTool{"good", func(context.Context, tool.Call) (tool.Result, error) {
		log = append(log, "tool")
		return tool.Result{}, nil
	}}}
	res := run(t, Config{
		Model: says(calls(call("a", "good", "")), text("done")), Tools: good,
		ToolMiddleware: []ToolMiddleware{outer("t1"), outer("t2")}, ModelMiddleware: []ModelMiddleware{asks("m1"), asks("m2")}, AfterModel: []Hook{hook("h1"), hook("h2")},
	})
	want := []string{"m1", "m2", "h1", "h2", "t1", "t2", "tool", "t2 back", "t1 back", "m1", "m2", "h1", "h2"}
	if !slices.Equal(log, want) || res.LastAssistant().Text != "doneh1h2" {
		t.Errorf("log = %q, want %q", log, want)
	}
	for _, bad := range []Invoke{
		func(context.Context, tool.Tool, tool.Call) (tool.Result, error) { return tool.Result{}, errNo },
		func(context.Context, tool.Tool, tool.Call) (tool.Result, error) { panic(errNo) },
	} {
		res := run(t, Config{Model: says(calls(call("a", "good", "")), text("done")), Tools: good, ToolMiddleware: []ToolMiddleware{func(Invoke) Invoke { return bad }}})
		if r := results(res.Messages); len(r) != 1 || !strings.Contains(r[0], errNo.Error()) {
			t.Errorf("results = %q", r)
		}
	}
}

// CAP-04, EXEC-10: a hook may take calls away before any tool runs.
func TestHookTrimsCalls(t *testing.T) {
	t.Parallel()
	var ran []string
	res := run(t, Config{
		Model: says(calls(call("a", "good", ""), call("b", "good", "")), text("done")),
		Tools: []tool.Tool{&fakeTool{"good", func(_ context.Context, c tool.Call) (tool.Result, error) {
			ran = append(ran, c.ID)
			return tool.Result{}, nil
		}}},
		AfterModel: []Hook{func(_ context.Context, m model.Message) model.Message {
			m.ToolCalls = m.ToolCalls[:min(1, len(m.ToolCalls))]
			return m
		}},
	})
	if !slices.Equal(ran, []string{"a"}) || len(res.Messages[1].ToolCalls) != 1 {
		t.Errorf("ran %q", ran)
	}
}
