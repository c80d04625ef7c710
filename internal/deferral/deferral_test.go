package deferral

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
)

func entry(name, description string) Entry {
	return Entry{Spec: model.ToolSpec{Name: name, Description: description, Parameters: json.RawMessage(`{"type":"object"}`)}}
}

func catalogue() *Catalogue {
	return NewCatalogue([]Entry{
		entry("git__issue_list", "Lists what people have reported."), entry("git__issue_get", "One report, in full."),
		entry("git__pull_list", "Lists pulls; for an issue see elsewhere."), entry("crm__find", "Finds a customer (by name)."),
		entry("crm__delete", "Removes a customer."), entry("x__a", "alpha"), entry("x__b", "alpha"), entry("x__c", "alpha"), entry("x__d", "alpha"),
		entry("x__e", "alpha"), entry("x__f", "alpha"),
	})
}

// DEFER-05
func TestSearch(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]string{
		"":                                     "",
		"  ":                                   "",
		"select:x__b, crm__find,none,x__b":     "x__b crm__find",
		"select:x__a,x__b,x__c,x__d,x__e,x__f": "x__a x__b x__c x__d x__e x__f", // uncapped
		"select:":                              "",
		"+issue":                               "git__issue_get git__issue_list",
		"+ISSUE reported list":                 "git__issue_list git__issue_get",
		"+nothing list":                        "",
		"+":                                    "",
		"issue":                                "git__issue_get git__issue_list git__pull_list", // names first
		"ALPHA":                                "x__a x__b x__c x__d x__e",                      // five at most
		"^crm":                                 "crm__delete crm__find",
		"(by name":                             "crm__find", // no pattern: literally
		"*":                                    "",
		"remov.s|finds":                        "crm__delete crm__find",
	} {
		if got := strings.Join(catalogue().Search(query, nil), " "); got != want {
			t.Errorf("%q finds %q, want %q", query, got, want)
		}
	}
	allowed := func(name string) bool { return name != "crm__delete" && name != "git__issue_get" }
	for query, want := range map[string]string{"select:crm__delete,crm__find": "crm__find", "+issue": "git__issue_list", "customer": "crm__find"} {
		if got := strings.Join(catalogue().Search(query, allowed), " "); got != want {
			t.Errorf("limited, %q finds %q, want %q", query, got, want)
		}
	}
}

// DEFER-06
func TestHash(t *testing.T) {
	t.Parallel()
	a, b := entry("a", "one"), entry("b", "two")
	h := NewCatalogue([]Entry{a, b}).Hash()
	if len(h) != 16 || strings.Trim(h, "0123456789abcdef") != "" {
		t.Errorf("hash = %q", h)
	}
	other := a
	other.Spec.Description = "another text"
	spaced := a
	spaced.Spec.Parameters = json.RawMessage(`{ "type" : "object" }`)
	for name, same := range map[string][]Entry{"order": {b, a}, "description": {other, b}, "blanks": {spaced, b}} {
		if got := NewCatalogue(same).Hash(); got != h {
			t.Errorf("%s: another hash", name)
		}
	}
	changed := a
	changed.Spec.Parameters = json.RawMessage(`{"type":"object","required":["x"]}`)
	for name, others := range map[string][]Entry{"schema": {changed, b}, "fewer": {a}, "more": {a, b, entry("c", "")}, "name": {entry("aa", "one"), b}, "moved": {entry("ab", ""), entry("", "")}} {
		if got := NewCatalogue(others).Hash(); got == h {
			t.Errorf("%s: the same hash", name)
		}
	}
}

