package fakeserver_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/anthropic"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
	"github.com/herdgate/herdgate/internal/model/openai"
	"github.com/herdgate/herdgate/internal/model/provider"
	"github.com/herdgate/herdgate/internal/model/retry"
	"github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a running server.
type fake struct {
	url string
	mu  sync.Mutex
	// refused are the texts of the refusals; requests counts all.
	refused  []string
	requests int
}

func serve(t *testing.T, rules string) *fake {
	t.Helper()
	parsed, err := script.Parse("rules", []byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{}
	s := fakeserver.New(parsed)
	s.OnRequest = func(_, refusal string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.requests++
		if refusal != "" {
			f.refused = append(f.refused, refusal)
		}
	}
	h := httptest.NewServer(s)
	f.url = h.URL
	t.Cleanup(func() {
		s.Close()
		h.Close()
	})
	return f
}

func (f *fake) wantNoRefusal(t *testing.T) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.refused {
		t.Errorf("the strict server refused a request: %s", r)
	}
}

var providers = []string{"openai", "anthropic"}

// ask gives a model of a provider through its real library.
func ask(t *testing.T, name, url string, idle time.Duration) model.Model {
	t.Helper()
	cfg := provider.Config{Name: "m", Model: "fake-1", BaseURL: url + "/v1", RequestTimeout: 30 * time.Second, IdleTimeout: idle}
	if name == "openai" {
		m, err := openai.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.CloseIdleConnections)
		return m
	}
	m, err := anthropic.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.CloseIdleConnections)
	return m
}

func both(t *testing.T, f func(t *testing.T, name string)) {
	t.Helper()
	for _, name := range providers {
		t.Run(name, func(t *testing.T) { t.Parallel(); f(t, name) })
	}
}

func hello() model.Request {
	return model.Request{Messages: []model.Message{{Role: model.RoleSystem, Text: "Be brief."}, {Role: model.RoleUser, Text: "hi"}}}
}

// F-116, F-118: every fault is one that passes, is asked again, visibly, and leaves
// no trace in the answer.
func TestFaults(t *testing.T) {
	t.Parallel()
	for fault, code := range map[script.Fault]string{
		script.FaultHTTP500: "http_500", script.FaultHTTP503: "http_503", script.FaultRateLimit: "rate_limited", script.FaultOverloaded: "overloaded",
		script.FaultTimeout: "timeout", script.FaultSilence: "timeout", script.FaultComments: "timeout",
		script.FaultReset: "disconnected", script.FaultDisconnect: "disconnected", script.FaultCut: "disconnected",
		script.FaultErrorInStream: "provider_error|overloaded",
	} {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, name string) {
				f := serve(t, fmt.Sprintf(`default: {turns: [{text: "Half of the first answer, and the rest.", fault: %s}, {text: "Whole."}]}`, fault))
				idle := 30 * time.Second
				if code == "timeout" {
					idle = 400 * time.Millisecond
				}
				m := retry.Retry(ask(t, name, f.url, idle), retry.Policy{MaxRetries: 6, Base: time.Millisecond, Cap: 5 * time.Millisecond}, zerolog.Nop())
				spans := tracetest.NewSpanRecorder()
				ctx, span := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("").Start(t.Context(), "chat")
				var shown strings.Builder
				res, err := m.Generate(ctx, hello(), func(d model.Delta) {
					if d.Restart {
						shown.Reset()
					}
					shown.WriteString(d.Text)
				})
				span.End()
				if err != nil || res.Message.Text != "Whole." || shown.String() != "Whole." {
					t.Errorf("answer %q, shown %q, error %v; want Whole.", res.Message.Text, shown.String(), err)
				}
				events := spans.Ended()[0].Events()
				if len(events) == 0 || events[0].Name != "model.retry" || !slices.ContainsFunc(strings.Split(code, "|"), func(c string) bool {
					return strings.Contains(fmt.Sprint(events[0].Attributes), c)
				}) {
					t.Errorf("events = %+v, want a model.retry with %s", events, code)
				}
				f.wantNoRefusal(t)
			})
		})
	}
}

