package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tmaxmax/go-sse"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func serve(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	ts := httptest.NewServer(h)
	t.Cleanup(ts.Close)
	hc := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(hc.CloseIdleConnections)
	c, err := New(ts.URL+"/base/", "secret", hc)
	if err != nil {
		t.Fatal(err)
	}
	return c.WithPauses(time.Millisecond, 10*time.Millisecond)
}

func TestNewRefusesBadAddresses(t *testing.T) {
	t.Parallel()
	for _, u := range []string{"", "127.0.0.1:8484", "ftp://x", "http://", "http://a b"} {
		if _, err := New(u, "", nil); err == nil {
			t.Errorf("New(%q) was accepted", u)
		}
	}
	if _, err := New("http://x", "a\r\nb", nil); err == nil {
		t.Error("a token with a line break was accepted")
	}
	if _, err := New("http://127.0.0.1:1", "", nil); err != nil {
		t.Error(err)
	}
}

func TestRequestsCarryTokenPathAndTrace(t *testing.T) {
	t.Parallel()
	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.EscapedPath() != "/base/v1/tasks/a%2Fb%20c" || r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("Traceparent") != parent {
			t.Errorf("request %s, headers %v", r.URL.EscapedPath(), r.Header)
		}
		fmt.Fprint(w, `{"task_id":"t_1","status":"running","a_later_field":1}`)
	})
	task, err := c.GetTask(telemetry.ContextWith(t.Context(), parent, ""), "a/b c")
	if err != nil || task.Status != contract.TaskRunning {
		t.Errorf("GetTask = %+v, %v", task, err)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	var answer atomic.Value
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) { answer.Load().(func(http.ResponseWriter))(w) })
	answer.Store(func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", wire.ProblemType)
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(429)
		_ = json.NewEncoder(w).Encode(wire.Problem{Status: 429, Code: wire.CodeQueueFull, Detail: "full", Errors: []wire.ProblemFault{{Location: "body.x", Message: "odd"}}})
	})
	_, err := c.SubmitTask(t.Context(), wire.TaskRequest{})
	var e *Error
	if !errors.As(err, &e) || e.Status != 429 || e.Code != wire.CodeQueueFull || e.Detail != "full" || e.RetryAfter != 7*time.Second {
		t.Errorf("problem = %#v", err)
	}
	if s := e.Error(); !strings.Contains(s, "429") || !strings.Contains(s, "body.x: odd") {
		t.Errorf("text = %q", s)
	}
	answer.Store(func(w http.ResponseWriter) {
		http.Error(w, "<html>bad gateway "+strings.Repeat("x", 10_000), http.StatusBadGateway)
	})
	if err := c.CancelRun(t.Context(), "r_1"); !errors.As(err, &e) || e.Status != 502 || e.Code != "" || len(e.Detail) > 500 {
		t.Errorf("answer of a proxy = %v", err)
	}
	answer.Store(func(w http.ResponseWriter) { fmt.Fprint(w, "<html>hello") })
	if _, err := c.Admission(t.Context()); err == nil || errors.As(err, &e) && e.Status == 200 {
		t.Errorf("an answer that is not JSON = %v", err)
	}
}

// event writes one event as the server does.
func event(w http.ResponseWriter, seq int, typ string) {
	fmt.Fprintf(w, "id: %d\nevent: %s\ndata: {\"seq\":%d,\"event_type\":%q,\"run_id\":\"r_1\"}\n\n", seq, typ, seq, typ)
	_ = http.NewResponseController(w).Flush()
}

// F-018: the position survives a connection that breaks before its first event.
func TestStreamKeepsItsPlace(t *testing.T) {
	t.Parallel()
	var positions []string
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		positions = append(positions, r.Header.Get("Last-Event-ID"))
		w.Header().Set("Content-Type", "text/event-stream")
		switch len(positions) {
		case 1:
			fmt.Fprint(w, ": open\n\n")
			event(w, 3, "run.message")
		case 2: // nothing
		case 3:
			w.WriteHeader(503)
		case 4:
			event(w, 3, "run.message") // again
			event(w, 4, "run.message")
			event(w, 9, "run.completed")
		}
	})
	var got []uint64
	retries := 0
	q := EventQuery{RunID: "r_1", OnRetry: func(error) { retries++ }}
	err := c.Stream(t.Context(), q, 2, func(rec contract.EventRecord) error { got = append(got, rec.Seq); return nil })
	if err != nil || fmt.Sprint(got) != "[3 4 9]" || fmt.Sprint(positions) != "[2 3 3 3]" || retries != 3 {
		t.Errorf("events %v, positions %v, %d retries, %v; want [3 4 9], [2 3 3 3], 3", got, positions, retries, err)
	}
}