// DEFER-06: a fold over messages, also over those that were stored in between.
func TestState(t *testing.T) {
	t.Parallel()
	c := catalogue()
	other := NewCatalogue([]Entry{entry("x__a", "alpha")})
	msg := func(hash string, names ...string) model.Message {
		return model.Message{Role: model.RoleTool, ToolName: ToolName, Metadata: map[string]any{subagent.MetaMatches: names, MetaHash: hash}}
	}
	s := State{}.With(msg(c.Hash(), "x__b", "x__a")).With(msg(c.Hash(), "x__a", "x__c"))
	if got := s.Promoted(c); !slices.Equal(got, []string{"x__a", "x__b", "x__c"}) {
		t.Errorf("the same catalogue joins: %v", got)
	}
	if got := s.Promoted(other); len(got) != 0 {
		t.Errorf("under another catalogue %v are exposed", got)
	}
	s = s.With(msg(other.Hash(), "x__a"))
	if s.Promoted(c) != nil || !slices.Equal(s.Promoted(other), []string{"x__a"}) {
		t.Errorf("another catalogue replaces: %+v", s)
	}
	// What others say promotes nothing, and neither does a failure.
	bad := msg(other.Hash(), "x__b")
	bad.IsError = true
	for _, m := range []model.Message{bad, {Role: model.RoleTool, ToolName: "x__a", Metadata: bad.Metadata}, {Role: model.RoleUser, Metadata: bad.Metadata, ToolName: ToolName}, msg("")} {
		if got := s.With(m); len(got.Names) != 1 {
			t.Errorf("%+v promotes: %+v", m, got)
		}
	}
	raw, err := json.Marshal(msg(c.Hash(), "x__f"))
	if err != nil {
		t.Fatal(err)
	}
	var stored model.Message
	if err := json.Unmarshal(raw, &stored); err != nil {
		t.Fatal(err)
	}
	if got := (State{}).With(stored).Promoted(c); !slices.Equal(got, []string{"x__f"}) {
		t.Errorf("of a stored message: %v", got)
	}
}

