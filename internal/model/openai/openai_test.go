package openai

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/modeltest"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "sk-very-secret-key"

func client(t *testing.T, s *modeltest.Server, change ...func(*Config)) *Model {
	t.Helper()
	cfg := Config{Name: "main", Model: "fake-1", BaseURL: s.URL(), Key: func() string { return secret }, RequestTimeout: 20 * time.Second, IdleTimeout: 10 * time.Second}
	for _, c := range change {
		c(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.CloseIdleConnections)
	return m
}

func ask(text string) model.Request {
	return model.Request{Agent: "lead", Messages: []model.Message{{Role: model.RoleUser, Text: text}}}
}

func generate(t *testing.T, m *Model, req model.Request) model.Response {
	t.Helper()
	res, err := m.Generate(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func fault(t *testing.T, m *Model) *model.Error {
	t.Helper()
	res, err := m.Generate(t.Context(), ask("hi"), nil)
	var e *model.Error
	if !errors.As(err, &e) {
		t.Fatalf("Generate = %+v, %v; want a *model.Error", res, err)
	}
	if strings.Contains(fmt.Sprintf("%v %+v", e, e), secret) {
		t.Errorf("the error holds the key: %+v", e)
	}
	return e
}

func input(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// bothWays runs f with the stream as it is and in writes of one byte.
func bothWays(t *testing.T, body []byte, f func(t *testing.T, r modeltest.Reply)) {
	t.Helper()
	t.Run("whole", func(t *testing.T) { t.Parallel(); f(t, modeltest.SSE(body)) })
	t.Run("by byte", func(t *testing.T) { t.Parallel(); f(t, modeltest.SSE(body).ByByte()) })
}

func args(place string) string {
	return fmt.Sprintf(`{"description": %q, "prompt": "Say one fact about %s.", "subagent_type": "general-purpose"}`, place, place)
}

// wantCalls checks names and arguments, and that ids are there and unique.
func wantCalls(t *testing.T, got []model.ToolCall, places ...string) {
	t.Helper()
	if len(got) != len(places) {
		t.Fatalf("calls = %+v, want %d", got, len(places))
	}
	ids := map[string]bool{}
	for i, c := range got {
		if c.Name != "task" || c.Args != args(places[i]) {
			t.Errorf("call %d = %+v, want task with %s", i, c, args(places[i]))
		}
		if c.ID == "" || ids[c.ID] {
			t.Errorf("call %d has id %q, which is blank or repeated", i, c.ID)
		}
		ids[c.ID] = true
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	s := modeltest.New(t, modeltest.Text("Hello there, world."))
	m := client(t, s)
	var shown strings.Builder
	req := ask("hi")
	req.Tools = []model.ToolSpec{{Name: "ls", Description: "List.", Parameters: json.RawMessage(`{"type":"object","properties":{"path":{"type":"string"}}}`)}}
	res, err := m.Generate(t.Context(), req, func(d model.Delta) { shown.WriteString(d.Text) })
	if err != nil {
		t.Fatal(err)
	}
	want := model.Response{
		Message: model.Message{Role: model.RoleAssistant, Text: "Hello there, world.", FinishReason: "stop"},
		Usage:   &contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}, Model: "fake-1",
	}
	if !reflect.DeepEqual(res, want) {
		t.Errorf("Generate = %+v, want %+v", res, want)
	}
	if shown.String() != want.Message.Text {
		t.Errorf("shown = %q, want %q", shown.String(), want.Message.Text)
	}
	r := s.Requests()[0]
	if got := r.Header.Get("Authorization"); got != "Bearer "+secret {
		t.Errorf("Authorization = %q", got)
	}
	if !r.Stream || !bytes.Contains(r.Body, []byte(`"include_usage":true`)) || len(r.Tools) != 1 {
		t.Errorf("request = %s; want stream, include_usage and a tool", r.Body)
	}
}

// An absent key is not sent, and none is taken from the environment.
func TestNoKey(t *testing.T) {
	t.Setenv("OPENAI_API_KEY", "another-key")
	t.Setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
	s := modeltest.New(t, modeltest.Text("ok"))
	generate(t, client(t, s, func(c *Config) { c.Key = nil }), ask("hi"))
	if got := s.Requests()[0].Header.Get("Authorization"); got != "" {
		t.Errorf("Authorization = %q, want none", got)
	}
}

// F-010
func TestTextBeforeCalls(t *testing.T) {
	t.Parallel()
	bothWays(t, input(t, "F-010.sse"), func(t *testing.T, r modeltest.Reply) {
		res := generate(t, client(t, modeltest.New(t, r)), ask("hi"))
		wantCalls(t, res.Message.ToolCalls, "Oslo")
		if res.Message.Text != "Let me delegate this." || res.Message.FinishReason != "tool_calls" || res.Usage != nil {
			t.Errorf("Generate = %+v", res)
		}
	})
}

// F-096, F-098
func TestUnreliableIndex(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"F-096.sse", "F-098.sse"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothWays(t, input(t, name), func(t *testing.T, r modeltest.Reply) {
				res := generate(t, client(t, modeltest.New(t, r)), ask("hi"))
				wantCalls(t, res.Message.ToolCalls, "Oslo", "Lima")
			})
		})
	}
}

// More ways in which servers stream calls.
func TestAssembly(t *testing.T) {
	t.Parallel()
	type d struct {
		index          int64
		id, name, args string
	}
	a, b := `{"a":1}`, `{"b":2}`
	for name, c := range map[string]struct {
		deltas []d
		want   [][2]string
	}{
		"interleaved":            {[]d{{0, "x", "f", ""}, {1, "y", "g", ""}, {0, "", "", `{"a"`}, {1, "", "", `{"b"`}, {0, "", "", `:1}`}, {1, "", "", `:2}`}}, [][2]string{{"f", a}, {"g", b}}},
		"id in every piece":      {[]d{{0, "x", "f", ""}, {0, "x", "", `{"a"`}, {0, "x", "", `:1}`}}, [][2]string{{"f", a}}},
		"id and name everywhere": {[]d{{0, "x", "f", `{"a"`}, {0, "x", "f", `:1}`}}, [][2]string{{"f", a}}},
		"whole calls, no ids":    {[]d{{0, "", "f", a}, {0, "", "g", b}}, [][2]string{{"f", a}, {"g", b}}},
		"same id, same index":    {[]d{{0, "x", "f", a}, {0, "x", "f", b}}, [][2]string{{"f", a}, {"f", b}}},
		"same id, next index":    {[]d{{0, "x", "f", a}, {1, "x", "f", b}}, [][2]string{{"f", a}, {"f", b}}},
		"id decides":             {[]d{{0, "x", "f", ""}, {1, "y", "g", ""}, {7, "x", "", a}, {7, "y", "", b}}, [][2]string{{"f", a}, {"g", b}}},
		"stuck index":            {[]d{{0, "x", "f", a}, {1, "y", "g", ""}, {0, "", "", b}}, [][2]string{{"f", a}, {"g", b}}},
		"name in pieces":         {[]d{{0, "x", "get", ""}, {0, "", "_it", ""}, {0, "", "", a}}, [][2]string{{"get_it", a}}},
		"late id":                {[]d{{0, "", "f", ""}, {0, "x", "", a}}, [][2]string{{"f", a}}},
		"broken then next":       {[]d{{0, "x", "f", `{"a"`}, {0, "y", "g", b}}, [][2]string{{"f", `{"a"`}, {"g", b}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			as := newAssembly(model.Request{}, "", func(model.Delta) {})
			for _, p := range c.deltas {
				as.call(p.index, p.id, p.name, p.args)
			}
			as.finish = "tool_calls"
			res, err := as.response("m")
			if err != nil {
				t.Fatal(err)
			}
			var got [][2]string
			ids := map[string]bool{}
			for _, tc := range res.Message.ToolCalls {
				got = append(got, [2]string{tc.Name, tc.Args})
				ids[tc.ID] = true
			}
			if !reflect.DeepEqual(got, c.want) || len(ids) != len(got) || ids[""] {
				t.Errorf("calls = %q with ids %v, want %q with unique ids", got, ids, c.want)
			}
		})
	}
}

// F-100: ids are unique, also against the conversation, and can be replayed.
func TestCallIDs(t *testing.T) {
	t.Parallel()
	s := modeltest.New(t, modeltest.Load(t, "testdata/F-100.json")...)
	m := client(t, s)
	req := ask("hi")
	req.Messages = append(req.Messages,
		model.Message{Role: model.RoleAssistant, ToolCalls: []model.ToolCall{{ID: "call_1", Name: "ls", Args: "{}"}}},
		model.Message{Role: model.RoleTool, ToolCallID: "call_1", Text: "x"})
	res := generate(t, m, req)
	wantCalls(t, res.Message.ToolCalls, "Oslo", "Quito", "Lima")
	for _, c := range res.Message.ToolCalls {
		if c.ID == "call_1" {
			t.Errorf("id %q is in the conversation already", c.ID)
		}
	}
	generate(t, m, follow(req, res))
}

// follow is the conversation after res, with a result for each call.
func follow(req model.Request, res model.Response) model.Request {
	req.Messages = append(append([]model.Message(nil), req.Messages...), res.Message)
	for _, c := range res.Message.ToolCalls {
		req.Messages = append(req.Messages, model.Message{Role: model.RoleTool, ToolCallID: c.ID, ToolName: c.Name, Text: "done"})
	}
	return req
}

// F-102, F-104, F-106, F-108: what a model wrote is kept as it is, the replay is
// accepted by a strict server and quotes little of it.
func TestReplay(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"F-102.json", "F-104.json", "F-106.json", "F-108.json"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modeltest.New(t, modeltest.Load(t, filepath.Join("testdata", name))...)
			m := client(t, s)
			req := ask("hi")
			var finishes []string
			for range 20 {
				res := generate(t, m, req)
				finishes = append(finishes, res.Message.FinishReason)
				if len(res.Message.ToolCalls) == 0 {
					break
				}
				req = follow(req, res)
			}
			var want []struct {
				Message struct {
					ToolCalls []modeltest.ToolCall `json:"tool_calls"`
				}
				FinishReason string `json:"finish_reason"`
			}
			var file struct{ Turns json.RawMessage }
			if err := errors.Join(json.Unmarshal(input(t, name), &file), json.Unmarshal(file.Turns, &want)); err != nil {
				t.Fatal(err)
			}
			if len(finishes) != len(want) {
				t.Fatalf("%d answers, want %d", len(finishes), len(want))
			}
			var kept []string
			for _, msg := range req.Messages {
				for _, c := range msg.ToolCalls {
					kept = append(kept, c.Args)
				}
			}
			var wrote []string
			for i, turn := range want {
				if finishes[i] != turn.FinishReason {
					t.Errorf("answer %d: finish reason %q, want %q", i, finishes[i], turn.FinishReason)
				}
				for _, c := range turn.Message.ToolCalls {
					wrote = append(wrote, c.Function.Arguments)
				}
			}
			if !reflect.DeepEqual(kept, wrote) {
				t.Errorf("arguments = %q, want %q", kept, wrote)
			}
			for _, r := range s.Requests() {
				for _, msg := range r.Messages {
					for _, c := range msg.ToolCalls {
						if len(c.Function.Arguments) > 500 {
							t.Errorf("%d bytes of bad arguments are replayed", len(c.Function.Arguments))
						}
					}
				}
			}
		})
	}
}

