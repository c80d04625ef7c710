package guard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a model that answers by a function, and keeps what it was asked.
type fake struct {
	answer   func(turn int) model.Response
	requests [][]model.Message
}

func (*fake) Name() string      { return "fake" }
func (*fake) ModelName() string { return "fake-1" }
func (f *fake) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	f.requests = append(f.requests, slices.Clone(req.Messages))
	return f.answer(len(f.requests)), nil
}

// shell is a tool whose output a test decides.
type shell struct {
	name   string
	output func(n int) string
	mu     sync.Mutex
	ran    int
}

func (s *shell) Spec() model.ToolSpec { return model.ToolSpec{Name: s.name} }
func (s *shell) Call(context.Context, tool.Call) (tool.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ran++
	if s.output == nil {
		return tool.Result{Text: "hi"}, nil
	}
	return tool.Result{Text: s.output(s.ran)}, nil
}

func bash(command string) model.ToolCall {
	return model.ToolCall{Name: "bash", Args: fmt.Sprintf(`{"command":%q}`, command)}
}

func calling(text string, calls ...model.ToolCall) model.Response {
	return model.Response{Message: model.Message{Text: text, ToolCalls: slices.Clone(calls), FinishReason: "tool_calls"}}
}

func spending(r model.Response, in, out int64) model.Response {
	r.Usage = &contract.Usage{InputTokens: in, OutputTokens: out, TotalTokens: in + out}
	return r
}

func defaults() Config {
	c := config.Default()
	return Config{Loop: c.LoopDetection, Budget: c.TokenBudget("general-purpose")}
}

// converse runs a conversation with the guards of cfg to its end.
func converse(t *testing.T, cfg Config, m *fake, tools ...tool.Tool) (agent.Result, Set) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s := New(cfg)
	chain, err := agent.Chain(s.Pieces()...)
	if err != nil {
		t.Fatal(err)
	}
	res, err := agent.Run(ctx, agent.Config{Model: m, Tools: tools, MaxTurns: 100, Chain: chain}, []model.Message{{ID: "task", Role: model.RoleUser, Text: "go"}})
	if err != nil {
		t.Fatal(err)
	}
	return res, s
}

// warned returns the numbers of the requests that end with a warning, from 1. It
// must be the last message, behind all results, and be there once.
func warned(t *testing.T, m *fake) []int {
	t.Helper()
	var out []int
	for i, req := range m.requests {
		for j, msg := range req {
			if msg.Metadata[MetadataKey] == nil {
				continue
			}
			if j != len(req)-1 || msg.Role != model.RoleUser {
				t.Errorf("request %d: the warning stands at %d of %d as %s", i+1, j+1, len(req), msg.Role)
			}
			out = append(out, i+1)
		}
	}
	return out
}

// GUARD-04, GUARD-06, GUARD-07, GUARD-14, F-064: an agent that does the same again
// and again is warned with its next request, once, and stopped at the limit; nothing
// of the warning stays.
func TestRepetition(t *testing.T) {
	t.Parallel()
	m, sh := &fake{answer: func(int) model.Response { return calling("", bash("echo hi")) }}, &shell{name: "bash"}
	res, s := converse(t, defaults(), m, sh)
	if res.End != agent.EndAnswered || res.Turns != 5 || sh.ran != 4 {
		t.Errorf("end %s after %d turns and %d runs; want 5 and 4", res.End, res.Turns, sh.ran)
	}
	if got := warned(t, m); !slices.Equal(got, []int{4}) {
		t.Errorf("requests %v end with a warning, want the fourth", got)
	}
	last := res.LastAssistant()
	if len(last.ToolCalls) != 0 || last.FinishReason != "stop" || last.Text != loopNotice {
		t.Errorf("last answer = %+v", last)
	}
	for _, msg := range res.Messages {
		if msg.Metadata[MetadataKey] != nil {
			t.Errorf("a warning was recorded: %+v", msg)
		}
	}
	if got := s.Take(); !slices.Equal(got, []Stop{{Reason: contract.StopLoopCapped, NoText: true}}) {
		t.Errorf("reasons = %+v", got)
	}
}

