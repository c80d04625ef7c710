package anthropic

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/anthropics/anthropic-sdk-go/v2/packages/ssestream"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "sk-ant-very-secret-key"

// server gives replies in order, and notes and checks what it is sent.
type server struct {
	*httptest.Server
	mu     sync.Mutex
	bodies [][]byte
}

type reply func(w http.ResponseWriter, r *http.Request)

func status400(text string) reply { return refusal(400, "invalid_request_error", text) }

func refusal(status int, kind, text string) reply {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"type":"error","error":{"type":%q,"message":%q}}`, kind, text)
	}
}

func sse(body string) reply {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, body)
	}
}

// hanging keeps the line open after the body.
func hanging(body string) reply {
	return func(w http.ResponseWriter, r *http.Request) {
		sse(body)(w, r)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func serve(t *testing.T, replies ...reply) *server {
	t.Helper()
	s := &server{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if got := r.Header.Get("Authorization") + r.Header.Get("X-Api-Key"); !strings.Contains(got, secret) {
			t.Errorf("no key was sent, but %q", got)
		}
		s.mu.Lock()
		n := len(s.bodies)
		s.bodies = append(s.bodies, body)
		s.mu.Unlock()
		if n >= len(replies) {
			t.Errorf("request %d is one too many", n)
			w.WriteHeader(http.StatusTeapot)
			return
		}
		replies[n](w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func client(t *testing.T, s *server, change ...func(*Config)) *Model {
	t.Helper()
	cfg := Config{Name: "main", Model: "fake-1", BaseURL: s.URL, Key: func() string { return secret }, RequestTimeout: 20 * time.Second, IdleTimeout: 10 * time.Second}
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
	return model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: text}}}
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

// event writes one event of a stream.
func event(data string) string {
	var v struct{ Type string }
	_ = json.Unmarshal([]byte(data), &v)
	var line bytes.Buffer
	_ = json.Compact(&line, []byte(data))
	return "event: " + v.Type + "\ndata: " + line.String() + "\n\n"
}

const (
	began = `{"type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"m2","content":[],"usage":{"input_tokens":9,"output_tokens":1}}}`
	text0 = `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`
	ended = `{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":4}}`
	stop  = `{"type":"message_stop"}`
)

func says(s string) string {
	return fmt.Sprintf(`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%q}}`, s)
}

func stream(events ...string) string {
	var b strings.Builder
	for _, e := range events {
		b.WriteString(event(e))
	}
	return b.String()
}

