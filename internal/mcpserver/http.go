package mcpserver

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
)

// HTTPConfig says how to serve over HTTP. Who may call, and how long a body may be,
// is the business of the layers around the handler.
type HTTPConfig struct {
	Config
	// Owner names on whose behalf a request is made; sessions of different owners
	// have nothing to do with each other.
	Owner func(context.Context) string
	// KeepAlive is the time between two comments on a stream; default 15 s.
	KeepAlive time.Duration
	// WriteTimeout cuts off a reader that takes nothing for so long; default 10 s.
	WriteTimeout time.Duration
}

const (
	sessionHeader = "Mcp-Session-Id"
	maxSession    = 128
	// overtaken is how long a cancellation waits for the task that it has overtaken
	// on the way.
	overtaken = 2 * time.Second
)

// NewHandler serves the tools by streamable HTTP, POST only. It keeps nothing between
// two requests, so any replica may get the next one.
//
// Protocol versions with sessions take a call back by a request of its own, which
// may reach another replica. So the id of a session is drawn here and not stored, and
// the id of a task follows from owner, session and request: [TaskID].
func NewHandler(b Backend, cfg HTTPConfig) http.Handler {
	if cfg.KeepAlive <= 0 {
		cfg.KeepAlive = 15 * time.Second
	}
	if cfg.WriteTimeout <= 0 {
		cfg.WriteTimeout = 10 * time.Second
	}
	if cfg.Owner == nil {
		cfg.Owner = func(context.Context) string { return "" }
	}
	srv := New(b, cfg.Config)
	return &handler{
		b: b, cfg: cfg,
		next: sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return srv }, &sdk.StreamableHTTPOptions{
			Stateless: true,
			// The layers around this look at Host and Origin, and know whether it
			// stands behind a proxy.
			DisableLocalhostProtection: true,
		}),
	}
}

type handler struct {
	b    Backend
	cfg  HTTPConfig
	next http.Handler
}

// call is the HTTP request behind a tool call.
type call struct {
	connection context.Context
	task       contract.TaskID // empty: any
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// TaskID is the id that a task submitted under ctx must get; false: any will do.
func TaskID(ctx context.Context) (contract.TaskID, bool) {
	c := callOf(ctx)
	if c == nil || c.task == "" {
		return "", false
	}
	return c.task, true
}

// message is what is looked at in a body.
type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		RequestID json.RawMessage `json:"requestId"`
	} `json:"params"`
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var m message
	if r.Body != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, "the body did not arrive in whole", http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		// A batch, or what is no message at all, is the library's business.
		if json.Unmarshal(body, &m) != nil {
			m = message{}
		}
	}
	session := r.Header.Get(sessionHeader)
	if len(session) > maxSession {
		http.Error(w, fmt.Sprintf("%s has more than %d characters", sessionHeader, maxSession), http.StatusBadRequest)
		return
	}
	c := &call{connection: r.Context()}
	stream := false
	switch m.Method {
	case "initialize":
		w.Header().Set(sessionHeader, rand.Text())
	case "tools/call":
		stream = len(m.ID) > 0
		c.task = h.taskID(r.Context(), session, m.ID)
	case "notifications/cancelled":
		if id := h.taskID(r.Context(), session, m.Params.RequestID); id != "" {
			h.takeBack(r.Context(), id)
		}
	}
	rw := newWriter(w, h.cfg.WriteTimeout)
	if stream {
		stop := rw.keepAlive(h.cfg.KeepAlive)
		defer stop()
	}
	h.next.ServeHTTP(rw, r.WithContext(context.WithValue(r.Context(), callKey{}, c)))
}

var idText = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// taskID is the id of the task of a request in a session; empty without one.
func (h *handler) taskID(ctx context.Context, session string, request json.RawMessage) contract.TaskID {
	var id bytes.Buffer
	if session == "" || len(request) == 0 || json.Compact(&id, request) != nil || id.String() == "null" {
		return ""
	}
	name, err := json.Marshal([]string{h.cfg.Owner(ctx), session, id.String()})
	if err != nil { // plain strings: cannot happen
		return ""
	}
	sum := sha256.Sum256(name)
	return contract.TaskID("t_" + idText.EncodeToString(sum[:])[:26])
}

// takeBack cancels the task of a request that its client takes back. Nothing else can
// have the id: of a request that was no task there is none.
func (h *handler) takeBack(ctx context.Context, id contract.TaskID) {
	ctx, cancel := context.WithTimeout(ctx, cancelTimeout)
	defer cancel()
	retry, began := pause.Growing(50*time.Millisecond, 500*time.Millisecond), time.Now()
	for {
		err := h.b.CancelTask(ctx, id)
		var p *wire.Problem
		switch known := errors.As(err, &p); {
		case err == nil, known && p.Code == wire.CodeAlreadyFinished:
			return
		case known && p.Code == wire.CodeNotFound && time.Since(began) > overtaken:
			return
		}
		if pause.For(ctx, retry.NextBackOff()) != nil {
			h.cfg.Log.Warn().Err(err).Str("task", string(id)).Msg("mcp: a task that was taken back could not be cancelled")
			return
		}
	}
}

// writer gives each write its own time, and keeps a stream open that is silent. Its
// header is its own until the first byte, because two goroutines write.
type writer struct {
	w       http.ResponseWriter
	rc      *http.ResponseController
	timeout time.Duration
	header  http.Header

	mu    sync.Mutex
	begun bool
	sse   bool
}

func newWriter(w http.ResponseWriter, timeout time.Duration) *writer {
	return &writer{w: w, rc: http.NewResponseController(w), timeout: timeout, header: http.Header{}}
}

func (w *writer) Header() http.Header { return w.header }

func (w *writer) WriteHeader(status int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin(status, w.header)
}

// begin must be called with the lock.
func (w *writer) begin(status int, header http.Header) {
	if w.begun {
		return
	}
	w.begun = true
	w.sse = strings.HasPrefix(header.Get("Content-Type"), "text/event-stream")
	maps.Copy(w.w.Header(), header)
	w.w.WriteHeader(status)
}

func (w *writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin(http.StatusOK, w.header)
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.timeout))
	return w.w.Write(p)
}

// FlushError is what http.ResponseController flushes by.
func (w *writer) FlushError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begin(http.StatusOK, w.header)
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.timeout))
	return w.rc.Flush()
}

// keepAlive writes a comment from time to time: proxies close what is silent, and a
// caller that is gone without a word is noticed by it. The library writes an event at
// once, so that a comment is never within one.
func (w *writer) keepAlive(every time.Duration) (stop func()) {
	quit := make(chan struct{})
	var beat sync.WaitGroup
	beat.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-quit:
				return
			case <-t.C:
			}
			if w.comment() != nil {
				return
			}
		}
	})
	return func() {
		close(quit)
		beat.Wait()
		_ = w.rc.SetWriteDeadline(time.Now().Add(w.timeout)) // for the end of the answer
	}
}

func (w *writer) comment() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	// A call that has lasted so long is answered by a stream.
	w.begin(http.StatusOK, http.Header{
		"Content-Type": {"text/event-stream"}, "Cache-Control": {"no-cache, no-transform"}, "X-Accel-Buffering": {"no"},
	})
	if !w.sse {
		return nil
	}
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.timeout))
	if _, err := io.WriteString(w.w, ": keep-alive\n\n"); err != nil {
		return err
	}
	return w.rc.Flush()
}