// GUARD-04, F-066: what gives something else each time gets somewhere; unchanged
// calls with unchanged results are a repetition also between others.
func TestProgress(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		command func(turn int) string
		output  func(n int) string
		stopped bool
	}{
		"a new file each time":      {func(turn int) string { return fmt.Sprint("touch ", turn) }, nil, false},
		"a poll whose output moves": {func(int) string { return "status" }, func(n int) string { return fmt.Sprint(n, " %") }, false},
		"a poll that stands still":  {func(int) string { return "status" }, func(int) string { return "0 %" }, true},
		"two that stand still":      {func(turn int) string { return fmt.Sprint("status ", turn%2) }, func(int) string { return "0 %" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &fake{answer: func(turn int) model.Response {
				if turn > 12 {
					return model.Response{Message: model.Message{Text: "done", FinishReason: "stop"}}
				}
				return calling("", bash(c.command(turn)))
			}}
			_, s := converse(t, defaults(), m, &shell{name: "bash", output: c.output})
			if got := s.Take(); (len(got) > 0) != c.stopped {
				t.Errorf("reasons = %+v; want a stop: %v", got, c.stopped)
			}
			if got := warned(t, m); (len(got) > 0) != c.stopped {
				t.Errorf("warned in %v", got)
			}
		})
	}
}

// GUARD-05: what counts as the same.
func TestSameCalls(t *testing.T) {
	t.Parallel()
	call := func(name, args string) model.ToolCall { return model.ToolCall{Name: name, Args: args} }
	list := func(c ...model.ToolCall) []model.ToolCall { return c }
	a, b := bash("a"), bash("b")
	for name, c := range map[string]struct {
		one, two []model.ToolCall
		same     bool
	}{
		"noise beside what tells":       {list(call("bash", `{"command":"ls","note":1}`)), list(call("bash", `{"note":2,"command":"ls"}`)), true},
		"another name":                  {list(call("bash", `{"command":"ls"}`)), list(call("sh", `{"command":"ls"}`)), false},
		"nothing that tells":            {list(call("calc", `{"x":1}`)), list(call("calc", `{"x":2}`)), false},
		"a null does not tell":          {list(call("calc", `{"path":null,"x":1}`)), list(call("calc", `{"path":null,"x":2}`)), false},
		"order of keys":                 {list(call("calc", `{"x":1,"y":2}`)), list(call("calc", ` {"y":2, "x":1}`)), true},
		"content of a write":            {list(call("write_file", `{"path":"a","content":"1"}`)), list(call("write_file", `{"path":"a","content":"2"}`)), false},
		"text of an edit":               {list(call("str_replace", `{"path":"a","old_str":"1"}`)), list(call("str_replace", `{"path":"a","old_str":"2"}`)), false},
		"lines of one place":            {list(call("read_file", `{"path":"a","start_line":1,"end_line":200}`)), list(call("read_file", `{"path":"a","start_line":"3"}`)), true},
		"lines of the next":             {list(call("read_file", `{"path":"a","start_line":200}`)), list(call("read_file", `{"path":"a","start_line":201}`)), false},
		"a range backwards":             {list(call("read_file", `{"path":"a","start_line":10,"end_line":500}`)), list(call("read_file", `{"path":"a","start_line":500,"end_line":10}`)), true},
		"no start is the first line":    {list(call("read_file", `{"path":"a"}`)), list(call("read_file", `{"path":"a","start_line":1}`)), true},
		"another file by another name":  {list(call("read_file", `{"file_path":"a"}`)), list(call("read_file", `{"file_path":"b"}`)), false},
		"order inside a message":        {list(a, b), list(b, a), true},
		"how often inside a message":    {list(a, a, b), list(a, b, b), false},
		"one more":                      {list(a), list(a, a), false},
		"no arguments, null and {}":     {list(call("x", ""), call("x", "null")), list(call("x", "{}"), call("x", " {} ")), true},
		"what is not JSON":              {list(call("x", `{"a`)), list(call("x", `{"b`)), false},
		"what is not JSON, twice":       {list(call("x", `{"a`)), list(call("x", `{"a`)), true},
		"a name that runs into the key": {list(call("ab", `{`)), list(call("a", `b{`)), false},
	} {
		if got := newSet(c.one).hash == newSet(c.two).hash; got != c.same {
			t.Errorf("%s: same = %v, want %v", name, got, c.same)
		}
	}
}