// F-122: what a refusal asks for is read in both its forms.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	for value, least := range map[string]time.Duration{"7": 7 * time.Second, time.Now().Add(2 * time.Hour).UTC().Format(http.TimeFormat): time.Hour} {
		both(t, func(t *testing.T, name string) {
			f := serve(t, fmt.Sprintf(`default: {turns: [{fault: rate_limit, retry_after: %q}]}`, value))
			_, err := ask(t, name, f.url, 0).Generate(t.Context(), hello(), nil)
			var e *model.Error
			if !errors.As(err, &e) || e.Code != "rate_limited" || e.RetryAfter < least || e.RetryAfter > 2*least+time.Second {
				t.Errorf("error = %+v, want rate_limited after at least %v", err, least)
			}
		})
	}
}

// counter is a tool that notes what it was called with.
type counter struct {
	mu   sync.Mutex
	seen []string
}

func (c *counter) Spec() model.ToolSpec {
	return model.ToolSpec{Name: "count", Description: "Counts.", Parameters: json.RawMessage(`{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}`)}
}

func (c *counter) Call(_ context.Context, call tool.Call) (tool.Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = append(c.seen, string(call.Args))
	return tool.Result{Text: "counted"}, nil
}

// Whatever is wrong with an answer, tools run as often as they should, and every
// request that follows is one that a strict server takes: calls and results match
// one to one (F-100, F-102, F-106, F-110, F-124).
func TestConversations(t *testing.T) {
	t.Parallel()
	calls := `tool_calls: [{name: count, args: {n: 1}}, {name: count, args: {n: 2}}]`
	two := []string{`{"n":1}`, `{"n":2}`}
	for name, c := range map[string]struct {
		turns string
		want  []string
	}{
		"in order":               {`{` + calls + `}`, two},
		"out of order":           {`{` + calls + `, fault: out_of_order}`, two},
		"blank ids":              {`{` + calls + `, fault: blank_call_ids}`, two},
		"repeated ids":           {`{` + calls + `, fault: repeated_call_ids}, {` + calls + `, fault: repeated_call_ids}`, append(two, two...)},
		"null usage":             {`{` + calls + `, fault: null_usage}`, two},
		"no JSON":                {`{` + calls + `, fault: malformed_tool_args}`, nil},
		"cut at the token limit": {`{` + calls + `, fault: cut_in_tool_call}`, nil},
		"no object":              {`{tool_calls: [{name: count, args: "[1]"}]}`, nil},
		"unknown tool":           {`{tool_calls: [{name: "no such tool!", args: {n: 1}}, {name: count, args: {n: 2}}]}`, two[1:]},
		"reasoning":              {`{reasoning: "I need to count, twice.", ` + calls + `}, {text: "And again.", reasoning: "Once more.", ` + calls + `}`, append(two, two...)},
		"fault after tools":      {`{` + calls + `}, {text: x, fault: disconnect_mid_stream}, {text: x, fault: http_500}`, two},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, provider string) {
				f := serve(t, `default: {turns: [`+c.turns+`, {text: "Done."}]}`)
				m := retry.Retry(ask(t, provider, f.url, 30*time.Second), retry.Policy{MaxRetries: 3, Base: time.Millisecond}, zerolog.Nop())
				count := &counter{}
				res, err := agent.Run(t.Context(), agent.Config{Agent: "helper", Model: m, Tools: []tool.Tool{count}, MaxTurns: 6}, hello().Messages)
				if err != nil {
					t.Fatal(err)
				}
				if last := res.LastAssistant(); last == nil || last.Text != "Done." {
					t.Errorf("the last answer is %+v, want Done.", last)
				}
				slices.Sort(count.seen)
				want := slices.Clone(c.want)
				slices.Sort(want)
				if !slices.Equal(count.seen, want) {
					t.Errorf("the tool ran with %q, want %q", count.seen, want)
				}
				f.wantNoRefusal(t)
			})
		})
	}
}

// Empty answers are asked for again and end; each request is accepted.
func TestEmptyAnswers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, name string) {
		f := serve(t, `default: {turns: [{text: ""}]}`)
		if _, err := agent.Run(t.Context(), agent.Config{Agent: "helper", Model: ask(t, name, f.url, 0), MaxTurns: 6}, hello().Messages); err != nil {
			t.Fatal(err)
		}
		f.wantNoRefusal(t)
		if f.requests < 2 {
			t.Errorf("%d requests, want the answer to be asked for again", f.requests)
		}
	})
}