func TestStreamGaps(t *testing.T) {
	t.Parallel()
	n := 0
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		n++
		w.Header().Set("Content-Type", "text/event-stream")
		if n == 1 {
			fmt.Fprint(w, "id: 5\nevent: gap\ndata: {\"from_seq\":6,\"to_seq\":100}\n\n")
			return
		}
		if id := r.Header.Get("Last-Event-ID"); id != "5" {
			t.Errorf("after a reset the client comes back with %s, want 5", id)
		}
		event(w, 6, "run.failed")
	})
	var gaps []wire.Gap
	var got []uint64
	err := c.Stream(t.Context(), EventQuery{RunID: "r_1", OnGap: func(g wire.Gap) { gaps = append(gaps, g) }}, 100, func(rec contract.EventRecord) error {
		got = append(got, rec.Seq)
		return nil
	})
	if err != nil || len(gaps) != 1 || gaps[0] != (wire.Gap{FromSeq: 6, ToSeq: 100}) || fmt.Sprint(got) != "[6]" {
		t.Errorf("gaps %v, events %v, %v", gaps, got, err)
	}
}

func TestStreamEnds(t *testing.T) {
	t.Parallel()
	var mode atomic.Int64
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch mode.Load() {
		case 0:
			w.Header().Set("Content-Type", "text/event-stream")
			event(w, 1, "run.message")
		case 1:
			w.Header().Set("Content-Type", wire.ProblemType)
			w.WriteHeader(401)
			fmt.Fprint(w, `{"code":"unauthorized"}`)
		case 2:
			w.WriteHeader(204)
		case 3:
			fmt.Fprint(w, "hello")
		case 4:
			w.Header().Set("Content-Type", "text/event-stream")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		case 5:
			w.WriteHeader(503)
		}
	})
	each := func(contract.EventRecord) error { return ErrStop }
	if err := c.Stream(t.Context(), EventQuery{}, 0, each); err != nil {
		t.Errorf("ErrStop = %v", err)
	}
	broken := errors.New("broken")
	if err := c.Stream(t.Context(), EventQuery{}, 0, func(contract.EventRecord) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("error of the function = %v", err)
	}
	mode.Store(1)
	var e *Error
	if err := c.Stream(t.Context(), EventQuery{}, 0, each); !errors.As(err, &e) || e.Code != wire.CodeUnauthorized {
		t.Errorf("401 = %v; want it at once", err)
	}
	mode.Store(2)
	if err := c.Stream(t.Context(), EventQuery{}, 0, each); err != nil {
		t.Errorf("204 = %v", err)
	}
	mode.Store(3)
	if err := c.Stream(t.Context(), EventQuery{}, 0, each); err == nil {
		t.Error("an answer that is no stream was taken for one")
	}
	// Silence: the connection is given up and made anew.
	mode.Store(4)
	c.idle = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	silent := 0
	err := c.Stream(ctx, EventQuery{OnRetry: func(err error) {
		if strings.Contains(err.Error(), "silence") {
			silent++
		}
		if silent == 2 {
			cancel()
		}
	}}, 0, each)
	cancel()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel = %v", err)
	}
	mode.Store(5)
	c.outage = 30 * time.Millisecond
	if err := c.Stream(t.Context(), EventQuery{}, 0, each); !errors.As(err, &e) || e.Status != 503 {
		t.Errorf("long outage = %v; want it told", err)
	}
}

func FuzzStream(f *testing.F) {
	f.Add("id: 1\nevent: run.message\ndata: {\"seq\":1}\n\n")
	f.Add("id: 5\nevent: gap\ndata: {\"from_seq\":6,\"to_seq\":100}\n\n: x\n\nid: 7\n\n")
	f.Add("id: 99999999999999999999\ndata: {\n\nid: \x00\ndata\n\nretry: x\n\n")
	f.Fuzz(func(t *testing.T, in string) {
		last := uint64(0)
		reset := false
		s := &stream{q: EventQuery{OnGap: func(wire.Gap) { reset = true }}}
		s.each = func(contract.EventRecord) error {
			return nil
		}
		for ev, err := range sse.Read(strings.NewReader(in), &sse.ReadConfig{MaxEventSize: 1 << 16}) {
			if err != nil || s.take(ev) != nil {
				return
			}
			if s.pos < last && !reset {
				t.Fatalf("the position went back from %d to %d without a gap", last, s.pos)
			}
			last, reset = s.pos, false
		}
	})
}

// REG-13: a policy that permits nothing is not lost on its way: without the key it
// would permit everything.
func TestEmptyPolicyIsSent(t *testing.T) {
	t.Parallel()
	for want, allowed := range map[string][]string{`{"input":"x"}`: nil, `{"input":"x","allowed_subagents":[]}`: {}} {
		if got, err := json.Marshal(wire.RunRequest{Input: "x", AllowedSubagents: allowed}); err != nil || string(got) != want {
			t.Errorf("sent %s, %v; want %s", got, err, want)
		}
	}
}
