// Package modeltest is a model server for tests. It speaks the chat completions
// protocol over real HTTP, gives the replies it was told to, and is strict: what
// a provider would refuse, it refuses with status 400 and fails the test.
package modeltest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model/fakeserver"
)

// maxRequest bounds a request body.
const maxRequest = 32 << 20

// Reply is one answer of the server.
type Reply struct {
	status  int
	header  http.Header
	body    []byte
	bytes   bool // one byte a write
	hang    bool // keep the line open after the body
	silent  bool // not even headers
	comment bool // comment lines without end
}

// Call is a tool call in a reply. The ID is sent as it is.
type Call struct{ ID, Name, Args string }

// Usage is what a reply reports.
type Usage struct{ Input, Output, Total int64 }

// Text answers with text.
func Text(s string) Reply { return Answer(s, nil, "stop", &Usage{10, 5, 15}) }

// Calls answers with tool calls.
func Calls(calls ...Call) Reply { return Answer("", calls, "tool_calls", &Usage{10, 5, 15}) }

// Answer answers with all that a reply can have, streamed in pieces; a nil
// usage is not sent.
func Answer(text string, calls []Call, finish string, usage *Usage) Reply {
	var w stream
	half := len(text) / 2
	for half > 0 && !utf8.RuneStart(text[half]) {
		half--
	}
	for _, part := range []string{text[:half], text[half:]} {
		if part != "" {
			w.delta(map[string]any{"role": "assistant", "content": part}, nil)
		}
	}
	for i, c := range calls {
		head := map[string]any{"index": i, "type": "function", "function": map[string]any{"name": c.Name, "arguments": ""}}
		if c.ID != "" {
			head["id"] = c.ID
		}
		w.delta(map[string]any{"tool_calls": []any{head}}, nil)
		half := len(c.Args) / 2
		for half > 0 && !utf8.RuneStart(c.Args[half]) {
			half--
		}
		for _, part := range []string{c.Args[:half], c.Args[half:]} {
			if part != "" {
				w.delta(map[string]any{"tool_calls": []any{map[string]any{"index": i, "function": map[string]any{"arguments": part}}}}, nil)
			}
		}
	}
	w.delta(map[string]any{}, &finish)
	if usage != nil {
		w.chunk(map[string]any{"choices": []any{}, "usage": map[string]any{
			"prompt_tokens": usage.Input, "completion_tokens": usage.Output, "total_tokens": usage.Total,
		}})
	}
	return w.end()
}

// SSE answers with a stream, byte for byte.
func SSE(body []byte) Reply {
	return Reply{status: 200, header: http.Header{"Content-Type": {"text/event-stream"}}, body: body}
}

// JSON answers with a JSON body and a status.
func JSON(status int, body string) Reply {
	return Reply{status: status, header: http.Header{"Content-Type": {"application/json"}}, body: []byte(body)}
}

// Silence takes the request and never answers.
func Silence() Reply { return Reply{silent: true} }

// Comments answers with comment lines only, without end.
func Comments() Reply { r := SSE(nil); r.comment = true; return r }

// With returns the reply with a header.
func (r Reply) With(key, value string) Reply {
	r.header = r.header.Clone()
	r.header.Set(key, value)
	return r
}

// ByByte returns the reply sent in writes of one byte.
func (r Reply) ByByte() Reply { r.bytes = true; return r }

// Hanging returns the reply with the line kept open after it.
func (r Reply) Hanging() Reply { r.hang = true; return r }

// stream writes chunks.
type stream struct{ b []byte }

func (w *stream) chunk(fields map[string]any) {
	all := map[string]any{"id": "cmpl-test", "object": "chat.completion.chunk", "created": 1700000000, "model": "fake-1"}
	for k, v := range fields {
		all[k] = v
	}
	line, _ := json.Marshal(all) // plain values
	w.b = fmt.Appendf(w.b, "data: %s\n\n", line)
}

func (w *stream) delta(delta any, finish *string) {
	w.chunk(map[string]any{"choices": []any{map[string]any{"index": 0, "delta": delta, "finish_reason": finish}}})
}

func (w *stream) end() Reply { return SSE(append(w.b, "data: [DONE]\n\n"...)) }