// STATUS-05: a provider that fails for good becomes a marked last message.
// STATUS-06: text that looks like an error is text.
func TestFailureIsMarked(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, name string) {
		for rules, marked := range map[string]bool{
			`default: {turns: [{fault: http_500}]}`:                                          true,
			`default: {turns: [{text: "Error: the model provider failed with status 500"}]}`: false,
		} {
			f := serve(t, rules)
			m := retry.Retry(ask(t, name, f.url, 0), retry.Policy{MaxRetries: 1, Base: time.Millisecond}, zerolog.Nop())
			res, err := agent.Run(t.Context(), agent.Config{Agent: "helper", Model: m, MaxTurns: 3}, hello().Messages)
			if err != nil {
				t.Fatal(err)
			}
			if last := res.LastAssistant(); last == nil || last.ErrorFallback != marked {
				t.Errorf("last message %+v, want marked: %v", last, marked)
			}
		}
	})
}

// Reasons to stop have the same words, whoever answers.
func TestFinishReasons(t *testing.T) {
	t.Parallel()
	for said, want := range map[string]map[string]string{
		"stop":           {"openai": "stop", "anthropic": "stop"},
		"length":         {"openai": "length", "anthropic": "length"},
		"content_filter": {"openai": "content_filter", "anthropic": "refusal"}, // that protocol has one word
		"refusal":        {"openai": "refusal", "anthropic": "refusal"},
	} {
		t.Run(said, func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, name string) {
				f := serve(t, `default: {turns: [{text: "No more.", finish_reason: `+said+`}]}`)
				res, err := ask(t, name, f.url, 0).Generate(t.Context(), hello(), nil)
				if err != nil || res.Message.FinishReason != want[name] || res.Message.Text != "No more." {
					t.Errorf("answer %+v, %v; want the reason %q", res.Message, err, want[name])
				}
			})
		})
	}
}

// USAGE-01, USAGE-06: figures are those of the provider, with the cache; unknown
// ones stay unknown.
func TestUsage(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, name string) {
		f := serve(t, `default: {turns: [{text: x, usage: {input_tokens: 100, output_tokens: 7, cache_read_tokens: 60}}]}`)
		res, err := ask(t, name, f.url, 0).Generate(t.Context(), hello(), nil)
		if want := (contract.Usage{InputTokens: 100, OutputTokens: 7, TotalTokens: 107, CacheReadTokens: 60}); err != nil || res.Usage == nil || *res.Usage != want || res.Model != "fake-1" {
			t.Errorf("usage = %+v, model %q, %v; want %+v", res.Usage, res.Model, err, want)
		}
		for _, rules := range []string{`{text: x}`, `{text: x, fault: null_usage}`} {
			res, err := ask(t, name, serve(t, `default: {turns: [`+rules+`]}`).url, 0).Generate(t.Context(), hello(), nil)
			if err != nil || res.Usage != nil || res.Message.Text != "x" {
				t.Errorf("%s: %+v, usage %+v, %v; want x and no usage", rules, res.Message, res.Usage, err)
			}
		}
	})
}

// F-114: pieces that end inside a character give that character, not its rubble,
// in the answer and on display.
func TestSplitCharacters(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, name string) {
		f := serve(t, `default: {turns: [{text: "naïve 日本 🦉", fault: split_utf8}]}`)
		var shown strings.Builder
		res, err := ask(t, name, f.url, 0).Generate(t.Context(), hello(), func(d model.Delta) { shown.WriteString(d.Text) })
		if want := "naïve 日本 🦉"; err != nil || res.Message.Text != want || shown.String() != want {
			t.Errorf("answer %q, shown %q, %v; want %q", res.Message.Text, shown.String(), err, want)
		}
	})
}

