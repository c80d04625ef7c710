package httpapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/feed/feedtest"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

var run1 = feedtest.Run{Tenant: "default", Thread: "th", ID: "r_1"}

// sse is an open stream, read line by line.
type sse struct {
	resp *http.Response
	r    *bufio.Reader
}

// open opens a stream; header holds pairs.
func (r *rig) open(method, path, body string, header ...string) *sse {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), timeout)
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "text/event-stream")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { cancel(); _ = resp.Body.Close() })
	return &sse{resp: resp, r: bufio.NewReader(resp.Body)}
}

// block returns the next block of lines, without comments and retry unless raw.
func (s *sse) block(raw bool) (string, error) {
	var lines []string
	for {
		line, err := s.r.ReadString('\n')
		if err != nil {
			return strings.Join(lines, "\n"), err
		}
		line = strings.TrimSuffix(line, "\n")
		if line == "" {
			if len(lines) > 0 {
				return strings.Join(lines, "\n"), nil
			}
			continue
		}
		if raw || !strings.HasPrefix(line, ":") && !strings.HasPrefix(line, "retry:") {
			lines = append(lines, line)
		}
	}
}

// ids reads blocks until n ids have come.
func (s *sse) ids(t *testing.T, n int) []string {
	t.Helper()
	var out []string
	for len(out) < n {
		b, err := s.block(false)
		if err != nil {
			t.Fatalf("after %d events: %v", len(out), err)
		}
		id, _, _ := strings.Cut(strings.TrimPrefix(b, "id: "), "\n")
		out = append(out, id)
	}
	return out
}

// EVT-13: the form of a stream, and its end with the run. EVT-15: a run is
// followed live although there is no event store.
func TestRunStreamForm(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	feedtest.Publish(t, r.conn, run1.Message(1, "before the run began"))
	r.engine.start = func(context.Context, runapi.RunInput) (contract.RunRecord, error) {
		feedtest.Publish(t, r.conn, run1.Message(2, "line\nbreak <b>"))
		feedtest.Publish(t, r.conn, run1.Step("t_1", 1, "step"))
		feedtest.Publish(t, r.conn, run1.End(contract.RunCompleted))
		return runRecord("r_1", contract.RunRunning), nil
	}
	s := r.open("POST", "/v1/runs", `{"input":"go"}`)
	if ct := s.resp.Header.Get("Content-Type"); s.resp.StatusCode != 200 || !strings.HasPrefix(ct, "text/event-stream") || s.resp.Header.Get("Location") != "/v1/runs/r_1" {
		t.Fatalf("POST = %d %v", s.resp.StatusCode, s.resp.Header)
	}
	for i, want := range []string{"run.message", "subagent.step", "run.completed"} {
		b, err := s.block(false)
		lines := strings.Split(b, "\n")
		if err != nil || len(lines) != 3 || lines[0] != fmt.Sprintf("id: %d", i+2) || lines[1] != "event: "+want || !strings.HasPrefix(lines[2], `data: {"seq":`) {
			t.Errorf("event %d = %q, %v; want id, event %s and one line of data", i, b, err, want)
		}
	}
	if b, err := s.block(false); !errors.Is(err, io.EOF) {
		t.Errorf("after the run's end came %q, %v; want the end of the stream", b, err)
	}
	// Coming back after the end is told not to.
	if status, _, _ := r.do("GET", "/v1/events?run_id=r_1", "", "Accept", "text/event-stream", "Last-Event-ID", "4"); status != http.StatusNoContent {
		t.Errorf("stream after the end = %d, want 204", status)
	}
	// Last-Event-ID wins over after_seq; a task's feed does not end with the run.
	if ids := r.open("GET", "/v1/events?run_id=r_1&after_seq=0", "", "Last-Event-ID", "3").ids(t, 1); ids[0] != "4" {
		t.Errorf("with Last-Event-ID 3 came %v, want 4", ids)
	}
	task := r.open("GET", "/v1/events?run_id=r_1&task_id=t_1", "")
	if ids := task.ids(t, 1); ids[0] != "3" {
		t.Errorf("task feed began with %v, want 3", ids)
	}
	feedtest.Publish(t, r.conn, run1.Step("t_1", 2, "later"))
	if ids := task.ids(t, 1); ids[0] != "5" {
		t.Errorf("task feed went on with %v, want 5", ids)
	}
	types := r.open("GET", "/v1/events?type=run.completed,run.failed&type=subagent.step", "")
	if ids := types.ids(t, 3); !slices.Equal(ids, []string{"3", "4", "5"}) {
		t.Errorf("two ways of types gave %v", ids)
	}
}