// F-104: the large form of it.
func TestHugeArguments(t *testing.T) {
	t.Parallel()
	s := modeltest.New(t, modeltest.Calls(modeltest.Call{ID: "c", Name: "task", Args: strings.Repeat("N", 300<<10)}), modeltest.Text("ok"))
	m := client(t, s)
	req := ask("hi")
	generate(t, m, follow(req, generate(t, m, req)))
	if n := len(s.Requests()[1].Body); n > 4<<10 {
		t.Errorf("the next request has %d bytes", n)
	}
}

// F-110, F-112, USAGE-01: unknown figures stay unknown, and the larger counts.
func TestUsage(t *testing.T) {
	t.Parallel()
	res := generate(t, client(t, modeltest.New(t, modeltest.SSE(input(t, "F-110.sse")))), ask("hi"))
	if want := (&contract.Usage{InputTokens: 12, TotalTokens: 12}); res.Message.Text != "Fine." || !reflect.DeepEqual(res.Usage, want) {
		t.Errorf("F-110: %+v, want Fine. and %+v", res, want)
	}
	m := client(t, modeltest.New(t, modeltest.Load(t, "testdata/F-112.json")...))
	for _, want := range []contract.Usage{{InputTokens: 20, OutputTokens: 500, TotalTokens: 520}, {OutputTokens: 3, TotalTokens: 3}} {
		if got := generate(t, m, ask("hi")).Usage; got == nil || *got != want {
			t.Errorf("F-112: usage = %+v, want %+v", got, want)
		}
	}
	// USAGE-06
	if got := generate(t, client(t, modeltest.New(t, modeltest.Answer("x", nil, "stop", nil))), ask("hi")).Usage; got != nil {
		t.Errorf("usage = %+v, want none", got)
	}
}

