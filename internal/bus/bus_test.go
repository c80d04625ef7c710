package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// put writes what must work and returns its sequence.
func put(t *testing.T, c *bus.Conn, w bus.Write) uint64 {
	t.Helper()
	ack, err := c.Publish(testContext(t), w)
	if err != nil {
		t.Fatalf("write to %s: %v", w.Subject, err)
	}
	return ack.Seq
}

// refused writes what the server must refuse with class.
func refused(t *testing.T, c *bus.Conn, why string, w bus.Write, class error) error {
	t.Helper()
	ack, err := c.Publish(testContext(t), w)
	if !errors.Is(err, class) {
		t.Errorf("%s: write to %s = sequence %d, %v; want %q", why, w.Subject, ack.Seq, err, class)
	}
	return err
}

func TestErrorClasses(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	s.Provision(provision.Config{MaxRunning: 1, MaxQueued: 1})
	c := s.Conn("test")
	ctx := testContext(t)
	n := c.Names

	put(t, c, bus.Write{Subject: n.TaskRequest("default", "t1"), MsgID: "t1"})
	refused(t, c, "second request for a task", bus.Write{Subject: n.TaskRequest("default", "t1")}, bus.ErrExists)
	ack, err := c.Publish(ctx, bus.Write{Subject: n.TaskRequest("default", "t1"), MsgID: "t1"})
	if err != nil || !ack.Duplicate || ack.Seq != 1 {
		t.Errorf("the same request again = %+v, %v; want a duplicate of sequence 1", ack, err)
	}
	put(t, c, bus.Write{Subject: n.TaskRequest("default", "t2")})
	refused(t, c, "no room", bus.Write{Subject: n.TaskRequest("default", "t3")}, bus.ErrFull)
	refused(t, c, "no room, and stored before", bus.Write{Subject: n.TaskRequest("default", "t1")}, bus.ErrExists)

	refused(t, c, "above the stream's limit", bus.Write{Subject: n.TaskGrant("default", "t1"), Data: make([]byte, 512<<10)}, bus.ErrTooLarge)
	refused(t, c, "above the server's limit", bus.Write{Subject: c.KV("task.t1"), Data: make([]byte, 2<<20)}, bus.ErrTooLarge)

	rev := put(t, c, bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(0)})
	err = refused(t, c, "expects absent", bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(0)}, bus.ErrConflict)
	if bus.Racing(err) {
		t.Errorf("Racing(%v) = true although nothing was in flight", err)
	}
	refused(t, c, "expects another revision", bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(rev + 1)}, bus.ErrConflict)
	refused(t, c, "no stream takes the subject", bus.Write{Subject: "nowhere"}, bus.ErrDoubt)

	_, err = c.Last(ctx, c.TaskStream(), c.KV("task.none"))
	if !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("Last of an absent key = %v, want ErrNotFound", err)
	}
	if _, err = c.Get(ctx, c.TaskStream(), 999); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("Get of an absent sequence = %v, want ErrNotFound", err)
	}
	if _, err = c.Last(ctx, "NO_STREAM", "x"); !errors.Is(err, bus.ErrNotProvisioned) || errors.Is(err, bus.ErrNotFound) {
		t.Errorf("Last in an absent stream = %v, want ErrNotProvisioned and not ErrNotFound", err)
	}
}

func TestAsyncErrorClasses(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	for name, tc := range map[string]struct {
		w     bus.Write
		class error
	}{
		"conflict":  {bus.Write{Subject: c.KV("task.t1"), Expect: bus.Seq(7)}, bus.ErrConflict},
		"too large": {bus.Write{Subject: c.Names.TaskGrant("default", "t1"), Data: make([]byte, 512<<10)}, bus.ErrTooLarge},
		"no stream": {bus.Write{Subject: "nowhere"}, bus.ErrDoubt},
		"fine":      {bus.Write{Subject: c.KV("limits")}, nil},
	} {
		f, err := c.PublishAsync(tc.w)
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-f.Ok():
			err = nil
		case err = <-f.Err():
			err = bus.Classify(err)
		case <-testContext(t).Done():
			t.Fatalf("%s: no answer", name)
		}
		if !errors.Is(err, tc.class) {
			t.Errorf("%s: %v, want %v", name, err, tc.class)
		}
	}
}