// GUARD-08, GUARD-09: each call of a message counts; a tool that is called less
// again may be warned of again; the window is as long as the largest limit.
func TestFrequency(t *testing.T) {
	t.Parallel()
	cfg := config.Default().LoopDetection
	cfg.WindowSize, cfg.ToolFreqWarn, cfg.ToolFreqHardLimit = 2, 4, 8
	cfg.ToolFreqOverrides = map[string]config.ToolFreq{"rare": {Warn: 1, HardLimit: 2}}
	n := 0
	observe := func(l *Loop, names ...string) Verdict {
		m := model.Message{Role: model.RoleAssistant}
		for _, name := range names {
			n++
			m.ToolCalls = append(m.ToolCalls, model.ToolCall{Name: name, Args: fmt.Sprintf(`{"n":%d}`, n)})
		}
		return l.Observe(m)
	}
	l := NewLoop(cfg)
	for i, want := range []struct {
		names   string
		verdict Verdict
	}{
		{"a a a", ""}, {"a b", VerdictWarnFreq}, {"a", ""}, // warned once
		{"b b", ""}, {"c c c c", VerdictWarnFreq}, {"d d", ""}, // a has left the last eight
		{"a a a", ""}, {"a", VerdictWarnFreq}, {"rare", VerdictWarnFreq}, {"rare a", VerdictStopFreq},
	} {
		if got := observe(l, strings.Fields(want.names)...); got != want.verdict {
			t.Errorf("turn %d (%s): %q, want %q", i+1, want.names, got, want.verdict)
		}
	}
	l = NewLoop(cfg)
	if got := observe(l, strings.Fields("a a a a a a a a")...); got != VerdictStopFreq {
		t.Errorf("eight calls at once: %q", got)
	}
	m := &fake{answer: func(turn int) model.Response { return calling("so far", bash(fmt.Sprint(turn))) }}
	res, s := converse(t, defaults(), m, &shell{name: "bash"})
	if got := warned(t, m); res.Turns != 50 || !slices.Equal(got, []int{31}) {
		t.Errorf("ended after %d turns, warned with %v; want 50 and the 31st", res.Turns, got)
	}
	if got := s.Take(); !slices.Equal(got, []Stop{{Reason: contract.StopLoopCapped}}) || res.LastAssistant().Text != "so far\n\n"+freqNotice {
		t.Errorf("reasons %+v, text %q", got, res.LastAssistant().Text)
	}
}

// GUARD-10: only answers with calls are looked at, and others interrupt nothing.
func TestOtherMessages(t *testing.T) {
	t.Parallel()
	l := NewLoop(config.Default().LoopDetection)
	same := model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{bash("ls")}}
	var got []Verdict
	for range 5 {
		for _, m := range []model.Message{same, {Role: model.RoleAssistant, Text: "hm"}, {Role: model.RoleUser, ToolCalls: same.ToolCalls}, {Role: model.RoleTool}} {
			if v := l.Observe(m); v != VerdictNone {
				got = append(got, v)
			}
		}
	}
	if !slices.Equal(got, []Verdict{VerdictWarnSame, VerdictStopSame}) {
		t.Errorf("verdicts = %v", got)
	}
}

// GUARD-06: at most four warnings wait, equal ones as one; they are shown together
// and once; what nobody asked for is gone with the guard.
func TestQueue(t *testing.T) {
	t.Parallel()
	var w warnings
	for _, text := range []string{"a", "b", "a", "c", "d", "e"} {
		w.add(text)
	}
	var asked [][]model.Message
	generate := w.deliver(func(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
		asked = append(asked, req.Messages)
		if len(asked) == 1 {
			return model.Response{}, errors.New("too long")
		}
		return model.Response{}, nil
	})
	history := make([]model.Message, 1, 8)
	for range 3 {
		_, _ = generate(t.Context(), model.Request{Messages: history}, nil)
	}
	const want = "a\n\nb\n\nc\n\nd"
	if len(asked[0]) != 2 || len(asked[1]) != 2 || asked[1][1].Text != want || !asked[1][1].Marked(model.MetaHidden) || len(asked[2]) != 1 || history[:2][1].Text != "" {
		t.Errorf("asked %+v; the history beyond its end is %q", asked, history[:2][1].Text)
	}
}