// Load reads replies from a JSON file: {"turns": [{"message", "finish_reason",
// "usage"}]}, where message has content, which may be null or absent, and
// tool_calls in the protocol's form.
func Load(t testing.TB, path string) []Reply {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Turns []struct {
			Message      map[string]json.RawMessage
			FinishReason string `json:"finish_reason"`
			Usage        json.RawMessage
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	var replies []Reply
	for _, turn := range file.Turns {
		var w stream
		delta := map[string]any{}
		for k, v := range turn.Message {
			if k != "tool_calls" {
				delta[k] = v
			}
		}
		w.delta(delta, nil)
		var calls []map[string]any
		if raw, ok := turn.Message["tool_calls"]; ok {
			if err := json.Unmarshal(raw, &calls); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
		}
		for i, c := range calls {
			c["index"] = i
			w.delta(map[string]any{"tool_calls": []any{c}}, nil)
		}
		w.delta(map[string]any{}, &turn.FinishReason)
		if turn.Usage != nil {
			w.chunk(map[string]any{"choices": []any{}, "usage": turn.Usage})
		}
		replies = append(replies, w.end())
	}
	return replies
}

// Server is a running model server.
type Server struct {
	t       testing.TB
	http    *httptest.Server
	closing chan struct{}

	mu       sync.Mutex
	replies  []Reply
	repeat   bool
	lenient  bool
	requests []Request
	arrived  chan struct{}
	times    []time.Time
}

// Request is one request that arrived.
type Request struct {
	Header   http.Header
	Body     []byte
	Messages []Message
	Tools    []struct {
		Function struct{ Name string }
	}
	Model  string
	Stream bool
}

// Message is one message of a request.
type Message struct {
	Role       string
	Content    json.RawMessage
	ToolCalls  []ToolCall `json:"tool_calls"`
	ToolCallID *string    `json:"tool_call_id"`
}

// ToolCall is one call of a message.
type ToolCall struct {
	ID, Type string
	Function struct{ Name, Arguments string }
}

// Text is the content, or "" if it is no string.
func (m Message) Text() string {
	var s string
	_ = json.Unmarshal(m.Content, &s) // null is ""
	return s
}

// New starts a server that gives replies in order, and status 500 after them. It
// stops with the test.
func New(t testing.TB, replies ...Reply) *Server {
	t.Helper()
	s := &Server{t: t, closing: make(chan struct{}), replies: replies, arrived: make(chan struct{}, 10_000)}
	s.http = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		close(s.closing)
		s.http.Close()
	})
	return s
}

// RepeatLast makes the server repeat the last reply for ever.
func (s *Server) RepeatLast() *Server { s.mu.Lock(); defer s.mu.Unlock(); s.repeat = true; return s }

// Lenient makes a refused request no failure of the test; it is still refused.
func (s *Server) Lenient() *Server { s.mu.Lock(); defer s.mu.Unlock(); s.lenient = true; return s }

// URL is the base URL to configure.
func (s *Server) URL() string { return s.http.URL + "/v1" }

// Requests returns what arrived so far, in order.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.requests...)
}

// Times returns when the requests arrived.
func (s *Server) Times() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Time(nil), s.times...)
}

// Arrived gets a value for each request that arrives.
func (s *Server) Arrived() <-chan struct{} { return s.arrived }

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/chat/completions" {
		http.NotFound(w, r)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		return
	}
	req := Request{Header: r.Header.Clone(), Body: body}
	problem := ""
	if err := json.Unmarshal(body, &req); err != nil {
		problem = "body: " + err.Error()
	} else {
		problem = Check(req)
	}
	reply, lenient := s.take(req)
	if problem != "" {
		if !lenient {
			s.t.Errorf("the model server refuses request %d: %s", len(s.Requests()), problem)
		}
		reply = JSON(http.StatusBadRequest, fmt.Sprintf(`{"error":{"type":"invalid_request_error","message":%q}}`, problem))
	}
	s.send(w, r, reply)
}

func (s *Server) take(req Request) (Reply, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, req)
	s.times = append(s.times, time.Now())
	select {
	case s.arrived <- struct{}{}:
	default:
	}
	if len(s.replies) == 0 {
		return JSON(http.StatusInternalServerError, `{"error":{"message":"the test gave no more replies"}}`), s.lenient
	}
	r := s.replies[0]
	if !s.repeat || len(s.replies) > 1 {
		s.replies = s.replies[1:]
	}
	return r, s.lenient
}

func (s *Server) send(w http.ResponseWriter, r *http.Request, reply Reply) {
	if reply.silent {
		s.hold(r)
		return
	}
	for k, v := range reply.header {
		w.Header()[k] = v
	}
	w.WriteHeader(reply.status)
	flush := http.NewResponseController(w)
	if reply.bytes {
		for i := range reply.body {
			if _, err := w.Write(reply.body[i : i+1]); err != nil {
				return
			}
			_ = flush.Flush() // a client that left is noticed at the next write
		}
	} else if _, err := w.Write(reply.body); err != nil {
		return
	}
	_ = flush.Flush()
	if reply.comment {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if _, err := io.WriteString(w, ": still here\n\n"); err != nil {
					return
				}
				_ = flush.Flush()
			case <-r.Context().Done():
				return
			case <-s.closing:
				return
			}
		}
	}
	if reply.hang {
		s.hold(r)
	}
}

func (s *Server) hold(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.closing:
	}
}

// Check says what a strict provider would refuse in a request, or "".
func Check(r Request) string { return fakeserver.CheckChat(r.Body) }