func TestStreamKeepAliveAndLimit(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config, _ *Deps) { c.KeepAlive, c.MaxStreams = 10*time.Millisecond, 1 })
	s := r.open("GET", "/v1/events", "")
	beats := 0
	for beats < 3 {
		b, err := s.block(true)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(b, ": keep-alive") {
			beats++
		}
	}
	r.wantProblem(503, wire.CodeUnavailable, "GET", "/v1/events", "", "Accept", "text/event-stream")
	_ = s.resp.Body.Close()
	natstest.Eventually(t, timeout, func() (bool, string) {
		n := r.server.streams.Load()
		return n == 0, fmt.Sprint(n, " streams are open after the reader left")
	})
}

// A run that is refused gives back the place of its stream, also in the metric.
func TestRefusedRunGivesBackItsStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config, _ *Deps) { c.MaxStreams = 1 })
	r.engine.start = func(context.Context, runapi.RunInput) (contract.RunRecord, error) {
		return contract.RunRecord{}, leaderr.ErrUnavailable
	}
	for range 2 {
		r.wantProblem(503, wire.CodeUnavailable, "POST", "/v1/runs", `{"input":"x"}`, "Accept", "text/event-stream")
	}
	if n := testutil.ToFloat64(r.server.metrics.open); n != 0 {
		t.Errorf("the metric has %v streams, and none is open", n)
	}
	if n := r.server.streams.Load(); n != 0 {
		t.Errorf("%d streams are counted as open", n)
	}
}

// F-018: a resumed stream that drops before its first event keeps its place; a
// made-up position gets a gap and an id to go on from.
func TestStreamResume(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for i := 1; i <= 3; i++ {
		feedtest.Publish(t, r.conn, run1.Message(i, "a"))
	}
	first := r.open("GET", "/v1/events", "")
	if ids := first.ids(t, 3); !slices.Equal(ids, []string{"1", "2", "3"}) {
		t.Fatalf("ids = %v", ids)
	}
	_ = first.resp.Body.Close()
	second := r.open("GET", "/v1/events", "", "Last-Event-ID", "3")
	_ = second.resp.Body.Close() // before any event
	third := r.open("GET", "/v1/events", "", "Last-Event-ID", "3")
	for i := 4; i <= 6; i++ {
		feedtest.Publish(t, r.conn, run1.Message(i, "b"))
	}
	if ids := third.ids(t, 3); !slices.Equal(ids, []string{"4", "5", "6"}) {
		t.Errorf("resumed twice: %v, want 4 5 6", ids)
	}
	unknown := r.open("GET", "/v1/events", "", "Last-Event-ID", "4711")
	b, err := unknown.block(false)
	if want := "id: 6\nevent: gap\ndata: {\"from_seq\":7,\"to_seq\":4711}"; err != nil || b != want {
		t.Errorf("unknown position: %q, %v; want %q", b, err, want)
	}
	feedtest.Publish(t, r.conn, run1.Message(7, "c"))
	if ids := unknown.ids(t, 1); ids[0] != "7" {
		t.Errorf("after the gap came %v, want 7", ids)
	}
}

// cutter breaks every response body after some bytes.
type cutter struct {
	next http.RoundTripper
	cuts atomic.Int64
	max  int64
}

type cutBody struct {
	io.ReadCloser
	c    *cutter
	left int
}

var errCut = errors.New("connection cut")