// GUARD-01, GUARD-02, GUARD-03: each answer counts once, the warning comes once and
// with the next request, and the stop takes everything out that belongs to calls.
func TestTokenBudget(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	if !cfg.Budget.Enabled || cfg.Budget.MaxTokens != 2_000_000 {
		t.Fatalf("default budget = %+v", cfg.Budget)
	}
	m := &fake{answer: func(turn int) model.Response {
		r := spending(calling("half", bash(fmt.Sprint(turn))), 290_000, 10_000)
		r.Message.Metadata = map[string]any{delegation.RawToolCallsKey: []any{1}, delegation.FunctionCallKey: 1, "kept": true}
		return r
	}}
	res, s := converse(t, cfg, m, &shell{name: "bash"})
	if got := warned(t, m); res.Turns != 7 || res.End != agent.EndAnswered || !slices.Equal(got, []int{6}) {
		t.Errorf("end %s after %d turns, warned with %v; want 7 and the sixth", res.End, res.Turns, got)
	}
	if text := m.requests[5][len(m.requests[5])-1].Text; !strings.Contains(text, "75 %") {
		t.Errorf("warning = %q", text)
	}
	last := res.LastAssistant()
	if len(last.ToolCalls) != 0 || last.FinishReason != "stop" || last.Text != "half\n\n"+tokenNotice || len(last.Metadata) != 1 {
		t.Errorf("last answer = %+v", last)
	}
	if got := s.Take(); !slices.Equal(got, []Stop{{Reason: contract.StopTokenCapped}}) {
		t.Errorf("reasons = %+v", got)
	}
}

// GUARD-02, GUARD-03: what other pieces spend, on summaries above all, is spent by
// the execution: it warns and stops, also when the model's own answers say nothing of
// what they cost.
func TestBudgetCountsWhatPiecesSpend(t *testing.T) {
	t.Parallel()
	for _, told := range []bool{true, false} {
		cfg := defaults()
		cfg.Budget.MaxTokens = 1100
		s := New(cfg)
		m := &fake{answer: func(turn int) model.Response {
			r := calling("half", bash(fmt.Sprint(turn)))
			if told {
				r = spending(r, 20, 5)
			}
			return r
		}}
		chain, err := agent.Chain(append(s.Pieces(), agent.Piece{Name: "summarisation", BeforeModel: func(context.Context, agent.State) (agent.Change, error) {
			return agent.Change{Usage: &contract.Usage{InputTokens: 290, OutputTokens: 10}}, nil
		}})...)
		if err != nil {
			t.Fatal(err)
		}
		res, err := agent.Run(t.Context(), agent.Config{Model: m, Tools: []tool.Tool{&shell{name: "bash"}}, MaxTurns: 20, Chain: chain}, []model.Message{{ID: "task", Role: model.RoleUser, Text: "go"}})
		if err != nil {
			t.Fatal(err)
		}
		if got := warned(t, m); res.Turns != 4 || !slices.Equal(got, []int{4}) {
			t.Errorf("told %v: %d turns, warned with %v; want 4 and the fourth", told, res.Turns, got)
		}
		if got := s.Take(); !slices.Equal(got, []Stop{{Reason: contract.StopTokenCapped}}) {
			t.Errorf("told %v: reasons %+v", told, got)
		}
	}
}