// F-114
func TestBrokenBytes(t *testing.T) {
	t.Parallel()
	bothWays(t, input(t, "F-114.sse"), func(t *testing.T, r modeltest.Reply) {
		var shown strings.Builder
		res, err := client(t, modeltest.New(t, r)).Generate(t.Context(), ask("hi"), func(d model.Delta) { shown.WriteString(d.Text) })
		if err != nil {
			t.Fatal(err)
		}
		if !utf8.ValidString(res.Message.Text) || !utf8.ValidString(shown.String()) {
			t.Errorf("text %q or deltas %q are no UTF-8", res.Message.Text, shown.String())
		}
		if !strings.HasPrefix(res.Message.Text, "before bad ") || !strings.Contains(res.Message.Text, "\uFFFD") {
			t.Errorf("text = %q", res.Message.Text)
		}
	})
}

// F-116: an error inside a stream is no success.
func TestErrorInStream(t *testing.T) {
	t.Parallel()
	text := `data: {"choices":[{"index":0,"delta":{"content":"Half of"},"finish_reason":null}]}` + "\n\n"
	for name, body := range map[string]string{
		"object":       text + `data: {"error":{"type":"overloaded_error","message":"busy ` + secret + `"}}` + "\n\n",
		"event":        text + "event: error\n" + `data: {"message":"busy"}` + "\n\n",
		"other family": string(input(t, "F-116.sse")),
		"text":         text + `data: {"error":"busy"}` + "\n\ndata: [DONE]\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothWays(t, []byte(body), func(t *testing.T, r modeltest.Reply) {
				e := fault(t, client(t, modeltest.New(t, r)))
				if e.Kind != model.KindTransient || !strings.Contains(e.Message, "busy") {
					t.Errorf("error = %+v, want transient, busy", e)
				}
			})
		})
	}
	// "error": null is none.
	ok := `data: {"error":null,"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"stop"}]}` + "\n\n"
	if res := generate(t, client(t, modeltest.New(t, modeltest.SSE([]byte(ok)))), ask("hi")); res.Message.Text != "ok" {
		t.Errorf("text = %q", res.Message.Text)
	}
}

