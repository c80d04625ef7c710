package eventsink_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/micro"

	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// EVT-17: filters, exclusive after_seq, default and largest limit, pages.
func TestList(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	a, b := newTask(1), newTask(11)
	publish(t, conn, a.started())
	publish(t, conn, b.started())
	publish(t, conn, a.step(1))
	publish(t, conn, b.completed())
	last := publish(t, conn, a.completed())
	stored(t, conn, last)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for _, c := range []struct {
		req  eventapi.ListRequest
		want []string
		more bool
	}{
		{eventapi.ListRequest{}, []string{"task-1/started", "task-11/started", "task-1/step/1", "task-11/end", "task-1/end"}, false},
		{eventapi.ListRequest{ThreadID: "thread 1"}, []string{"task-11/started", "task-11/end"}, false},
		{eventapi.ListRequest{RunID: "run-0", TaskID: "task-1", Tenant: "default"}, []string{"task-1/started", "task-1/step/1", "task-1/end"}, false},
		{eventapi.ListRequest{Types: []string{contract.RecordEnd}, AfterSeq: 4}, []string{"task-1/end"}, false},
		{eventapi.ListRequest{TaskID: "task-1", Limit: 2}, []string{"task-1/started", "task-1/step/1"}, true},
		{eventapi.ListRequest{Tenant: "somebody-else"}, []string{}, false},
	} {
		got, err := eventapi.List(ctx, conn, c.req)
		if err != nil || !slices.Equal(ids(got.Events), c.want) || got.HasMore != c.more || got.LastSeq != last {
			t.Errorf("List(%+v) = %q, more %v, last_seq %d, %v; want %q, %v, %d", c.req, ids(got.Events), got.HasMore, got.LastSeq, err, c.want, c.more, last)
		}
		next := c.req.AfterSeq
		if n := len(got.Events); n > 0 {
			next = got.Events[n-1].Seq
		}
		if got.NextAfterSeq != next {
			t.Errorf("List(%+v): next_after_seq = %d, want %d", c.req, got.NextAfterSeq, next)
		}
	}
}