// F-124: reasoning comes back unchanged and in order, also where it is empty or
// hidden, and the blocks around it are what they were.
func TestReasoningBlocks(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("testdata/F-124.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Turns []struct {
			StopReason string `json:"stop_reason"`
			Usage      json.RawMessage
			Content    []json.RawMessage
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	var replies []reply
	for _, turn := range file.Turns {
		body := stream(began)
		for i, block := range turn.Content {
			body += event(fmt.Sprintf(`{"type":"content_block_start","index":%d,"content_block":%s}`, i, block))
		}
		replies = append(replies, sse(body+event(fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":%q},"usage":%s}`, turn.StopReason, turn.Usage))+event(stop)))
	}
	s := serve(t, replies...)
	m := client(t, s)
	req := ask("hi")
	res, err := m.Generate(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	// A conversation is stored and read between turns.
	stored, err := json.Marshal(res.Message)
	if err != nil {
		t.Fatal(err)
	}
	var msg model.Message
	if err := json.Unmarshal(stored, &msg); err != nil {
		t.Fatal(err)
	}
	req.Messages = agent.Repair(append(req.Messages, msg, model.Message{Role: model.RoleTool, ToolCallID: msg.ToolCalls[0].ID, Text: "a.txt"}))
	res, err = m.Generate(t.Context(), req, nil)
	if err != nil || res.Message.Text != "Done." {
		t.Fatalf("second answer = %+v, %v", res, err)
	}
	var sent struct{ Messages []struct{ Content []any } }
	if err := json.Unmarshal(s.bodies[1], &sent); err != nil {
		t.Fatal(err)
	}
	var want []any
	for _, block := range file.Turns[0].Content {
		var v any
		if err := json.Unmarshal(block, &v); err != nil {
			t.Fatal(err)
		}
		want = append(want, v)
	}
	if got := sent.Messages[1].Content; !reflect.DeepEqual(got, want) {
		t.Errorf("the answer was given back as %v, want %v", got, want)
	}
}

// A message that was changed since keeps its reasoning before what is there now;
// reasoning that leads to nothing is left out.
func TestReasoningOfChangedMessages(t *testing.T) {
	t.Parallel()
	m := client(t, serve(t))
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	native := &model.Native{Source: m.source, Blocks: []json.RawMessage{
		raw(`{"type":"text","text":"One."}`), raw(`{"type":"thinking","thinking":"x","signature":"y"}`), raw(`{"type":"tool_use"}`),
	}}
	kinds := func(msg model.Message) string {
		msg.Role, msg.Native = model.RoleAssistant, native
		b, err := json.Marshal(m.blocks(msg))
		if err != nil {
			t.Fatal(err)
		}
		var blocks []struct{ Type string }
		if err := json.Unmarshal(b, &blocks); err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, b := range blocks {
			out = append(out, b.Type)
		}
		return strings.Join(out, " ")
	}
	calls := []model.ToolCall{{ID: "a", Name: "ls", Args: "{}"}}
	for want, msg := range map[string]model.Message{
		"text thinking tool_use":          {Text: "One.", ToolCalls: calls},
		"thinking text":                   {Text: "One, shortened."},
		"thinking text tool_use tool_use": {Text: "One.", ToolCalls: append(calls, calls...)},
		"":                                {},
	} {
		if got := kinds(msg); got != want {
			t.Errorf("%+v gives %q, want %q", msg, got, want)
		}
	}
}

// Whatever a conversation looks like, a strict server accepts it.
func TestRequests(t *testing.T) {
	t.Parallel()
	user := func(s string) model.Message { return model.Message{Role: model.RoleUser, Text: s} }
	says := func(s string, ids ...string) model.Message {
		m := model.Message{Role: model.RoleAssistant, Text: s}
		for _, id := range ids {
			m.ToolCalls = append(m.ToolCalls, model.ToolCall{ID: id, Name: "my tool", Args: "no JSON"})
		}
		return m
	}
	result := func(id, s string) model.Message {
		return model.Message{Role: model.RoleTool, ToolCallID: id, Text: s, IsError: true}
	}
	for name, c := range map[string]struct {
		messages []model.Message
		roles    string
	}{
		"nothing":               {nil, "user"},
		"system alone":          {[]model.Message{{Role: model.RoleSystem, Text: "s"}}, "user"},
		"two system messages":   {[]model.Message{{Role: model.RoleSystem, Text: "s"}, user("a"), {Role: model.RoleSystem, Text: "t"}}, "user"},
		"begins with an answer": {[]model.Message{says("a"), user("b")}, "user assistant user"},
		"ends with an answer":   {[]model.Message{user("a"), says("b ")}, "user assistant user"},
		"users in a row":        {[]model.Message{user("a"), user("b"), user(" ")}, "user"},
		"answers in a row":      {[]model.Message{user("a"), says("b"), says("c"), user("d")}, "user assistant user"},
		"empty answer":          {[]model.Message{user("a"), says(" "), user("b")}, "user"},
		"calls":                 {[]model.Message{user("a"), says("", "x", "strange id/1"), result("x", ""), result("strange id/1", "r"), user("more")}, "user assistant user"},
		"broken bytes":          {[]model.Message{user("a\xff")}, "user"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, sse(stream(began, text0, `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"ok"}}`, ended, stop)))
			req := model.Request{Messages: c.messages, Tools: []model.ToolSpec{{Name: "ls"}, {Name: "cat", Parameters: json.RawMessage(`{"type":"object","properties":{"p":{"type":"string"}},"required":["p"],"additionalProperties":false}`)}}}
			if _, err := client(t, s).Generate(t.Context(), req, nil); err != nil {
				t.Fatal(err)
			}
			if problem := fakeserver.CheckMessages(s.bodies[0]); problem != "" {
				t.Errorf("a strict server refuses: %s\n%s", problem, s.bodies[0])
			}
			var sent struct {
				Messages []struct{ Role string }
				Tools    []struct {
					Schema map[string]any `json:"input_schema"`
				}
				Thinking struct{ Type string }
			}
			if err := json.Unmarshal(s.bodies[0], &sent); err != nil {
				t.Fatal(err)
			}
			var roles []string
			for _, m := range sent.Messages {
				roles = append(roles, m.Role)
			}
			if got := strings.Join(roles, " "); got != c.roles {
				t.Errorf("roles %q, want %q", got, c.roles)
			}
			if sent.Tools[1].Schema["additionalProperties"] != false || sent.Thinking.Type != "disabled" {
				t.Errorf("tools %v, thinking %v; want the whole schema, and no thinking (EXEC-07)", sent.Tools, sent.Thinking)
			}
		})
	}
}

// EXEC-07: a model that always thinks is asked without the wish that it should not.
func TestModelThatAlwaysThinks(t *testing.T) {
	t.Parallel()
	ok := sse(stream(began, text0, says("ok"), ended, stop))
	s := serve(t, status400(`"thinking.type.disabled" is not supported for this model`), ok, ok)
	m := client(t, s)
	for range 2 {
		if res, err := m.Generate(t.Context(), ask("hi"), nil); err != nil || res.Message.Text != "ok" {
			t.Fatalf("Generate = %+v, %v", res, err)
		}
	}
	for i, want := range []bool{true, false, false} {
		if got := bytes.Contains(s.bodies[i], []byte(`"thinking"`)); got != want {
			t.Errorf("request %d speaks of thinking: %v, want %v", i, got, want)
		}
	}
}

// F-116, F-118, F-120: streams that are odd are whole, others are no success.
func TestStreams(t *testing.T) {
	t.Parallel()
	f116, err := os.ReadFile("testdata/F-116.sse")
	if err != nil {
		t.Fatal(err)
	}
	half := stream(began, text0, says("Half of"))
	whole := stream(began, text0, says("OK"), says("!"), ended, stop)
	for name, c := range map[string]struct {
		reply reply
		code  string // "" is success
	}{
		"F-116":              {sse(string(f116)), "overloaded"},
		"error without name": {sse(half + "data: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"oops\"}}\n\n"), "provider_error"},
		"cut":                {sse(half), "disconnected"},
		"empty":              {sse(""), "disconnected"},
		"stop alone":         {sse(event(stop)), "disconnected"},
		"no JSON":            {sse(half + "event: content_block_delta\ndata: {nonsense\n\n"), "malformed"},
		"piece of no block":  {sse(stream(began, says("x"))), "malformed"},
		"silence":            {hanging(half), "timeout"},
		"CRLF":               {sse(strings.ReplaceAll(whole, "\n", "\r\n")), ""},
		"no empty line":      {sse(strings.TrimRight(whole, "\n")), ""},
		"no end":             {sse(strings.TrimSuffix(whole, event(stop))), ""},
		"comments and more":  {sse(": hello\n\n" + event(`{"type":"ping"}`) + event(`{"type":"brand_new"}`) + whole), ""},
		"line stays open":    {hanging(whole), ""},
		"not streamed": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"type":"message","role":"assistant","model":"m2","content":[{"type":"text","text":"OK!"}],"stop_reason":"end_turn","usage":{"input_tokens":9,"output_tokens":4}}`)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := client(t, serve(t, c.reply), func(cfg *Config) {
				if c.code == "timeout" {
					cfg.IdleTimeout = 200 * time.Millisecond
				}
			})
			if c.code != "" {
				if e := fault(t, m); e.Kind != model.KindTransient || e.Code != c.code {
					t.Errorf("error = %+v, want transient %s", e, c.code)
				}
				return
			}
			res, err := m.Generate(t.Context(), ask("hi"), nil)
			if err != nil || res.Message.Text != "OK!" || res.Model != "m2" || res.Usage == nil || res.Usage.InputTokens != 9 || res.Usage.OutputTokens != 4 {
				t.Errorf("Generate = %+v, usage %+v, %v; want OK!", res, res.Usage, err)
			}
		})
	}
}

// F-096: blocks that repeat an index are blocks of their own.
func TestRepeatedIndex(t *testing.T) {
	t.Parallel()
	use := func(id string) string {
		return fmt.Sprintf(`{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":%q,"name":"task","input":{}}}`, id)
	}
	args := func(s string) string {
		return fmt.Sprintf(`{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":%q}}`, s)
	}
	end := `{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":4}}`
	res, err := client(t, serve(t, sse(stream(began, use("a"), args(`{"n":`), args(`1}`), use("b"), args(`{"n":2}`), use("b"), end, stop)))).Generate(t.Context(), ask("hi"), nil)
	if err != nil {
		t.Fatal(err)
	}
	calls := res.Message.ToolCalls
	if len(calls) != 3 || calls[0].Args != `{"n":1}` || calls[1].Args != `{"n":2}` || calls[2].Args != "{}" || calls[2].ID == "b" || calls[2].ID == "" {
		t.Errorf("calls = %+v, want three of their own", calls)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status     int
		kind, text string
		want       model.ErrorKind
		code       string
	}{
		{401, "authentication_error", "bad key " + secret, model.KindPermanent, "unauthorized"},
		{403, "permission_error", "no", model.KindPermanent, "unauthorized"},
		{404, "not_found_error", "no such model", model.KindPermanent, "not_found"},
		{400, "invalid_request_error", "bad request", model.KindPermanent, "http_400"},
		{413, "request_too_large", "too large", model.KindPermanent, "context_length_exceeded"},
		{429, "rate_limit_error", "slow down", model.KindTransient, "rate_limited"},
		{500, "api_error", "oops", model.KindTransient, "http_500"},
		{529, "overloaded_error", strings.Repeat("x", 5000), model.KindTransient, "overloaded"},
	} {
		t.Run(fmt.Sprint(c.status), func(t *testing.T) {
			t.Parallel()
			s := serve(t, refusal(c.status, c.kind, c.text))
			e := fault(t, client(t, s))
			if e.Kind != c.want || e.Code != c.code || len(e.Message) > 600 {
				t.Errorf("error = %+v, want %s %s", e, c.want, c.code)
			}
		})
	}
}

// CANCEL-03: a call ends with its context and its cause.
func TestCancel(t *testing.T) {
	t.Parallel()
	why := errors.New("stopped by the user")
	m := client(t, serve(t, hanging(stream(began, text0, says("Half of")))))
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	_, err := m.Generate(ctx, ask("hi"), func(d model.Delta) {
		if d.Text != "" {
			cancel(why)
		}
	})
	if !errors.Is(err, why) {
		t.Errorf("error = %v, want the cause", err)
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

// Whatever a server sends, there is an answer or an error, in valid UTF-8, and the
// answer can be given back.
func FuzzStream(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.sse")
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(stream(began, text0, says("x"), ended, stop)))
	f.Add([]byte(stream(began, `{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"\u00e9","name":"t t","input":{"a":1}}}`, ended)))
	f.Fuzz(func(t *testing.T, body []byte) {
		dec := ssestream.NewDecoder(&http.Response{Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(bytes.NewReader(body))})
		a := newAssembly(model.Request{}, "s", func(d model.Delta) {
			if !utf8.ValidString(d.Text + d.ToolCall) {
				t.Errorf("delta %+q is no UTF-8", d.Text+d.ToolCall)
			}
		})
		if a.stream(dec, func() {}) != nil {
			return
		}
		res, err := a.response("m")
		if err != nil {
			return
		}
		msgs := []model.Message{{Role: model.RoleUser, Text: "x"}, res.Message}
		msgs[1].Native = nil // its signatures are rubbish
		for _, c := range res.Message.ToolCalls {
			msgs = append(msgs, model.Message{Role: model.RoleTool, ToolCallID: c.ID, Text: "done"})
		}
		m := &Model{cfg: Config{Model: "m", MaxOutputTokens: 1}, source: "s"}
		p, err := m.params(model.Request{Messages: msgs})
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if problem := fakeserver.CheckMessages(b); problem != "" {
			t.Errorf("a strict server refuses the replay: %s", problem)
		}
	})
}