func TestReconnectBufferIsOff(t *testing.T) {
	t.Parallel()
	s, c := natstest.New(t)
	ctx := testContext(t)
	s.Kill()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return !c.NC.IsConnected(), "still connected" })

	begin := time.Now()
	refused(t, c, "no server", bus.Write{Subject: c.KV("task.t1"), Data: []byte("stale")}, bus.ErrDoubt)
	if d := time.Since(begin); d > time.Second {
		t.Errorf("a write without a connection took %v to fail, want it at once", d)
	}
	if f, err := c.PublishAsync(bus.Write{Subject: c.KV("task.t1"), Data: []byte("stale")}); err == nil {
		select {
		case <-f.Ok():
			t.Error("an asynchronous write without a connection was acknowledged")
		case err := <-f.Err():
			if !errors.Is(bus.Classify(err), bus.ErrDoubt) {
				t.Errorf("asynchronous write without a connection: %v, want ErrDoubt", err)
			}
		case <-ctx.Done():
			t.Error("an asynchronous write without a connection got no answer")
		}
	} else if !errors.Is(err, bus.ErrDoubt) {
		t.Errorf("asynchronous write without a connection: %v, want ErrDoubt", err)
	}

	s.Restart()
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return c.NC.IsConnected(), "not connected again" })
	put(t, c, bus.Write{Subject: c.KV("task.t2")})
	if m, err := c.Last(ctx, c.TaskStream(), c.KV("task.t1")); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("the stale write arrived later: %q, %v; want ErrNotFound", m.Data, err)
	}
}

// A write in flight when the server goes is in doubt, not failed.
func TestServerGoesDuringWrites(t *testing.T) {
	t.Parallel()
	s, c := natstest.New(t)
	var wg sync.WaitGroup
	var acked atomic.Int64
	for i := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				// A request that was under way when the connection broke ends by its deadline.
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				_, err := c.Publish(ctx, bus.Write{Subject: c.KV(fmt.Sprintf("task.t%d", i)), Data: []byte{1}})
				cancel()
				if err == nil {
					acked.Add(1)
					continue
				}
				if !errors.Is(err, bus.ErrDoubt) {
					t.Errorf("writer %d, write %d: %v, want ErrDoubt", i, n, err)
				}
				return
			}
		})
	}
	natstest.Eventually(t, natstest.Timeout, func() (bool, string) { return acked.Load() > 100, "no writes acknowledged" })
	s.Kill()
	wg.Wait()
}

// A write that the server refuses for lack of rights gets no answer at all.
func TestNoRightsEndsByTimeout(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Tune(func(o *server.Options) {
		o.Users = []*server.User{{Username: "u", Password: "p", Permissions: &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: []string{"nothing"}},
			Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_lead-1.>"}},
		}}}
	}))
	c := s.Connect(bus.Config{Name: "lead-1", Extra: []nats.Option{nats.UserInfo("u", "p")}})
	begin := time.Now()
	_, err := c.Publish(context.Background(), bus.Write{Subject: c.KV("task.t1")})
	if !errors.Is(err, bus.ErrDoubt) {
		t.Errorf("write without rights = %v, want ErrDoubt", err)
	}
	if d := time.Since(begin); d > bus.WriteTimeout+2*time.Second {
		t.Errorf("it took %v, want about %v", d, bus.WriteTimeout)
	}
}

func TestCancelledContextIsDoubt(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Publish(ctx, bus.Write{Subject: c.KV("task.t1")}); !errors.Is(err, bus.ErrDoubt) || !errors.Is(err, context.Canceled) {
		t.Errorf("write with a cancelled context = %v, want ErrDoubt with its cause", err)
	}
}