// F-110, F-112, USAGE-06: what a provider does not report is estimated, and what it
// reports in the total alone counts; each message of a long history is counted once.
func TestTokenBudgetWithoutFigures(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	cfg.Budget = config.TokenBudget{Enabled: true, MaxTokens: 1000, WarnThreshold: 0.7, HardStopThreshold: 1}
	for name, c := range map[string]struct {
		usage *contract.Usage
		text  string
		turns int
	}{
		"none at all":            {nil, strings.Repeat(" word", 300), 3}, // 300 out, then 300 in and 300 out
		"none, and short":        {nil, "x", 10},
		"reasoning in the total": {&contract.Usage{InputTokens: 20, TotalTokens: 520}, "x", 2},
	} {
		m := &fake{answer: func(turn int) model.Response {
			if turn == 10 {
				return model.Response{Message: model.Message{Text: "done", FinishReason: "stop"}}
			}
			r := calling(c.text, bash(fmt.Sprint("echo ", turn)))
			r.Usage = c.usage
			return r
		}}
		res, s := converse(t, cfg, m, &shell{name: "bash"})
		if stopped := len(s.Take()) > 0; stopped == (c.turns == 10) || res.Turns > c.turns || c.turns < 10 && res.Turns < 2 || c.usage == nil && res.Usage != nil {
			t.Errorf("%s: %d turns, stopped %v, usage %+v", name, res.Turns, stopped, res.Usage)
		}
	}
}

// GUARD-03: an answer that is whole stays as it is, also when it used up the budget;
// one without a word is no reason to ask again. A provider's failure stays one.
func TestTokenBudgetAtTheEnd(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	cfg.Budget.MaxTokens = 1000
	for name, c := range map[string]struct {
		msg    model.Message
		text   string
		noText bool
	}{
		"whole": {model.Message{Text: "all of it", FinishReason: "stop"}, "all of it", false},
		"empty": {model.Message{Text: " ", FinishReason: "stop"}, tokenNotice, true},
	} {
		res, s := converse(t, cfg, &fake{answer: func(int) model.Response { return spending(model.Response{Message: c.msg}, 999, 1) }})
		if got := s.Take(); res.Turns != 1 || res.LastAssistant().Text != c.text || !slices.Equal(got, []Stop{{contract.StopTokenCapped, c.noText}}) {
			t.Errorf("%s: %q after %d turns, reasons %+v", name, res.LastAssistant().Text, res.Turns, got)
		}
	}
	g := NewTokens(cfg.Budget)
	g.last = &contract.Usage{InputTokens: 5000}
	failed := model.Message{ID: "m1", Role: model.RoleAssistant, Text: "down", ErrorFallback: true}
	if got := g.judge(failed); got.Text != "down" || g.Take() != (Stop{}) {
		t.Errorf("a failure became %+v", got)
	}
}

// GUARD-18, GUARD-13: every guard of a set is asked, in the order of the chain, and
// tells its reason once; what asks them need not know them.
func TestTake(t *testing.T) {
	t.Parallel()
	s := New(defaults())
	s[0].(*Loop).stop, s[1].(*Tokens).stop = Stop{Reason: contract.StopLoopCapped}, Stop{Reason: contract.StopTokenCapped}
	if got := s.Take(); !slices.Equal(got, []Stop{{Reason: contract.StopLoopCapped}, {Reason: contract.StopTokenCapped}}) {
		t.Errorf("reasons = %+v", got)
	}
	if got := s.Take(); len(got) != 0 {
		t.Errorf("a reason was told twice: %+v", got)
	}
	if got := New(Config{}); len(got) != 1 {
		t.Errorf("with everything off there are %d guards, want the one for safety", len(got))
	}
}

// EXEC-09, GUARD-19: two executions share nothing, whatever they have in common.
func TestSiblings(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	cfg.Budget.MaxTokens = 1000
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			m := &fake{answer: func(turn int) model.Response {
				if turn == 5 {
					return spending(model.Response{Message: model.Message{Text: "done", FinishReason: "stop"}}, 100, 0)
				}
				return spending(calling("", bash(fmt.Sprint("step ", turn%4))), 100, 0)
			}}
			if _, s := converse(t, cfg, m, &shell{name: "bash"}); len(s.Take()) != 0 || len(warned(t, m)) != 0 {
				t.Error("a guard spoke, although no execution alone did anything")
			}
		})
	}
	wg.Wait()
}