// Reasoning goes back to the model that wrote it and to no other.
func TestReasoningIsForItsOwnModel(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, name string) {
		rules := `default: {turns: [{reasoning: "A private thought.", tool_calls: [{name: count, args: {n: 1}}]}]}`
		res, err := ask(t, name, serve(t, rules).url, 0).Generate(t.Context(), hello(), nil)
		if err != nil || res.Message.Native == nil || strings.Contains(res.Message.Text, "private") {
			t.Fatalf("answer %+v, %v; want reasoning apart from the text", res.Message, err)
		}
		for _, other := range providers {
			body := make(chan string, 1)
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var b strings.Builder
				_ = r.Write(&b)
				body <- b.String()
				w.WriteHeader(http.StatusBadRequest)
			}))
			defer s.Close()
			req := hello()
			req.Messages = append(req.Messages, res.Message, model.Message{Role: model.RoleTool, ToolCallID: res.Message.ToolCalls[0].ID, Text: "x"})
			_, _ = ask(t, other, s.URL, 0).Generate(t.Context(), req, nil)
			if sent := <-body; strings.Contains(sent, "private thought") || !strings.Contains(sent, "count") {
				t.Errorf("%s was sent the reasoning of another server: %s", other, sent)
			}
		}
	})
}

// Without streaming a server says the same.
func TestWholeAnswers(t *testing.T) {
	t.Parallel()
	f := serve(t, `rules: [{agent: lead, turns: [{text: led}]}, {agent: helper, turns: [{text: helped}]}]`)
	for path, body := range map[string]string{
		"/v1/chat/completions": `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"tools":[{"type":"function","function":{"name":"%s"}}]}`,
		"/v1/messages":         `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"%s","input_schema":{"type":"object"}}]}`,
	} {
		for tool, want := range map[string]string{"task": `"led"`, "grep": `"helped"`} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(fmt.Sprintf(body, tool)))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("anthropic-version", "2026-10-21")
			res, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			var b strings.Builder
			_ = res.Write(&b)
			_ = res.Body.Close()
			if res.StatusCode != 200 || !strings.Contains(b.String(), want) {
				t.Errorf("%s with tool %s: %s; want %s", path, tool, b.String(), want)
			}
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// What a provider refuses is refused, with the place.
func TestStrict(t *testing.T) {
	t.Parallel()
	user := `{"role":"user","content":"x"}`
	use := `{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"t","input":{}}]}`
	chatCall := `{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"t","arguments":"{}"}}]}`
	for _, c := range []struct {
		check func([]byte) string
		body  string
		want  string
	}{
		{fakeserver.CheckChat, `{"model":"m","messages":[{"role":"system","content":"a"},{"role":"system","content":"b"},` + user + `]}`, "messages[1]: a system message must be the first"},
		{fakeserver.CheckChat, `{"model":"m","messages":[{"role":"wizard","content":"a"}]}`, `role "wizard"`},
		{fakeserver.CheckChat, `{"model":"m","messages":[` + user + `,` + chatCall + `]}`, "1 tool calls at the end"},
		{fakeserver.CheckChat, `{"model":"m","messages":[` + user + `,` + chatCall + `,` + user + `]}`, "messages[2]: 1 tool calls before it"},
		{fakeserver.CheckChat, `{"model":"m","messages":[` + user + `,{"role":"tool","tool_call_id":"b","content":"x"}]}`, "must follow the call"},
		{fakeserver.CheckChat, `{"model":"m","messages":[` + user + `,` + strings.Replace(chatCall, `{}`, `{`, 1) + `]}`, "no JSON object"},
		{fakeserver.CheckMessages, `{"model":"m","messages":[` + user + `]}`, "max_tokens"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"temperature":1,"messages":[` + user + `]}`, "temperature: extra inputs"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[` + user + `,` + user + `]}`, "alternate"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[{"role":"system","content":"a"},` + user + `]}`, "first message must be a user's"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[` + user + `,` + use + `]}`, "last message must be a user's"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[` + user + `,` + use + `,` + user + `]}`, `no tool_result for ["a"]`},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"b","content":"x"}]}]}`, "that of no call"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":" "}]}`, "blank"},
		{fakeserver.CheckMessages, `{"model":"m","max_tokens":1,"messages":[` + user + `,{"role":"assistant","content":[{"type":"thinking","thinking":"x","signature":"y"},{"type":"text","text":"z"}]},` + user + `]}`, "unchanged"},
	} {
		if got := c.check([]byte(c.body)); !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
	}
}