// Requests that are wrong are told so, in the client and over the wire.
func TestListInvalid(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	stored(t, conn, publish(t, conn, newTask(1).completed()))
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	var invalid *eventapi.Error
	if _, err := eventapi.List(ctx, conn, eventapi.ListRequest{Limit: 2001}); !errors.As(err, &invalid) || invalid.Code != eventapi.CodeInvalid {
		t.Errorf("List with limit 2001 = %v, want invalid_request", err)
	}
	for body, want := range map[string]string{
		`{"limit":2001}`:           "limit is 2001",
		`{"limit":-1}`:             "limit is -1",
		`{"wait_ms":2001}`:         "wait_ms is 2001",
		`{"run_id":"a.b"}`:         "run id",
		`{"limit":"many"}`:         "limit",
		`[1,2`:                     "JSON",
		strings.Repeat("[", 20000): "nested too deeply",
		`{"types":["` + strings.Repeat("x", eventapi.MaxRequestBytes) + `"]}`: "at most",
	} {
		msg, err := conn.NC.RequestWithContext(ctx, eventapi.Subject(conn.Names), []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		var resp eventapi.ListResponse
		if err := json.Unmarshal(msg.Data, &resp); err != nil {
			t.Fatal(err)
		}
		if resp.Error == nil || resp.Error.Code != eventapi.CodeInvalid || !strings.Contains(resp.Error.Message, want) {
			t.Errorf("%.40s → %+v, want invalid_request with %q", body, resp.Error, want)
		}
		if code, text := msg.Header.Get(micro.ErrorCodeHeader), msg.Header.Get(micro.ErrorHeader); code != "400" || !strings.Contains(text, want) {
			t.Errorf("%.40s → header %q %q, want 400 and the reason", body, code, text)
		}
	}
}

// Nobody there is "try again", at once.
func TestListNobody(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	if _, err := eventapi.List(ctx, conn, eventapi.ListRequest{}); !errors.Is(err, eventapi.ErrUnavailable) {
		t.Errorf("List without a sink = %v, want ErrUnavailable", err)
	}
}

// A reply stays below the limit however large the events are, and the pages
// together are everything. Text full of "<" does not grow on the way.
func TestListReplySize(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	k := newTask(1)
	var last uint64
	var want []string
	for i := range 120 {
		ev := k.event(fmt.Sprintf("big-%d", i), contract.EventTaskRunning, contract.TaskRunningData{TaskID: k.id, MessageIndex: i, Message: contract.Step{Kind: contract.StepAI, Text: strings.Repeat("<", contract.MaxStepChars)}})
		want = append(want, ev.ID)
		last = publish(t, conn, ev)
	}
	stored(t, conn, last)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	var got []string
	after, requests := uint64(0), 0
	for more := true; more; requests++ {
		msg, err := conn.NC.RequestWithContext(ctx, eventapi.Subject(conn.Names), mustJSON(t, eventapi.ListRequest{AfterSeq: after, Limit: eventapi.MaxLimit}))
		if err != nil {
			t.Fatal(err)
		}
		if len(msg.Data) > eventapi.MaxReplyBytes {
			t.Errorf("a reply has %d bytes, want at most %d", len(msg.Data), eventapi.MaxReplyBytes)
		}
		var resp eventapi.ListResponse
		if err := json.Unmarshal(msg.Data, &resp); err != nil || resp.Error != nil {
			t.Fatal(err, resp.Error)
		}
		got, after, more = append(got, ids(resp.Events)...), resp.NextAfterSeq, resp.HasMore
	}
	if !slices.Equal(got, want) {
		t.Errorf("pages hold %d events, want %d in order", len(got), len(want))
	}
	if requests > 3 {
		t.Errorf("%d requests for about 1 MB, want 2 or 3: the text grew", requests)
	}
}

// A reader waits for what it knows to be published, sees it, and is not kept
// longer than it asked for.
func TestBarrier(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	inside, goOn := make(chan struct{}, 1), make(chan struct{})
	start(t, conn, options{open: wrap(t.TempDir(), func(ctx context.Context, next eventsink.Store, records []contract.EventRecord, upTo uint64) (int, error) {
		if upTo == 2 {
			inside <- struct{}{}
			<-goOn
		}
		return next.Append(ctx, records, upTo)
	})})
	k := newTask(1)
	stored(t, conn, publish(t, conn, k.started()))
	seq := publish(t, conn, k.completed())
	<-inside // it is being written
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()

	short := time.Now()
	resp, err := eventapi.List(ctx, conn, eventapi.ListRequest{BarrierSeq: seq, WaitMS: 50})
	if err != nil || resp.LastSeq != 1 || len(resp.Events) != 1 {
		t.Errorf("List with a barrier that is not reached = %+v, %v; want what there is", resp, err)
	}
	if d := time.Since(short); d < 50*time.Millisecond {
		t.Errorf("it waited %v, want 50 ms", d)
	}

	type result struct {
		resp eventapi.ListResponse
		err  error
	}
	const readers = 20
	results := make(chan result, readers)
	for range readers {
		go func() {
			resp, err := eventapi.List(ctx, conn, eventapi.ListRequest{BarrierSeq: seq})
			results <- result{resp, err}
		}()
	}
	// Others are answered while they wait.
	if _, err := eventapi.List(ctx, conn, eventapi.ListRequest{}); err != nil {
		t.Errorf("List beside waiting readers = %v", err)
	}
	close(goOn)
	for range readers {
		if r := <-results; r.err != nil || r.resp.LastSeq < seq || len(r.resp.Events) != 2 {
			t.Errorf("List with a barrier = %d events up to %d, %v; want 2 up to %d", len(r.resp.Events), r.resp.LastSeq, r.err, seq)
		}
	}
}

// More readers than the sink serves are refused at once, not queued without end.
func TestListBound(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir())})
	stored(t, conn, publish(t, conn, newTask(1).completed()))
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	const readers = 80
	errs := make(chan error, readers)
	for range readers {
		go func() {
			_, err := eventapi.List(ctx, conn, eventapi.ListRequest{BarrierSeq: 1000, WaitMS: 2000})
			errs <- err
		}()
	}
	refused := 0
	for range readers {
		if err := <-errs; errors.Is(err, eventapi.ErrUnavailable) && strings.Contains(err.Error(), "64 requests") {
			refused++
		} else if err != nil {
			t.Errorf("List = %v", err)
		}
	}
	if refused != readers-64 {
		t.Errorf("%d of %d readers were refused, want %d", refused, readers, readers-64)
	}
}

// The endpoints can be found with the tools for NATS services.
func TestDiscovery(t *testing.T) {
	t.Parallel()
	_, conn := natstest.New(t)
	start(t, conn, options{open: sqlite.Opener(t.TempDir()), cfg: eventsink.Config{}})
	stored(t, conn, publish(t, conn, newTask(1).completed()))
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	msg, err := conn.NC.RequestWithContext(ctx, "$SRV.INFO.herdgate-eventsink", nil)
	if err != nil {
		t.Fatal(err)
	}
	var info micro.Info
	if err := json.Unmarshal(msg.Data, &info); err != nil {
		t.Fatal(err)
	}
	var subjects []string
	for _, e := range info.Endpoints {
		subjects = append(subjects, e.Subject)
	}
	if want := []string{"hg.v1.svc.events.list", "hg.v1.svc.events.list.*", "hg.v1.svc.agents.list", "hg.v1.svc.agents.put", "hg.v1.svc.agents.delete"}; !slices.Equal(subjects, want) {
		t.Errorf("endpoints = %q, want %q", subjects, want)
	}
}