// A stream that ends early, holds rubbish or nothing is no success.
func TestBrokenStream(t *testing.T) {
	t.Parallel()
	text := `data: {"choices":[{"index":0,"delta":{"content":"Half of"},"finish_reason":null}]}` + "\n\n"
	for name, c := range map[string]struct {
		body, code string
	}{
		"cut":         {text, "disconnected"},
		"empty":       {"", "disconnected"},
		"done only":   {"data: [DONE]\n\n", "disconnected"},
		"no JSON":     {text + "data: {nonsense\n\n", "malformed"},
		"cut in JSON": {text + `data: {"choices":[{"index":0,"del`, "malformed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := fault(t, client(t, modeltest.New(t, modeltest.SSE([]byte(c.body)))))
			if e.Kind != model.KindTransient || e.Code != c.code {
				t.Errorf("error = %+v, want transient %s", e, c.code)
			}
		})
	}
}

// F-118: silence ends, whatever form it has.
func TestSilence(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]modeltest.Reply{
		"after deltas": modeltest.SSE(input(t, "F-118.sse")).Hanging(),
		"no headers":   modeltest.Silence(),
		"comments":     modeltest.Comments(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			e := fault(t, client(t, modeltest.New(t, r), func(c *Config) { c.IdleTimeout = 200 * time.Millisecond }))
			if e.Kind != model.KindTransient || e.Code != "timeout" || !strings.Contains(e.Message, "idle") {
				t.Errorf("error = %+v, want an idle timeout", e)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
	t.Run("request timeout", func(t *testing.T) {
		t.Parallel()
		s := modeltest.New(t, modeltest.Silence())
		e := fault(t, client(t, s, func(c *Config) { c.RequestTimeout = 200 * time.Millisecond }))
		if e.Code != "timeout" || !strings.Contains(e.Message, "request timeout") {
			t.Errorf("error = %+v, want a request timeout", e)
		}
	})
}

// CANCEL-03: a call ends with its context, with its cause, at any time.
func TestCancel(t *testing.T) {
	t.Parallel()
	stop := errors.New("stopped by the user")
	for name, r := range map[string]modeltest.Reply{"no headers": modeltest.Silence(), "in the stream": modeltest.SSE(input(t, "F-118.sse")).Hanging()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modeltest.New(t, r)
			m := client(t, s)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			done := make(chan error, 1)
			go func() {
				_, err := m.Generate(ctx, ask("hi"), nil)
				done <- err
			}()
			<-s.Arrived()
			cancel(stop)
			select {
			case err := <-done:
				if !errors.Is(err, stop) {
					t.Errorf("error = %v, want the cause", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("the call did not end")
			}
		})
	}
}

// F-120: odd streams are whole ones.
func TestOddStream(t *testing.T) {
	t.Parallel()
	odd := input(t, "F-120.sse")
	for name, body := range map[string][]byte{
		"as it is":      odd,
		"CRLF":          bytes.ReplaceAll(bytes.ReplaceAll(odd, []byte("\r"), nil), []byte("\n"), []byte("\r\n")),
		"no empty line": bytes.TrimRight(odd, "\r\n"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bothWays(t, body, func(t *testing.T, r modeltest.Reply) {
				res := generate(t, client(t, modeltest.New(t, r)), ask("hi"))
				if want := (contract.Usage{InputTokens: 4, OutputTokens: 3, TotalTokens: 7}); res.Message.Text != "OK!" || res.Usage == nil || *res.Usage != want {
					t.Errorf("Generate = %+v, %+v; want OK! and %+v", res, res.Usage, want)
				}
			})
		})
	}
	t.Run("not streamed", func(t *testing.T) {
		t.Parallel()
		body := `{"model":"m2","choices":[{"index":0,"message":{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"task","arguments":` + fmt.Sprintf("%q", args("Oslo")) + `}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}`
		res := generate(t, client(t, modeltest.New(t, modeltest.JSON(200, body))), ask("hi"))
		wantCalls(t, res.Message.ToolCalls, "Oslo")
		if res.Model != "m2" || res.Usage == nil || res.Usage.TotalTokens != 3 {
			t.Errorf("Generate = %+v", res)
		}
	})
}

func TestStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status int
		body   string
		kind   model.ErrorKind
		code   string
	}{
		{401, `{"error":{"message":"bad key ` + secret + `"}}`, model.KindPermanent, "unauthorized"},
		{404, `{"error":{"message":"no such model"}}`, model.KindPermanent, "not_found"},
		{400, `{"error":{"message":"bad request"}}`, model.KindPermanent, "http_400"},
		{429, `{"error":{"message":"slow down"}}`, model.KindTransient, "rate_limited"},
		{429, `{"error":{"message":"pay","code":"insufficient_quota"}}`, model.KindPermanent, "quota_exhausted"},
		{500, `{"error":{"message":"oops"}}`, model.KindTransient, "http_500"},
		{503, `<html>` + strings.Repeat("x", 5000), model.KindTransient, "http_503"},
	} {
		t.Run(fmt.Sprint(c.status, c.code), func(t *testing.T) {
			t.Parallel()
			s := modeltest.New(t, modeltest.JSON(c.status, c.body))
			e := fault(t, client(t, s))
			if e.Kind != c.kind || e.Code != c.code || len(e.Message) > 600 {
				t.Errorf("error = %+v, want %s %s", e, c.kind, c.code)
			}
			if n := len(s.Requests()); n != 1 {
				t.Errorf("%d requests, want 1: retries are not made here", n)
			}
		})
	}
}

