package dispatch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	dto "github.com/prometheus/client_model/go"
	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func newDispatcher(t *testing.T) (*Dispatcher, *bus.Conn, *natstest.Server) {
	t.Helper()
	srv, c := natstest.New(t)
	return New(c, func() time.Time { return start }, zerolog.Nop(), sdktrace.NewTracerProvider()), c, srv
}

func request(id string) contract.TaskRequest {
	return contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: contract.TaskID(id), RunID: "r_1", ThreadID: "thread", Tenant: "acme",
		Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 5, TimeoutSeconds: 60},
		Prompt:   "look around", Description: "looking", CreatedAt: start,
	}
}

func recordOf(req contract.TaskRequest, seq uint64, state contract.State) contract.TaskRecord {
	return contract.TaskRecord{
		TaskID: req.TaskID, RunID: req.RunID, ThreadID: req.ThreadID, Tenant: req.Tenant, State: state, Attempt: 1,
		SubagentType: req.Subagent.Name, Description: req.Description, RequestSeq: seq, QueuedAt: req.CreatedAt,
	}
}

// put writes v under a key of the task bucket.
func put(t *testing.T, c *bus.Conn, key string, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Publish(t.Context(), bus.Write{Subject: c.KV(key), Data: b}); err != nil {
		t.Fatal(err)
	}
}