func TestReads(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx := testContext(t)
	stream := c.Names.WorkStream()
	first := put(t, c, bus.Write{Subject: c.Names.TaskRequest("default", "a"), Data: []byte("A"), Header: nats.Header{"traceparent": {"tp"}}, MsgID: "a"})
	second := put(t, c, bus.Write{Subject: c.Names.TaskRequest("default", "b"), Data: []byte("B")})

	m, err := c.Last(ctx, stream, c.Names.TaskRequests())
	if err != nil || m.Seq != second || string(m.Data) != "B" || m.Subject != c.Names.TaskRequest("default", "b") {
		t.Errorf("Last by wildcard = %+v, %v; want the second request", m, err)
	}
	m, err = c.Get(ctx, stream, first)
	if err != nil || string(m.Data) != "A" || m.Header.Get("traceparent") != "tp" || m.Header.Get("Nats-Msg-Id") != "a" || m.Deleted() {
		t.Errorf("Get of the first = %+v, %v; want it with its headers", m, err)
	}
	if age := time.Since(m.Time); age < -time.Second || age > time.Minute {
		t.Errorf("stored %v ago, want now", age)
	}
	for range 2 { // removing what is gone is fine
		if err := c.DeleteMsg(ctx, stream, first); err != nil {
			t.Errorf("DeleteMsg: %v", err)
		}
	}
	if err := c.DeleteMsg(ctx, stream, 999); err != nil {
		t.Errorf("DeleteMsg of what never was: %v", err)
	}
	if _, err := c.Get(ctx, stream, first); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("Get of what was removed = %v, want ErrNotFound", err)
	}
	if err := c.DeleteMsg(ctx, c.TaskStream(), put(t, c, bus.Write{Subject: c.KV("limits")})); err == nil {
		t.Error("DeleteMsg in a bucket worked, want a refusal: single messages of a bucket cannot be deleted")
	}
}

func TestMarkersAreDeleted(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx := testContext(t)
	kv, err := c.JS.KeyValue(ctx, c.Names.TaskBucket())
	if err != nil {
		t.Fatal(err)
	}
	rev := put(t, c, bus.Write{Subject: c.KV("lease.gone"), TTL: time.Second})
	for _, k := range []string{"lease.deleted", "lease.purged"} {
		put(t, c, bus.Write{Subject: c.KV(k)})
	}
	if err := kv.Delete(ctx, "lease.deleted"); err != nil {
		t.Fatal(err)
	}
	if err := kv.Purge(ctx, "lease.purged"); err != nil {
		t.Fatal(err)
	}
	marker := expired(t, c, "lease.gone")
	if marker.Seq <= rev || marker.Header.Get("Nats-Marker-Reason") != "MaxAge" {
		t.Errorf("expiry marker %+v; want a new sequence and its reason", marker)
	}
	for _, k := range []string{"lease.deleted", "lease.purged"} {
		if m, err := c.Last(ctx, c.TaskStream(), c.KV(k)); err != nil || !m.Deleted() {
			t.Errorf("%s = %+v, %v; want its marker", k, m, err)
		}
	}
}

// expired waits for the marker of a key with a TTL.
func expired(t *testing.T, c *bus.Conn, key string) bus.Message {
	t.Helper()
	var m bus.Message
	natstest.Eventually(t, 10*time.Second, func() (bool, string) {
		var err error
		if m, err = c.Last(testContext(t), c.TaskStream(), c.KV(key)); err != nil {
			t.Fatal(err)
		}
		return m.Deleted(), key + " has not expired"
	})
	return m
}