// A server that is not there is a passing fault.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	m, err := New(Config{Name: "x", Model: "m", BaseURL: "http://127.0.0.1:1/v1", Key: func() string { return secret }})
	if err != nil {
		t.Fatal(err)
	}
	if e := fault(t, m); e.Kind != model.KindTransient || e.Code != "disconnected" {
		t.Errorf("error = %+v", e)
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{{Name: "a"}, {Name: "a", Model: "m", BaseURL: "localhost:1"}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("New(%+v) = nil error", cfg)
		}
	}
}

// Whatever a server sends, there is an answer or an error, in valid UTF-8.
func FuzzStream(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.sse")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		a := newAssembly(model.Request{}, "", func(d model.Delta) {
			if !utf8.ValidString(d.Text + d.ToolCall) {
				t.Errorf("delta %+q is no UTF-8", d.Text+d.ToolCall)
			}
		})
		if err := a.stream(decoder(body), func() {}); err != nil {
			return
		}
		res, err := a.response("m")
		if err != nil {
			return
		}
		if !utf8.ValidString(res.Message.Text) {
			t.Errorf("text %q is no UTF-8", res.Message.Text)
		}
		ids := map[string]bool{}
		for _, c := range res.Message.ToolCalls {
			if !utf8.ValidString(c.Name+c.Args+c.ID) || c.ID == "" || ids[c.ID] {
				t.Errorf("call %q", c)
			}
			ids[c.ID] = true
		}
		if u := res.Usage; u != nil && (u.InputTokens < 0 || u.OutputTokens < 0 || u.TotalTokens < 0) {
			t.Errorf("usage = %+v", u)
		}
		// It can be replayed to a strict server.
		req := follow(model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: "x"}}}, res)
		p, err := buildParams(Config{Model: "m"}, "", req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		r := modeltest.Request{Body: b}
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		if problem := modeltest.Check(r); problem != "" {
			t.Errorf("a strict server refuses the replay: %s", problem)
		}
	})
}