func (c *cutter) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := c.next.RoundTrip(req)
	if err == nil && c.cuts.Load() < c.max {
		// Some cuts come within an event, some before the first one.
		resp.Body = &cutBody{ReadCloser: resp.Body, c: c, left: 10 + rand.IntN(700)}
	}
	return resp, err
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		b.c.cuts.Add(1)
		_ = b.ReadCloser.Close()
		return 0, errCut
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// EVT-13, I6: over 30 broken connections the reader sees every event once, in
// order, while events are being published.
func TestClientStreamOverBrokenConnections(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config, _ *Deps) { c.KeepAlive = 5 * time.Millisecond })
	cut := &cutter{next: r.http.Transport, max: 30}
	c, err := client.New(r.url, "", &http.Client{Transport: cut})
	if err != nil {
		t.Fatal(err)
	}
	c = c.WithPauses(time.Millisecond, 5*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 2*timeout)
	defer cancel()
	const n = 400
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 1; i < n; i++ {
			if _, err := feedtest.TryPublish(r.conn, run1.Message(i, strings.Repeat("x", 100))); err != nil {
				t.Error(err)
				return
			}
		}
		// The end comes only after all cuts, so that all of them hit the run.
		natstest.Eventually(t, 2*timeout, func() (bool, string) {
			return cut.cuts.Load() >= cut.max, fmt.Sprint(cut.cuts.Load(), " cuts")
		})
		if _, err := feedtest.TryPublish(r.conn, run1.End(contract.RunCompleted)); err != nil {
			t.Error(err)
		}
	})
	var got []uint64
	err = c.Stream(ctx, client.EventQuery{RunID: "r_1"}, 0, func(rec contract.EventRecord) error {
		got = append(got, rec.Seq)
		return nil
	})
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	for i, seq := range got {
		if seq != uint64(i+1) {
			t.Fatalf("event %d has seq %d: a gap or a duplicate after %d cuts", i+1, seq, cut.cuts.Load())
		}
	}
	if len(got) != n || cut.cuts.Load() != cut.max {
		t.Errorf("got %d events over %d cuts, want %d over %d", len(got), cut.cuts.Load(), n, cut.max)
	}
	// The end of a run is known also to a reader who filters it away.
	steps := 0
	if err := c.Stream(ctx, client.EventQuery{RunID: "r_1", Types: []string{contract.RecordStep}}, 0, func(contract.EventRecord) error { steps++; return nil }); err != nil || steps != 0 {
		t.Errorf("filtered stream of an ended run = %d events, %v; want none and its end", steps, err)
	}
}

// A reader that stops reading is cut off after the write deadline.
func TestStreamCutsOffSlowReaders(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *Config, _ *Deps) { c.WriteTimeout = 100 * time.Millisecond })
	ts := httptest.NewUnstartedServer(r.server.Handler())
	// Small buffers of the kernel, so that it takes little to fill them.
	ts.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateNew {
			_ = c.(*net.TCPConn).SetWriteBuffer(4096)
		}
	}
	ts.Start()
	defer ts.Close()
	conn, err := net.Dial("tcp", ts.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetReadBuffer(4096)
	fmt.Fprint(conn, "GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n")
	natstest.Eventually(t, timeout, func() (bool, string) { return r.server.streams.Load() == 1, "the stream is not open" })
	text := strings.Repeat("𝄞", 8000)
	for i := 1; r.server.streams.Load() == 1; i++ {
		if i > 5000 {
			t.Fatal("160 MB were published and the reader that takes nothing is still there")
		}
		feedtest.Publish(t, r.conn, run1.Message(i, text))
	}
	// It cannot be told; the log and the metric say why.
	natstest.Eventually(t, timeout, func() (bool, string) {
		n := testutil.ToFloat64(r.server.metrics.ended.WithLabelValues(endSlow))
		return n == 1, fmt.Sprint(n, " streams are counted as cut off because they were slow")
	})
	natstest.Eventually(t, timeout, func() (bool, string) {
		return strings.Contains(r.logs.String(), `"reason":"slow"`), "the log does not say why the reader was cut off: " + r.logs.String()
	})
	if n := testutil.ToFloat64(r.server.metrics.open); n != 0 {
		t.Errorf("%v streams are open", n)
	}
}