// gate answers status requests as a leader would.
func gate(t *testing.T, c *bus.Conn, answer func(admissionapi.StatusRequest) any) {
	t.Helper()
	sub, err := c.NC.Subscribe(admissionapi.Subject(c.Names), func(m *nats.Msg) {
		var req admissionapi.StatusRequest
		if json.Unmarshal(m.Data, &req) != nil {
			return
		}
		switch v := answer(req).(type) {
		case *nats.Msg:
			_ = m.RespondMsg(v)
		default:
			b, _ := json.Marshal(v)
			_ = m.Respond(b)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	if err := c.NC.Flush(); err != nil {
		t.Fatal(err)
	}
}

func TestSubmitStoresTheRequestWithItsTrace(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	ctx := telemetry.ContextWith(t.Context(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "k=v")

	acc, err := d.Submit(ctx, request("t_1"))
	if err != nil {
		t.Fatal(err)
	}
	if acc.Seq != 1 || acc.Duplicate || acc.QueuePosition != 0 {
		t.Errorf("Submit = %+v, want seq 1, position 0", acc)
	}
	m, err := c.Last(t.Context(), c.Names.WorkStream(), c.Names.TaskRequest("acme", "t_1"))
	if err != nil {
		t.Fatal(err)
	}
	if got := m.Header.Get("Nats-Msg-Id"); got != "t_1" {
		t.Errorf("Nats-Msg-Id = %q, want the task id", got)
	}
	sc := trace.SpanContextFromContext(telemetry.Extract(context.Background(), m.Header))
	if sc.TraceID().String() != "4bf92f3577b34da6a3ce929d0e0e4736" || sc.SpanID().String() == "00f067aa0ba902b7" {
		t.Errorf("the request's parent is %v; want a span of ours in the caller's trace", sc)
	}
	if got, err := contract.DecodeTaskRequest(m.Data); err != nil || got.Prompt != "look around" {
		t.Errorf("stored request = %+v, %v", got, err)
	}

	again, err := d.Submit(ctx, request("t_1"))
	if err != nil || !again.Duplicate || again.Seq != 1 {
		t.Errorf("second Submit = %+v, %v; want a duplicate with seq 1", again, err)
	}
}

// Protocol W1: "one per subject" is acceptance, also when the id was forgotten.
func TestSubmitTakesAnExistingRequestForAccepted(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	body, err := request("t_1").Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Publish(t.Context(), bus.Write{Subject: c.Names.TaskRequest("acme", "t_1"), Data: body}); err != nil {
		t.Fatal(err)
	}
	acc, err := d.Submit(t.Context(), request("t_1"))
	if err != nil || !acc.Duplicate || acc.Seq != 1 {
		t.Errorf("Submit = %+v, %v; want a duplicate with seq 1", acc, err)
	}
}

func TestSubmitRefusesWhatBreaksTheContract(t *testing.T) {
	t.Parallel()
	d, _, _ := newDispatcher(t)
	for name, change := range map[string]func(*contract.TaskRequest){
		"id with a dot": func(r *contract.TaskRequest) { r.TaskID = "t.1" },
		"no prompt":     func(r *contract.TaskRequest) { r.Prompt = "" },
		"tenant *":      func(r *contract.TaskRequest) { r.Tenant = "*" },
		"too large":     func(r *contract.TaskRequest) { r.Prompt = strings.Repeat("x", contract.MaxPromptBytes+1) },
		"prompt that doubles when encoded": func(r *contract.TaskRequest) {
			r.Prompt = strings.Repeat("\x01", contract.MaxPromptBytes)
		},
	} {
		req := request("t_1")
		change(&req)
		if _, err := d.Submit(t.Context(), req); !errors.Is(err, contract.ErrInvalidMessage) {
			t.Errorf("%s: Submit = %v, want ErrInvalidMessage", name, err)
		}
	}
}

// ADM-04: the bound is the server's, exact also for submitters that race; what
// does not fit leaves no trace.
func TestSubmitQueueFull(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	var accepted, full atomic.Int64
	var wg sync.WaitGroup
	for i := range 80 {
		wg.Go(func() {
			switch _, err := d.Submit(t.Context(), request(fmt.Sprintf("t_%d", i))); {
			case err == nil:
				accepted.Add(1)
			case errors.Is(err, ErrQueueFull):
				full.Add(1)
			default:
				t.Errorf("Submit %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	var counted dto.Metric
	if err := d.full.Write(&counted); err != nil {
		t.Fatal(err)
	}
	if n := counted.GetCounter().GetValue(); accepted.Load() != 67 || full.Load() != 13 || n != 13 {
		t.Errorf("accepted %d, refused %d, counted %v; want 67 and 13", accepted.Load(), full.Load(), n)
	}
	s, err := c.JS.Stream(t.Context(), c.Names.WorkStream())
	if err != nil {
		t.Fatal(err)
	}
	if n := s.CachedInfo().State.Msgs; n != 67 {
		t.Errorf("queue holds %d requests, want 67", n)
	}

	// A replayed lead submits again what is in the full queue, or has ended.
	m, err := c.Get(t.Context(), c.Names.WorkStream(), 1)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := contract.DecodeTaskRequest(m.Data)
	if err != nil {
		t.Fatal(err)
	}
	if acc, err := d.Submit(t.Context(), stored); err != nil || !acc.Duplicate {
		t.Errorf("Submit of a stored request at the bound = %+v, %v; want a duplicate", acc, err)
	}
	ended := request("t_ended")
	put(t, c, contract.TaskKey(ended.TaskID), recordOf(ended, 1, contract.StateCompleted))
	if acc, err := d.Submit(t.Context(), ended); err != nil || !acc.Duplicate || acc.Seq != 0 {
		t.Errorf("Submit of an ended task at the bound = %+v, %v; want a duplicate without seq", acc, err)
	}
}

func TestSubmitQueuePosition(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	put(t, c, contract.LimitsKey, contract.AdmissionLimits{MaxRunning: 2, MaxQueued: 64, AdmissionPolicy: "queue", QueueTimeoutSeconds: 300})
	for i, want := range []int{0, 0, 1, 2} {
		acc, err := d.Submit(t.Context(), request(fmt.Sprintf("t_%d", i)))
		if err != nil || acc.QueuePosition != want {
			t.Errorf("Submit %d = %+v, %v; want position %d", i, acc, err, want)
		}
	}
}

// Protocol W1 in doubt: sent again under the same id until there is an answer.
func TestSubmitSurvivesARestartOfNATS(t *testing.T) {
	t.Parallel()
	d, _, srv := newDispatcher(t)
	srv.Kill()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := d.Submit(ctx, request("t_1")); !errors.Is(err, ErrUnavailable) {
		t.Fatalf("Submit without a server = %v, want ErrUnavailable", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := d.Submit(t.Context(), request("t_1"))
		done <- err
	}()
	srv.Restart()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Submit over a restart: %v", err)
		}
	case <-time.After(submitBudget):
		t.Fatal("Submit did not come back")
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	if l, err := d.Limits(t.Context()); err != nil || !reflect.DeepEqual(l, contract.AdmissionLimits{MaxRunning: 3, MaxQueued: 64, AdmissionPolicy: "queue", QueueTimeoutSeconds: 300}) {
		t.Errorf("Limits without a gate = %+v, %v", l, err)
	}
	want := contract.AdmissionLimits{MaxRunning: 7, Pools: map[contract.Pool]int{"big": 2}, MaxQueued: 1, AdmissionPolicy: "reject", QueueTimeoutSeconds: 9}
	put(t, c, contract.LimitsKey, want)
	if l, err := d.Limits(t.Context()); err != nil || !reflect.DeepEqual(l, want) {
		t.Errorf("Limits = %+v, %v; want %+v", l, err, want)
	}
}

// CANCEL-01, CANCEL-02: the lead's side of a cancellation is a durable key,
// whatever the task is doing; it neither waits for the end nor writes one.
func TestCancel(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	ctx := t.Context()

	if err := d.Cancel(ctx, "acme", "t_none", ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("Cancel of an unknown task = %v, want ErrNotFound", err)
	}
	if err := d.Cancel(ctx, "acme", "t.*", ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("Cancel of a pattern = %v, want ErrNotFound", err)
	}
	if _, err := d.Submit(ctx, request("t_wait")); err != nil {
		t.Fatal(err)
	}
	if err := d.Cancel(ctx, "other", "t_wait", ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("Cancel by another tenant = %v, want ErrNotFound", err)
	}
	if _, err := c.Last(ctx, c.TaskStream(), c.KV(contract.CancelKey("t_wait"))); !errors.Is(err, bus.ErrNotFound) {
		t.Fatalf("a refused cancellation left a key: %v", err)
	}
	put(t, c, contract.TaskKey("t_run"), recordOf(request("t_run"), 2, contract.StateRunning))
	for _, id := range []contract.TaskID{"t_wait", "t_run", "t_run"} {
		if err := d.Cancel(ctx, "acme", id, strings.Repeat("ä", 1000)); err != nil {
			t.Fatalf("Cancel %s: %v", id, err)
		}
		m, err := c.Last(ctx, c.TaskStream(), c.KV(contract.CancelKey(id)))
		if err != nil {
			t.Fatal(err)
		}
		v, err := contract.Decode[contract.Cancel](m.Data)
		if err != nil || !v.RequestedAt.Equal(start) || v.Reason != strings.Repeat("ä", maxReasonChars) {
			t.Errorf("cancel key of %s = %+v, %v", id, v, err)
		}
		if ttl := m.Header.Get("Nats-TTL"); ttl != "24h0m0s" {
			t.Errorf("TTL of the cancel key = %q, want 24h0m0s", ttl)
		}
	}
	for _, st := range []contract.State{contract.StateCompleted, contract.StateFailed, contract.StateTimedOut, contract.StateCancelled} {
		id := contract.TaskID("t_" + string(st))
		put(t, c, contract.TaskKey(id), recordOf(request(string(id)), 3, st))
		var finished *FinishedError
		if err := d.Cancel(ctx, "acme", id, ""); !errors.As(err, &finished) || finished.Status != string(st) {
			t.Errorf("Cancel of a %s task = %v, want a FinishedError with its status", st, err)
		}
		if _, err := c.Last(ctx, c.TaskStream(), c.KV(contract.CancelKey(id))); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("cancelling a %s task left a key", st)
		}
	}
}

// CANCEL-04, CANCEL-05, F-048: a task ends while its cancellation is on the way. The
// wish was still stored, but it came late, and the caller is told how the task ended.
func TestCancelComesLate(t *testing.T) {
	t.Parallel()
	for state, late := range map[contract.State]bool{contract.StateCompleted: true, contract.StateFailed: true, contract.StateCancelled: false, contract.StateRunning: false} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			srv, c := natstest.New(t, natstest.Listen())
			proxy := srv.Proxy()
			d := New(srv.Connect(bus.Config{Name: "lead", URL: proxy.URL()}), func() time.Time { return start }, zerolog.Nop(), sdktrace.NewTracerProvider())
			req := request("t_1")
			put(t, c, contract.TaskKey("t_1"), recordOf(req, 2, contract.StateRunning))
			held := proxy.FreezeAt("PUB " + c.KV(contract.CancelKey("t_1")))
			done := make(chan error, 1)
			go func() { done <- d.Cancel(t.Context(), "acme", "t_1", "") }()
			select {
			case <-held:
			case <-time.After(natstest.Timeout):
				t.Fatal("the cancellation was not sent")
			}
			put(t, c, contract.TaskKey("t_1"), recordOf(req, 2, state))
			proxy.Thaw()
			err := <-done
			var finished *FinishedError
			if errors.As(err, &finished) != late || late && finished.Status != string(state) || !late && err != nil {
				t.Errorf("Cancel = %v; want a FinishedError: %v", err, late)
			}
			if _, err := c.Last(t.Context(), c.TaskStream(), c.KV(contract.CancelKey("t_1"))); err != nil {
				t.Errorf("the wish was not stored: %v", err)
			}
		})
	}
}

func TestGet(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	ctx := telemetry.ContextWith(t.Context(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "")
	if _, err := d.Submit(ctx, request("t_1")); err != nil {
		t.Fatal(err)
	}

	v, err := d.Get(ctx, "acme", "t_1")
	if err != nil {
		t.Fatal(err)
	}
	if v.Status != contract.TaskQueued || v.QueuePosition != nil || v.TraceID != "4bf92f3577b34da6a3ce929d0e0e4736" || v.Description != "looking" || v.SubagentType != "general-purpose" || v.Result != nil {
		t.Errorf("queued task without a gate = %+v", v)
	}
	gate(t, c, func(r admissionapi.StatusRequest) any {
		n := 4
		if r.TaskID != "t_1" {
			n = -1
		}
		return admissionapi.Status{QueuePosition: &n}
	})
	if v, err := d.Get(ctx, "acme", "t_1"); err != nil || v.QueuePosition == nil || *v.QueuePosition != 4 {
		t.Errorf("queued task = %+v, %v; want position 4", v, err)
	}
	for _, id := range []contract.TaskID{"t_none", "t.1", "", "*"} {
		if _, err := d.Get(ctx, "acme", id); !errors.Is(err, ErrNotFound) {
			t.Errorf("Get(%q) = %v, want ErrNotFound", id, err)
		}
	}
	if _, err := d.Get(ctx, "other", "t_1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("Get by another tenant = %v, want ErrNotFound", err)
	}

	for state, want := range map[contract.State]contract.TaskStatus{
		contract.StateGranted: contract.TaskQueued, contract.StateReleased: contract.TaskQueued,
		contract.StateRunning: contract.TaskRunning, contract.StateTimedOut: contract.TaskTimedOut,
	} {
		rec := recordOf(request("t_1"), 1, state)
		rec.TraceParent = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
		put(t, c, contract.TaskKey("t_1"), rec)
		if v, err := d.Get(ctx, "acme", "t_1"); err != nil || v.Status != want || v.TraceID != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("record %s = %+v, %v; want %s", state, v, err, want)
		}
	}
	if _, err := d.Get(ctx, "other", "t_1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("Get of a record by another tenant = %v, want ErrNotFound", err)
	}
}

func TestGetAfterTheRecordWasPurged(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	put(t, c, contract.TaskKey("t_1"), recordOf(request("t_1"), 1, contract.StateCompleted))
	kv, err := c.JS.KeyValue(t.Context(), c.Names.TaskBucket())
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Purge(t.Context(), contract.TaskKey("t_1")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Get(t.Context(), "acme", "t_1"); !errors.Is(err, ErrNotFound) {
		t.Errorf("Get of a purged task = %v, want ErrNotFound", err)
	}
}

func TestResultFromTheBlobStore(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	ctx := t.Context()
	whole := strings.Repeat("result ", 50_000)
	store, err := c.JS.ObjectStore(ctx, c.Names.BlobStore())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.PutString(ctx, "blob", whole); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(whole))
	rec := recordOf(request("t_1"), 1, contract.StateCompleted)
	rec.Result = whole[:100]
	rec.ResultRef = &contract.BlobRef{Name: "blob", SHA256: hex.EncodeToString(sum[:]), Size: int64(len(whole))}

	if got, err := d.Result(ctx, rec); err != nil || got != whole {
		t.Errorf("Result = %d bytes, %v; want %d", len(got), err, len(whole))
	}
	put(t, c, contract.TaskKey("t_1"), rec)
	if v, err := d.Get(ctx, "acme", "t_1"); err != nil || *v.Result != whole || v.ResultTruncated {
		t.Errorf("Get shows %d bytes (truncated %v), %v", len(*v.Result), v.ResultTruncated, err)
	}
	for name, ref := range map[string]contract.BlobRef{
		"digest": {Name: "blob", SHA256: strings.Repeat("0", 64), Size: int64(len(whole))},
		"longer": {Name: "blob", SHA256: rec.ResultRef.SHA256, Size: int64(len(whole)) - 1},
		"size":   {Name: "blob", SHA256: rec.ResultRef.SHA256, Size: contract.MaxResultBytes + 1},
	} {
		damaged := rec
		damaged.ResultRef = &ref
		if _, err := d.Result(ctx, damaged); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: Result = %v, want ErrDamaged", name, err)
		}
	}
	gone := rec
	gone.ResultRef = &contract.BlobRef{Name: "none", SHA256: rec.ResultRef.SHA256, Size: 5}
	if _, err := d.Result(ctx, gone); !errors.Is(err, ErrNotFound) {
		t.Errorf("Result of a missing blob = %v, want ErrNotFound", err)
	}
	put(t, c, contract.TaskKey("t_1"), gone)
	if v, err := d.Get(ctx, "acme", "t_1"); err != nil || *v.Result != whole[:100] || !v.ResultTruncated {
		t.Errorf("Get with a missing blob = %v, %v; want the beginning, flagged", v, err)
	}
}

// F-024: what lies behind the first page can be reached, by paging and by a
// filter, and the counts add up.
func TestListPages(t *testing.T) {
	t.Parallel()
	srv := natstest.Start(t)
	srv.Provision(provision.Config{MaxRunning: 3, MaxQueued: 500})
	c := srv.Conn("test")
	d := New(c, time.Now, zerolog.Nop(), nil)
	ctx := t.Context()
	const ended, waiting = 250, 10
	var acks []jetstream.PubAckFuture
	for i := 1; i <= ended; i++ {
		req := request(fmt.Sprintf("t_%03d", i))
		req.RunID = contract.RunID(fmt.Sprintf("r_%d", i%2))
		state := contract.StateCompleted
		if i == 201 {
			state = contract.StateFailed
		}
		rec := recordOf(req, uint64(i), state)
		if i%50 == 0 {
			rec.Result = strings.Repeat("é", listPreviewChars+1)
		}
		b, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		ack, err := c.PublishAsync(bus.Write{Subject: c.KV(contract.TaskKey(req.TaskID)), Data: b})
		if err != nil {
			t.Fatal(err)
		}
		acks = append(acks, ack)
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			t.Fatal(err)
		}
	}
	foreign := request("t_foreign")
	foreign.Tenant = "other"
	put(t, c, contract.TaskKey("t_foreign"), recordOf(foreign, 77, contract.StateCompleted))
	// The queue's numbers go on where those of the ended tasks stopped.
	s, err := c.JS.Stream(ctx, c.Names.WorkStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(ctx, jetstream.WithPurgeSequence(ended+1)); err != nil {
		t.Fatal(err)
	}
	for i := range waiting {
		if _, err := d.Submit(ctx, request(fmt.Sprintf("t_w%02d", i))); err != nil {
			t.Fatal(err)
		}
	}
	// One of the waiting has been granted meanwhile: it must not appear twice.
	put(t, c, contract.TaskKey("t_w00"), recordOf(request("t_w00"), ended+1, contract.StateRunning))

	all := func(q ListQuery) []wire.Task {
		t.Helper()
		var out []wire.Task
		q.Tenant = "acme"
		for pages := 0; ; pages++ {
			p, err := d.List(ctx, q)
			if err != nil {
				t.Fatal(err)
			}
			if len(p.Tasks) > q.Limit || pages > 100 {
				t.Fatalf("page %d has %d tasks", pages, len(p.Tasks))
			}
			out = append(out, p.Tasks...)
			if p.NextCursor == "" {
				return out
			}
			q.Cursor = p.NextCursor
		}
	}
	got := all(ListQuery{Limit: 40})
	if len(got) != ended+waiting {
		t.Fatalf("paging found %d tasks, want %d", len(got), ended+waiting)
	}
	for i, v := range got {
		want := fmt.Sprintf("t_%03d", ended+waiting-i)
		if n := waiting - 1 - i; n >= 0 {
			want = fmt.Sprintf("t_w%02d", n)
		}
		if string(v.TaskID) != want {
			t.Fatalf("task %d is %s, want %s: newest first", i, v.TaskID, want)
		}
		if v.Result != nil && (*v.Result != strings.Repeat("é", listPreviewChars) || !v.ResultTruncated) {
			t.Fatalf("result in a list has %d bytes, flagged %v", len(*v.Result), v.ResultTruncated)
		}
	}
	if got[waiting-1].Status != contract.TaskRunning {
		t.Errorf("t_w00 is %s, want running", got[waiting-1].Status)
	}
	if f := all(ListQuery{Limit: 10, Status: contract.TaskFailed}); len(f) != 1 || f[0].TaskID != "t_201" {
		t.Errorf("failed = %v, want t_201 alone", f)
	}
	if n := len(all(ListQuery{Limit: 200, Status: contract.TaskQueued})); n != waiting-1 {
		t.Errorf("queued = %d, want %d", n, waiting-1)
	}
	if n := len(all(ListQuery{Limit: 7, RunID: "r_0"})); n != ended/2 {
		t.Errorf("run r_0 = %d, want %d", n, ended/2)
	}
	if p, err := d.List(ctx, ListQuery{Tenant: "nobody"}); err != nil || len(p.Tasks) != 0 || p.Tasks == nil || p.NextCursor != "" {
		t.Errorf("list of a tenant without tasks = %+v, %v", p, err)
	}
	for _, q := range []ListQuery{{Tenant: "acme", Limit: 201}, {Tenant: "acme", Limit: -1}, {Tenant: "acme", Cursor: "no!"}, {Tenant: "*"}} {
		if _, err := d.List(ctx, q); !errors.Is(err, ErrInvalid) {
			t.Errorf("List(%+v) = %v, want ErrInvalid", q, err)
		}
	}
	// Lists leave no consumers behind.
	natstest.Eventually(t, 5*time.Second, func() (bool, string) {
		s, err := c.JS.Stream(ctx, c.Names.WorkStream())
		if err != nil {
			return false, err.Error()
		}
		n := s.CachedInfo().State.Consumers
		return n == 0, fmt.Sprintf("%d consumers on the queue", n)
	})
}

func TestNewestFirstKeepsTheNewest(t *testing.T) {
	t.Parallel()
	h := &newestFirst{keep: 10}
	for _, n := range rand.Perm(100) {
		h.offer(entry{seq: uint64(n)})
	}
	for i, e := range h.sorted() {
		if e.seq != uint64(99-i) {
			t.Fatalf("entry %d has seq %d, want %d", i, e.seq, 99-i)
		}
	}
}

func TestAdmission(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	began := time.Now()
	if _, err := d.Admission(t.Context()); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Admission without a gate = %v, want ErrUnavailable", err)
	}
	if took := time.Since(began); took > admissionBudget+time.Second {
		t.Errorf("it took %v to give up, want about %v", took, admissionBudget)
	}
	// A standby answers with an error first, as during a take-over.
	var asked atomic.Int64
	gate(t, c, func(admissionapi.StatusRequest) any {
		if asked.Add(1) == 1 {
			m := nats.NewMsg("")
			m.Header.Set("Nats-Service-Error-Code", "503")
			m.Header.Set("Nats-Service-Error", "not the leader")
			return m
		}
		return admissionapi.Status{Leader: "gate-1", Running: 2}
	})
	s, err := d.Admission(t.Context())
	if err != nil || s.Leader != "gate-1" || s.Running != 2 || s.Slots == nil {
		t.Errorf("Admission = %+v, %v", s, err)
	}
}