// DEFER-07: keywords whatever their case, by priority and name.
func TestPreferred(t *testing.T) {
	t.Parallel()
	prefer := func(name string, priority int, words ...string) Entry {
		e := entry(name, "")
		e.Prefer, e.Priority, e.Keywords = true, priority, words
		return e
	}
	off := prefer("off", 99, "issue")
	off.Prefer = false
	c := NewCatalogue([]Entry{prefer("b", 1, "Issue"), prefer("a", 1, "issue"), prefer("low", -5, "issue"), prefer("high", 7, "x", "ÄRGER"), off, prefer("none", 50, "", " ")})
	for text, want := range map[string]string{"An ISSUE is open": "a b low", "ärger with an issue": "high a b low", "nothing": "", "": ""} {
		if got := strings.Join(c.Preferred(text), " "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// DEFER-07, DEFER-09: a wrong order is refused, and the program's own is right.
func TestOrder(t *testing.T) {
	t.Parallel()
	if err := CheckOrder(agent.Order); err != nil {
		t.Error(err)
	}
	for order, want := range map[string]string{
		"":           "",
		"loop_guard": "",
		"skill_policy routing_promotion deferred_filter": "",
		"deferred_filter routing_promotion":              "must stand before it",
		"routing_promotion deferred_filter skill_policy": "override what skills allow",
		"routing_promotion":                              "only one of",
		"deferred_filter":                                "only one of",
	} {
		err := CheckOrder(strings.Fields(order))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", order, err, want)
		}
	}
}

// plain is a tool that answers by its name.
type plain string

func (p plain) Spec() model.ToolSpec {
	return model.ToolSpec{Name: string(p), Parameters: json.RawMessage(`{"type":"object"}`)}
}

func (p plain) Call(context.Context, tool.Call) (tool.Result, error) {
	return tool.Result{Text: "ran " + string(p)}, nil
}

// DEFER-08
func TestFailClosed(t *testing.T) {
	t.Parallel()
	external := func(name string) bool { return strings.Contains(name, "__") }
	chain := New(catalogue(), 1).Pieces()
	for name, c := range map[string]struct {
		enabled bool
		tools   []tool.Tool
		chain   []agent.Piece
		refused bool
	}{
		"off":                {false, []tool.Tool{plain("a__b")}, nil, false},
		"no external tools":  {true, []tool.Tool{plain("grep")}, nil, false},
		"deferred":           {true, []tool.Tool{plain("a__b")}, chain, false},
		"nothing defers":     {true, []tool.Tool{plain("grep"), plain("a__b")}, nil, true},
		"half of the pieces": {true, []tool.Tool{plain("a__b")}, chain[:1], true},
	} {
		if err := Check(c.enabled, c.tools, external, c.chain); (err != nil) != c.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// talk runs a conversation whose model makes the calls of each turn and then answers;
// it returns the tools offered at each turn and the results.
func talk(t *testing.T, s *Session, limit func(turn int) subagent.ToolLimit, turns ...[]model.ToolCall) (offered []string, results []string) {
	t.Helper()
	var tools []tool.Tool
	for _, n := range append(s.catalogue.Names(), "grep") {
		tools = append(tools, plain(n))
	}
	turn := 0
	policy := agent.Piece{Name: PiecePolicy, Model: func(next agent.Generate) agent.Generate {
		return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
			if limit != nil {
				ctx = subagent.WithToolLimit(ctx, limit(turn))
			}
			return next(ctx, req, onDelta)
		}
	}, Tool: func(next agent.Invoke) agent.Invoke {
		return func(ctx context.Context, x tool.Tool, call tool.Call) (tool.Result, error) {
			if limit != nil {
				ctx = subagent.WithToolLimit(ctx, limit(turn))
			}
			return next(ctx, x, call)
		}
	}}
	chain, err := agent.Chain(append(s.Pieces(), policy)...)
	if err != nil {
		t.Fatal(err)
	}
	m := asked(func(req model.Request) model.Message {
		var names []string
		for _, x := range req.Tools {
			names = append(names, x.Name)
		}
		offered = append(offered, strings.Join(names, " "))
		turn++
		if turn > len(turns) {
			return model.Message{Text: "done"}
		}
		return model.Message{ToolCalls: turns[turn-1]}
	})
	res, err := agent.Run(t.Context(), agent.Config{Agent: "x", Model: m, Tools: append(tools, s.Tool()), MaxTurns: 20, Chain: chain}, []model.Message{{Role: model.RoleUser, Text: "go"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, msg := range res.Messages {
		if msg.Role == model.RoleTool {
			results = append(results, msg.Text)
		}
		for _, schema := range []string{`"type"`, "customer"} {
			if strings.Contains(msg.Text, schema) {
				t.Errorf("a message holds more than names: %s", msg.Text)
			}
		}
	}
	return offered, results
}

type asked func(model.Request) model.Message

func (asked) Name() string      { return "m" }
func (asked) ModelName() string { return "m" }
func (a asked) Generate(_ context.Context, req model.Request, _ func(model.Delta)) (model.Response, error) {
	return model.Response{Message: a(req)}, nil
}

func calls(list ...string) []model.ToolCall {
	var out []model.ToolCall
	for i, c := range list {
		name, args, _ := strings.Cut(c, " ")
		if args == "" {
			args = "{}"
		}
		out = append(out, model.ToolCall{ID: fmt.Sprint(c, i), Name: name, Args: args})
	}
	return out
}

// DEFER-03, DEFER-04, TOOL-05, TOOL-06: names alone are shown; what is not found is
// neither offered nor run; what is found counts from the next answer on.
func TestPromotion(t *testing.T) {
	t.Parallel()
	s := New(catalogue(), 3)
	if sec := s.Section(); !strings.Contains(sec, "- crm__delete\n- crm__find\n- git__issue_get") || strings.Contains(sec, "customer") {
		t.Errorf("section = %s", sec)
	}
	s.Replay(State{}, nil, "go")
	offered, results := talk(t, s, nil,
		calls("crm__find", `tool_search {"query":"select:crm__find"}`),
		calls("crm__find", "crm__delete", "grep"))
	if offered[0] != "grep tool_search" || offered[1] != "crm__find grep tool_search" {
		t.Errorf("offered are %q", offered)
	}
	want := []string{"crm__find was not run: it has to be found first", "Found, and to be called from your next step on:\n- crm__find", "ran crm__find", "crm__delete was not run", "ran grep"}
	for i, w := range want {
		if !strings.Contains(results[i], w) {
			t.Errorf("result %d is %q, want %q", i, results[i], w)
		}
	}
}

// DEFER-07, DEFER-09, DEFER-10: a text brings tools in, as many as allowed, and never
// one that skills leave out; each execution begins with none.
func TestAutomaticPromotion(t *testing.T) {
	t.Parallel()
	var entries []Entry
	for i, n := range []string{"a__1", "a__2", "a__3"} {
		e := entry(n, "")
		e.Prefer, e.Priority, e.Keywords = true, i, []string{"ticket"}
		entries = append(entries, e)
	}
	c := NewCatalogue(entries)
	s := New(c, 2)
	s.Replay(State{}, nil, "A Ticket came in")
	if offered, _ := talk(t, s, nil); offered[0] != "a__2 a__3 grep tool_search" {
		t.Errorf("offered are %q", offered)
	}
	limited := func(int) subagent.ToolLimit { return subagent.LimitOf([][]string{{"a__1", "grep"}}, false) }
	s = New(c, 2)
	s.Replay(State{}, nil, "A Ticket came in")
	offered, results := talk(t, s, limited, calls(`tool_search {"query":"select:a__1,a__2"}`, `tool_search {"query":"a__"}`))
	if offered[0] != "a__1 grep tool_search" || strings.Contains(results[0]+results[1], "a__2") {
		t.Errorf("limited, offered are %q, results %q", offered, results)
	}
	if got := s.State().Names; !slices.Equal(got, []string{"a__1"}) {
		t.Errorf("promoted are %v", got)
	}
	s = New(c, 2)
	s.Replay(State{}, nil, "nothing of the kind")
	if offered, _ := talk(t, s, nil); offered[0] != "grep tool_search" {
		t.Errorf("a new execution is offered %q", offered)
	}
	// What was kept and what was said in messages is there after a take-over.
	s = New(c, 2)
	s.Replay(State{}.Promote(c.Hash(), []string{"a__1"}), []model.Message{{Role: model.RoleTool, ToolName: ToolName, Metadata: map[string]any{MetaHash: c.Hash(), subagent.MetaMatches: []any{"a__2"}}}}, "")
	if offered, _ := talk(t, s, nil); offered[0] != "a__1 a__2 grep tool_search" {
		t.Errorf("after a take-over offered are %q", offered)
	}
}

// A pattern that costs too much is taken literally: a search cannot be interrupted, and
// whoever gives a model its text must not hold a processor with it (DEFER-05).
func TestCostlyPattern(t *testing.T) {
	t.Parallel()
	for _, costly := range []string{".{0,900}z", strings.Repeat(".{0,900}", 400), "((a{0,30}){0,30})z"} {
		if p := compile(costly); p.String() != "(?i)"+regexp.QuoteMeta(costly) {
			t.Errorf("%.20q runs as a pattern", costly)
		}
	}
	for _, fine := range []string{"issue|pull.?request", "^files__.*_(read|write)$", "a{0,100}", strings.Repeat("word ", 40)} {
		if p := compile(fine); p.String() != "(?i)"+fine {
			t.Errorf("%.20q is taken literally", fine)
		}
	}
	c := NewCatalogue([]Entry{{Spec: model.ToolSpec{Name: "a__b", Description: "costs .{0,900}z"}}})
	if got := c.Search(".{0,900}z", nil); !slices.Equal(got, []string{"a__b"}) {
		t.Errorf("found %v", got)
	}
}