// GUARD-20, GUARD-21: calls of an answer that the provider cut never run, and the
// loop guard does not count them; without a word it is the provider's failure.
func TestSafety(t *testing.T) {
	t.Parallel()
	for _, finish := range []string{"content_filter", "refusal", "SAFETY"} {
		for _, text := range []string{"so far", ""} {
			cut := calling(text, bash("rm"))
			cut.Message.FinishReason = finish
			sh := &shell{name: "bash"}
			res, s := converse(t, defaults(), &fake{answer: func(int) model.Response { return cut }}, sh)
			last := res.LastAssistant()
			if sh.ran != 0 || res.Turns != 1 || len(last.ToolCalls) != 0 || last.ErrorFallback != (text == "") || last.FinishReason != finish {
				t.Errorf("%s: %d runs, last answer %+v", finish, sh.ran, last)
			}
			if l := s[0].(*Loop); len(l.sets) != 0 {
				t.Errorf("%s: the loop guard counted %d sets", finish, len(l.sets))
			}
			if got := s.Take(); len(got) != 1 || got[0].Reason != contract.StopSafetyCapped {
				t.Errorf("%s: reasons = %+v", finish, got)
			}
		}
	}
	// An answer that comes later is not what was cut.
	g := &Safety{}
	hook := g.Piece().AfterModel
	hook(t.Context(), model.Message{Role: model.RoleAssistant, Text: "x", FinishReason: "refusal"})
	hook(t.Context(), model.Message{Role: model.RoleAssistant, Text: "x", FinishReason: "stop"})
	if got := g.Take(); got != (Stop{}) {
		t.Errorf("reason = %+v", got)
	}
}

// GUARD-02, GUARD-04, GUARD-21: who takes a conversation over counts on from where
// it is, and does not repeat a warning that was shown.
func TestReplay(t *testing.T) {
	t.Parallel()
	cfg := defaults()
	cfg.Budget.MaxTokens = 1000
	var messages []model.Message
	for i := range 4 {
		c := bash("ls")
		c.ID = fmt.Sprint("c", i)
		messages = append(messages, model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{c}}, model.Message{Role: model.RoleTool, ToolCallID: c.ID, Text: "same"})
	}
	for n, c := range []struct{ waiting, left int }{{0, 4}, {0, 3}, {0, 2}, {1, 1}, {0, 0}} {
		s := New(cfg)
		s.Replay(messages[:2*n], &contract.Usage{InputTokens: 700})
		l := s[0].(*Loop)
		if len(l.queue) != c.waiting {
			t.Errorf("after %d turns %d warnings wait, want %d", n, len(l.queue), c.waiting)
		}
		if tokens := s[1].(*Tokens); tokens.Observe([]Spent{{ID: "m9", Input: 299}}) != VerdictNone || tokens.Observe([]Spent{{ID: "m10", Input: 1}}) != VerdictStop {
			t.Errorf("after %d turns the budget was not what is left", n)
		}
		verdict := VerdictNone
		turns := 0
		for i := n; verdict != VerdictStopSame && turns < 9; i++ {
			turns++
			call := bash("ls")
			call.ID = fmt.Sprint("c", i)
			verdict = l.Observe(model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{call}})
			l.gave(call.ID, "same")
		}
		if turns != c.left+1 {
			t.Errorf("after %d turns it was stopped %d later, want %d", n, turns, c.left+1)
		}
	}
}

// GUARD-22: what a guard remembers does not grow with the conversation.
func TestBounded(t *testing.T) {
	t.Parallel()
	cfg := config.Default().LoopDetection
	cfg.ToolFreqWarn, cfg.ToolFreqHardLimit = 51, 51
	l := NewLoop(cfg)
	for i := range 5000 {
		m := model.Message{Role: model.RoleAssistant}
		for n := range 2 {
			m.ToolCalls = append(m.ToolCalls, model.ToolCall{ID: fmt.Sprint(i, n), Name: fmt.Sprint("t", i%3, n), Args: fmt.Sprintf(`{"n":%d}`, i/4)})
			l.gave(m.ToolCalls[n].ID, "x")
		}
		l.Observe(m)
	}
	if len(l.sets) > cfg.WindowSize || len(l.tools) > 51 || len(l.warned) > cfg.WindowSize || len(l.warnedTool) > 51 || len(l.results) > 2 || len(l.queue) > maxQueued {
		t.Errorf("kept: %d sets, %d tools, %d and %d warned, %d results", len(l.sets), len(l.tools), len(l.warned), len(l.warnedTool), len(l.results))
	}
}

