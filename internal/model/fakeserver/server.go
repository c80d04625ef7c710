// Package fakeserver is a model server that answers out of a script (package
// script). It speaks two protocols, /v1/chat/completions and /v1/messages, with
// streaming and without, and it is strict: what a provider would refuse, it refuses
// with status 400 and a text that says what and where. Faults of the script become
// what a client sees of them: a status, silence, a broken connection.
//
// A request does not say which agent asks. Who is offered the tool `task` is the
// lead; everybody else is some sub-agent, which fits the rules of all of them.
package fakeserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/script"
)

// maxRequest bounds a request's body.
const maxRequest = 32 << 20

// leadTool is the tool that only leads are offered.
const leadTool = "task"

// Server answers requests. It is an http.Handler.
type Server struct {
	next    func(context.Context, model.Request) (script.Step, error)
	mux     *http.ServeMux
	closing chan struct{}
	end     sync.Once
	// OnRequest, if set, hears of each request: the protocol's path, and why it is
	// refused, or "".
	OnRequest func(path, refusal string)
}

// New returns a server that answers out of s.
func New(s *script.Script) *Server { return Answering(script.New("fake", s).Next) }

// Answering returns a server that says what next gives for each request that is
// accepted. Next is called from several goroutines at once, with the request's
// context; after an error that is no [model.Error] the client gets nothing.
func Answering(next func(context.Context, model.Request) (script.Step, error)) *Server {
	f := &Server{next: next, mux: http.NewServeMux(), closing: make(chan struct{})}
	f.mux.HandleFunc("POST "+chatPath, func(w http.ResponseWriter, r *http.Request) { f.serve(w, r, chat{}) })
	f.mux.HandleFunc("POST "+messagesPath, func(w http.ResponseWriter, r *http.Request) { f.serve(w, r, messages{}) })
	// A script answers for every model, so that each name is right.
	f.mux.HandleFunc("GET /v1/models/{name...}", func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"id": r.PathValue("name"), "object": "model", "type": "model"})
	})
	return f
}

// The paths of the two protocols.
const (
	chatPath     = "/v1/chat/completions"
	messagesPath = "/v1/messages"
)

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// Close ends the answers that are silent on purpose.
func (s *Server) Close() { s.end.Do(func() { close(s.closing) }) }

// protocol is one way to say the same.
type protocol interface {
	// read checks a request and gives what it asks, or says what is wrong with it.
	read(header http.Header, body []byte) (req request, refusal string)
	// events is a streamed answer in pieces; after n of them a fault may come.
	events(a answer) []string
	// whole is an answer that is not streamed.
	whole(a answer) any
	// failure is an error's body.
	failure(status int, kind, text string) any
	// failureEvent is an error inside a stream.
	failureEvent() string
}

// request is what a client asks.
type request struct {
	model.Request
	model  string
	stream bool
}

// answer is what there is to say.
type answer struct {
	script.Step
	model string
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, p protocol) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		writeJSON(w, http.StatusRequestEntityTooLarge, p.failure(http.StatusRequestEntityTooLarge, "invalid_request_error", err.Error()))
		return
	}
	req, refusal := p.read(r.Header, body)
	if s.OnRequest != nil {
		s.OnRequest(r.URL.Path, refusal)
	}
	if refusal != "" {
		writeJSON(w, http.StatusBadRequest, p.failure(http.StatusBadRequest, "invalid_request_error", refusal))
		return
	}
	req.Agent = script.AnySubagent
	for _, t := range req.Tools {
		if t.Name == leadTool {
			req.Agent = "lead"
		}
	}
	step, err := s.next(r.Context(), req.Request)
	if err != nil {
		var fault *model.Error
		if errors.As(err, &fault) {
			writeJSON(w, http.StatusInternalServerError, p.failure(http.StatusInternalServerError, "api_error", fault.Message))
		}
		return // or the client has left
	}
	s.say(w, r, p, answer{Step: step, model: req.model}, req.stream)
}

func (s *Server) say(w http.ResponseWriter, r *http.Request, p protocol, a answer, stream bool) {
	refuse := func(status int, kind, text string) {
		if a.RetryAfter != "" {
			w.Header().Set("Retry-After", a.RetryAfter)
		}
		writeJSON(w, status, p.failure(status, kind, text))
	}
	switch a.Fault {
	case script.FaultHTTP500:
		refuse(http.StatusInternalServerError, "api_error", "the script answers with status 500")
		return
	case script.FaultHTTP503:
		refuse(http.StatusServiceUnavailable, "api_error", "the script answers with status 503")
		return
	case script.FaultRateLimit:
		refuse(http.StatusTooManyRequests, "rate_limit_error", "the script answers with status 429")
		return
	case script.FaultOverloaded:
		refuse(529, "overloaded_error", "the script answers with status 529")
		return
	case script.FaultTimeout:
		s.hold(r)
		return
	case script.FaultReset:
		reset(w)
		return
	}
	if !stream && !a.Fault.Fails() {
		writeJSON(w, http.StatusOK, p.whole(a))
		return
	}
	s.stream(w, r, p, a)
}

func (s *Server) stream(w http.ResponseWriter, r *http.Request, p protocol, a answer) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	write := func(text string) bool {
		_, err := io.WriteString(w, text)
		return err == nil && out.Flush() == nil // a client that left needs no more
	}
	if a.Fault == script.FaultComments {
		s.comments(r, write)
		return
	}
	events := p.events(a)
	if a.Fault.Fails() {
		events = events[:(len(events)+1)/2]
	}
	for _, e := range events {
		if a.Fault != script.FaultSplitUTF8 {
			if !write(e) {
				return
			}
			continue
		}
		for i := range len(e) { // by byte, so that reads end inside of characters too
			if !write(e[i : i+1]) {
				return
			}
		}
	}
	switch a.Fault {
	case script.FaultSilence:
		s.hold(r)
	case script.FaultErrorInStream:
		write(p.failureEvent())
	case script.FaultDisconnect:
		panic(http.ErrAbortHandler) // the way to break a connection
	}
}

// comments keeps the line busy until the client has had enough.
func (s *Server) comments(r *http.Request, write func(string) bool) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for write(": still here\n\n") {
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		case <-s.closing:
			return
		}
	}
}

func (s *Server) hold(r *http.Request) {
	select {
	case <-r.Context().Done():
	case <-s.closing:
	}
}

// reset ends the connection so that the client sees a reset and no end.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // without it the end is in order
	}
	_ = conn.Close()
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // a client that left needs no more
}

// quote writes a JSON string and leaves bytes that are no UTF-8 as they are.
func quote(s string) json.RawMessage {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < 0x20:
			fmt.Fprintf(&b, `\u%04x`, c)
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return json.RawMessage(b.String())
}

// pieces cuts a text in two: between characters, or inside of the first one that
// has several bytes.
func pieces(s string, inside bool) []string {
	cut := len(s) / 2
	for cut > 0 && s[cut]&0xC0 == 0x80 {
		cut--
	}
	if inside {
		for i := range len(s) {
			if s[i] >= 0xC0 {
				cut = i + 1
				break
			}
		}
	}
	var out []string
	for _, p := range []string{s[:cut], s[cut:]} {
		if p != "" {
			out = append(out, p)
		}
	}
	return out
}