// Whoever can still be told is told why its stream ends; the metric has the same reason.
func TestWhyStreamsEnd(t *testing.T) {
	t.Parallel()
	timedOut := fmt.Errorf("write: %w", os.ErrDeadlineExceeded)
	for _, tc := range []struct {
		name        string
		err, failed error
		stopping    bool
		reason, say string
	}{
		{"end of the run", nil, nil, false, endFinished, "end of the run"},
		{"slow, the feed's write", fmt.Errorf("%w: %w", errWrite, timedOut), timedOut, false, endSlow, ""},
		{"slow, the keep-alive's write", context.Canceled, timedOut, false, endSlow, ""},
		{"slow while stopping", context.Canceled, timedOut, true, endSlow, ""},
		{"gone", errWrite, net.ErrClosed, false, endLeft, ""},
		{"gone while idle", context.Canceled, nil, false, endLeft, ""},
		{"stopping", context.Canceled, nil, true, endStopping, "shutting down"},
		{"no NATS", fmt.Errorf("%w: x", leaderr.ErrUnavailable), nil, false, endUnavailable, "Last-Event-ID"},
		{"a fault", errors.New("x"), nil, false, endError, "Last-Event-ID"},
	} {
		reason, say := endOf(tc.err, tc.failed, tc.stopping)
		if reason != tc.reason || !strings.Contains(say, tc.say) || tc.say == "" && say != "" {
			t.Errorf("%s: %q, %q; want %q, %q", tc.name, reason, say, tc.reason, tc.say)
		}
	}
}

// On shutdown streams end with a reason, and Run waits for them.
func TestRunStopsInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s, err := New(r.server.cfg, r.server.deps)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	select {
	case <-s.Ready():
	case err := <-done:
		t.Fatal(err)
	}
	r.url = "http://" + s.Addr().String()
	stream := r.open("GET", "/v1/events", "")
	feedtest.Publish(t, r.conn, run1.Message(1, "a"))
	stream.ids(t, 1)
	stop()
	rest, err := io.ReadAll(stream.r)
	if err != nil || !strings.Contains(string(rest), "shutting down") {
		t.Errorf("the stream ended with %q, %v; want the reason and an orderly end", rest, err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(timeout):
		t.Fatal("Run did not end")
	}
	if _, err := net.Dial("tcp", s.Addr().String()); err == nil {
		t.Error("the port is still open")
	}
	if err := s.Run(t.Context()); err == nil {
		t.Error("a second Run was accepted")
	}
}

// EVT-17 over HTTP: pages, filters, and the numbers of the next page.
func TestEventPages(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	store := feedtest.NewStore(t, r.conn)
	for i := 1; i <= 25; i++ {
		ev := run1.Message(i, "a")
		store.Load(uint64(i), feedtest.Record(t, ev, feedtest.Publish(t, r.conn, ev)))
	}
	var got []uint64
	after := uint64(0)
	for {
		p, err := r.client("").ListEvents(t.Context(), client.EventQuery{RunID: "r_1", ThreadID: "th", Types: []string{"run.message"}, Limit: 10}, after)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range p.Events {
			got = append(got, e.Seq)
		}
		if after = p.NextAfterSeq; !p.HasMore {
			break
		}
	}
	if len(got) != 25 || got[24] != 25 || after != 25 {
		t.Errorf("pages gave %v, next %d", got, after)
	}
	if _, _, text := r.do("GET", "/v1/events?task_id=t_none", ""); text != `{"events":[],"next_after_seq":0,"has_more":false}`+"\n" {
		t.Errorf("an empty page is %s", text)
	}
	if req := store.Requests()[0]; req.Tenant != "default" || req.Limit != 10 || req.ThreadID != "th" || !slices.Equal(req.Types, []string{"run.message"}) {
		t.Errorf("the store was asked %+v", req)
	}
}