// What each error means is decided in one place. Most of these are also provoked
// with real servers: here, in facts_test.go and cluster_test.go, and in test/e2e.
func TestClassify(t *testing.T) {
	t.Parallel()
	code := func(status int, code jetstream.ErrorCode, text string) error {
		return fmt.Errorf("nats: %w", &jetstream.APIError{Code: status, ErrorCode: code, Description: text})
	}
	for name, tt := range map[string]struct {
		err  error
		want error
	}{
		"10071: another revision":               {code(400, 10071, "wrong last sequence: 7"), bus.ErrConflict},
		"10164: beside another write":           {code(400, 10164, "wrong last sequence"), bus.ErrConflict},
		"10077: a message is there":             {code(503, 10077, "maximum messages per subject exceeded"), bus.ErrExists},
		"10077: so many messages":               {code(503, 10077, "maximum messages exceeded"), bus.ErrFull},
		"10077: so many bytes":                  {code(503, 10077, "maximum bytes exceeded"), bus.ErrFull},
		"10077: so large":                       {code(503, 10077, "message too large"), bus.ErrTooLarge},
		"10077: a server that stops":            {code(503, 10077, "store is closed"), bus.ErrDoubt}, // the other copies may have it
		"10054: so large":                       {code(400, 10054, "message size exceeds maximum allowed"), bus.ErrTooLarge},
		"10158: an earlier try is under way":    {code(409, 10158, "duplicate message id is in process"), bus.ErrDoubt},
		"10167: the server is behind":           {code(429, 10167, "too many requests"), bus.ErrDoubt},
		"10008: no leader":                      {code(503, 10008, "JetStream system temporarily unavailable"), bus.ErrDoubt},
		"10047: no storage":                     {code(500, 10047, "insufficient storage resources available"), bus.ErrDoubt},
		"10037: no such message":                {code(404, 10037, "no message found"), bus.ErrNotFound},
		"10059: no such stream":                 {jetstream.ErrStreamNotFound, bus.ErrNotProvisioned},
		"10014: no such consumer":               {jetstream.ErrConsumerNotFound, bus.ErrNotProvisioned},
		"no such bucket":                        {jetstream.ErrBucketNotFound, bus.ErrNotProvisioned},
		"nobody takes the subject":              {jetstream.ErrNoStreamResponse, bus.ErrDoubt},
		"nobody answers":                        {nats.ErrNoResponders, bus.ErrDoubt},
		"no answer in time":                     {context.DeadlineExceeded, bus.ErrDoubt},
		"no answer in time, by the library":     {nats.ErrTimeout, bus.ErrDoubt},
		"no answer while we waited":             {context.Canceled, bus.ErrDoubt},
		"no connection":                         {nats.ErrReconnectBufExceeded, bus.ErrDoubt},
		"no answer that can be read":            {jetstream.ErrInvalidJSAck, bus.ErrDoubt},
		"larger than the server takes":          {nats.ErrMaxPayload, bus.ErrTooLarge},
		"400 of another kind is the cause only": {code(400, 10003, "bad request"), nil},
		"anything else":                         {errors.New("other"), nil},
	} {
		got := bus.Classify(tt.err)
		if !errors.Is(got, tt.err) {
			t.Errorf("%s: %v has lost its cause", name, got)
		}
		for _, class := range []error{bus.ErrConflict, bus.ErrDoubt, bus.ErrFull, bus.ErrExists, bus.ErrTooLarge, bus.ErrNotFound, bus.ErrNotProvisioned} {
			if errors.Is(got, class) != errors.Is(class, tt.want) {
				t.Errorf("%s: %q; want %v", name, got, tt.want)
			}
		}
		if want := strings.HasPrefix(name, "10164"); bus.Racing(got) != want {
			t.Errorf("%s: racing is %v, want %v", name, !want, want)
		}
	}
	if bus.Racing(nil) || bus.Classify(nil) != nil {
		t.Error("no error is neither racing nor classified")
	}
}

func TestRedact(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"nats://127.0.0.1:4222":                    "nats://127.0.0.1:4222",
		"nats://user:secret@host:4222":             "nats://…@host:4222",
		"nats://u:se@cret@host:4222":               "nats://…@host:4222",
		"token@host":                               "…@host",
		"tls://u:secret@a:1,nats://b:2,v:secret@c": "tls://…@a:1,nats://b:2,…@c",
		"": "",
	} {
		if got := bus.Redact(in); got != want || strings.Contains(got, "secret") {
			t.Errorf("Redact(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestWriterNames(t *testing.T) {
	t.Parallel()
	a, b := bus.NewWriter("executor"), bus.NewWriter("executor")
	if a.ID() == b.ID() {
		t.Errorf("two incarnations share the name %q", a.ID())
	}
	var seen sync.Map
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				if _, twice := seen.LoadOrStore(a.Next(), true); twice {
					t.Error("a writer name came twice")
				}
			}
		})
	}
	wg.Wait()
	if tok := bus.RandomToken(6); len(tok) != 12 || contract.ValidateToken("token", tok) != nil {
		t.Errorf("RandomToken(6) = %q, want 12 characters of a token", tok)
	}
}