// TOOL-07: a huge result of any tool is bounded, with its ends; what a tool made as
// long as it may be is left alone.
func TestOutputBudget(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text string
		cut  bool
	}{
		"short":          {"x", false},
		"a little more":  {strings.Repeat("ä", 1000) + "note", false},
		"huge":           {"begin" + strings.Repeat("ä", 50_000) + "end", true},
		"bytes not text": {strings.Repeat("\xff", 50_000), true},
	} {
		invoke := OutputBudget(1000).Tool(func(context.Context, tool.Tool, tool.Call) (tool.Result, error) {
			return tool.Result{Text: c.text}, nil
		})
		res, err := invoke(t.Context(), nil, tool.Call{})
		if err != nil || (res.Text != c.text) != c.cut || len([]rune(res.Text)) > 2200 {
			t.Errorf("%s: %d characters, %v", name, len(res.Text), err)
		}
		if name == "huge" && (!strings.HasPrefix(res.Text, "begin") || !strings.HasSuffix(res.Text, "end") || !strings.Contains(res.Text, "49008 of 50008 characters")) {
			t.Errorf("huge: %.100q", res.Text)
		}
	}
}

// GUARD-09: a tool's own limit may be above the window of all others.
func TestFrequencyAboveTheWindow(t *testing.T) {
	t.Parallel()
	cfg := config.Default().LoopDetection
	cfg.ToolFreqOverrides = map[string]config.ToolFreq{"bash": {Warn: 58, HardLimit: 60}}
	l := NewLoop(cfg)
	var got []string
	for i := range 60 {
		if v := l.Observe(model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{bash(fmt.Sprint(i))}}); v != VerdictNone {
			got = append(got, fmt.Sprint(i+1, v))
		}
	}
	if !slices.Equal(got, []string{"58" + string(VerdictWarnFreq), "60" + string(VerdictStopFreq)}) {
		t.Errorf("verdicts = %v", got)
	}
}

// GUARD-02: what was there before never counts, also when it grows; what a failed
// request of the same turn cost does.
func TestWhatCounts(t *testing.T) {
	t.Parallel()
	budget := defaults().Budget
	budget.MaxTokens = 1000
	g := NewTokens(budget)
	g.Before([]Spent{{ID: "old", Input: 10}})
	if v := g.Observe([]Spent{{ID: "old", Input: 5000}, {ID: "m1", Input: 1}}); v != VerdictNone {
		t.Errorf("verdict = %q", v)
	}
	generate := g.Piece().Model(func(context.Context, model.Request, func(model.Delta)) (model.Response, error) {
		return model.Response{Usage: &contract.Usage{InputTokens: 500}}, nil
	})
	for range 2 {
		if _, err := generate(t.Context(), model.Request{}, nil); err != nil {
			t.Fatal(err)
		}
	}
	g.judge(model.Message{ID: "m2", Role: model.RoleAssistant, Text: "x"})
	if got := g.Take(); got.Reason != contract.StopTokenCapped {
		t.Errorf("reason = %+v after two requests of half the budget each", got)
	}
}

// GUARD-03: the message that a guard was given is not changed, only what it returns.
func TestStripCopies(t *testing.T) {
	t.Parallel()
	m := model.Message{Metadata: map[string]any{delegation.RawToolCallsKey: 1}, ToolCalls: []model.ToolCall{bash("ls")}}
	if out := strip(m, "x"); len(out.Metadata) != 0 || len(m.Metadata) != 1 || len(m.ToolCalls) != 1 {
		t.Errorf("given %+v, returned %+v", m, out)
	}
}
