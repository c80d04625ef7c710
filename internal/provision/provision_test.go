package provision_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/jsm.go"
	"github.com/nats-io/jsm.go/api"
	"github.com/nats-io/jsm.go/api/jetstream/advisory"
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

var small = provision.Config{MaxRunning: 3, MaxQueued: 64, EventMaxBytes: 64 << 20}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), natstest.Timeout)
	t.Cleanup(cancel)
	return ctx
}

func empty(t *testing.T, opts ...natstest.Option) (context.Context, *bus.Conn) {
	t.Helper()
	return testContext(t), natstest.Start(t, opts...).Conn("test")
}

func apply(t *testing.T, c *bus.Conn, a provision.Assets) []provision.Change {
	t.Helper()
	done, err := provision.Apply(testContext(t), c.NC, a)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

func TestApplyTwice(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]provision.Config{
		"file":    small,
		"memory":  {MaxRunning: 1, EventMaxBytes: 1 << 20, MemoryStorage: true},
		"prefix":  {Names: contract.MustNames("acme.prod.v2"), EventMaxBytes: 1 << 20},
		"minutes": {EventMaxAge: time.Minute, EventMaxBytes: 1 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, c := empty(t)
			a := provision.Desired(cfg)
			done := apply(t, c, a)
			if want := len(a.Streams) + len(a.Consumers); len(done) != want {
				t.Errorf("first Apply changed %d assets, want %d", len(done), want)
			}
			if again := apply(t, c, a); len(again) != 0 {
				t.Errorf("second Apply changed %v, want nothing", again)
			}
			if left, err := provision.Plan(ctx, c.NC, a); err != nil || len(left) != 0 {
				t.Errorf("Plan after Apply = %v, %v; want nothing", left, err)
			}
			if warn, err := provision.Verify(ctx, c.NC, a); err != nil || len(warn) != 0 {
				t.Errorf("Verify after Apply = %v, %v; want nothing", warn, err)
			}
		})
	}
}

func TestApplyManyAtOnce(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	a := provision.Desired(small)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := provision.Apply(ctx, c.NC, a); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if left, err := provision.Plan(ctx, c.NC, a); err != nil || len(left) != 0 {
		t.Errorf("Plan after eight at once = %v, %v; want nothing", left, err)
	}
}

func TestPlanChangesNothing(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	changes, err := provision.Plan(ctx, c.NC, provision.Desired(small))
	if err != nil {
		t.Fatal(err)
	}
	for _, ch := range changes {
		if !ch.Missing || !ch.InPlace() {
			t.Errorf("%s on an empty server: missing %v, in place %v; want both", ch, ch.Missing, ch.InPlace())
		}
	}
	info, err := c.JS.AccountInfo(ctx)
	if err != nil || info.Streams != 0 {
		t.Errorf("%d streams after Plan (%v), want none", info.Streams, err)
	}
}

// The streams of buckets are made by hand; nats.go must take them as its own.
func TestBucketsAreValid(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	apply(t, c, provision.Desired(small))
	for _, name := range []string{c.Names.TaskBucket(), c.Names.RunBucket(), c.Names.AgentBucket()} {
		kv, err := c.JS.KeyValue(ctx, name)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := kv.Create(ctx, "lease.x", []byte("1"), jetstream.KeyTTL(time.Minute)); err != nil {
			t.Errorf("%s: create with TTL: %v", name, err)
		}
		st, err := kv.Status(ctx)
		if err != nil || st.History() != 1 || st.LimitMarkerTTL() != provision.MarkerTTL {
			t.Errorf("%s: history %d, markers for %v (%v); want 1, %v", name, st.History(), st.LimitMarkerTTL(), err, provision.MarkerTTL)
		}
	}
	store, err := c.JS.ObjectStore(ctx, c.Names.BlobStore())
	if err != nil {
		t.Fatal(err)
	}
	blob := bytes.Repeat([]byte("x"), 300<<10)
	if _, err := store.PutBytes(ctx, "a", blob); err != nil {
		t.Fatal(err)
	}
	if got, err := store.GetBytes(ctx, "a"); err != nil || !bytes.Equal(got, blob) {
		t.Errorf("blob came back with %d bytes, %v", len(got), err)
	}
	if err := store.Delete(ctx, "a"); err != nil {
		t.Errorf("delete blob: %v", err)
	}
}

// ADM-04: with the policy "reject", or without a queue, only running tasks have room.
func TestQueueBound(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		cfg  provision.Config
		want int64
	}{
		{provision.Config{MaxRunning: 3, MaxQueued: 64}, 67},
		{provision.Config{MaxRunning: 5, MaxQueued: 0}, 5},
		{provision.Config{MaxRunning: 5, MaxQueued: 64, AdmissionPolicy: provision.PolicyReject}, 5},
		{provision.Config{}, provision.DefaultMaxRunning},
	} {
		if got := provision.Desired(tc.cfg).Streams[0].MaxMsgs; got != tc.want {
			t.Errorf("queue for %+v holds %d, want %d", tc.cfg, got, tc.want)
		}
	}
}

// A largest request must fit through queue and grant with its headers.
func TestMessageSizes(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	apply(t, c, provision.Desired(small))
	trace := nats.Header{"traceparent": {strings.Repeat("0", 55)}, "tracestate": {strings.Repeat("s", 512)}}
	for subject, n := range map[string]int{
		c.Names.TaskRequest("default", "t1"): contract.MaxRequestBytes,
		c.Names.TaskGrant("default", "t1"):   contract.MaxGrantBytes,
	} {
		if _, err := c.Publish(ctx, bus.Write{Subject: subject, Data: make([]byte, n), Header: trace, MsgID: "t1"}); err != nil {
			t.Errorf("%d bytes on %s: %v", n, subject, err)
		}
		if _, err := c.Publish(ctx, bus.Write{Subject: subject + "2", Data: make([]byte, n+32<<10)}); !errors.Is(err, bus.ErrTooLarge) {
			t.Errorf("%d bytes on %s: %v, want ErrTooLarge", n+32<<10, subject, err)
		}
	}
}

// Case F-182: a stream of that name exists with another retention.
func TestOtherRetentionIsLeftAlone(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	if _, err := c.JS.CreateStream(ctx, jetstream.StreamConfig{
		Name: c.Names.GrantStream(), Subjects: []string{c.Names.TaskGrants("")}, Retention: jetstream.LimitsPolicy,
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if _, err := c.Publish(ctx, bus.Write{Subject: c.Names.TaskGrant("default", contract.TaskID(fmt.Sprint("t", i)))}); err != nil {
			t.Fatal(err)
		}
	}
	a := provision.Desired(small)

	changes, err := provision.Apply(ctx, c.NC, a)
	if !errors.Is(err, provision.ErrNotInPlace) {
		t.Fatalf("Apply = %v, want ErrNotInPlace", err)
	}
	for _, want := range []string{"HG_GRANTS", "retention is limits, expected workqueue", "nothing was changed"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
	if len(changes) != len(a.Streams)+len(a.Consumers) {
		t.Errorf("Apply returned a plan of %d changes, want all %d", len(changes), len(a.Streams)+len(a.Consumers))
	}
	info, err := c.JS.AccountInfo(ctx)
	if err != nil || info.Streams != 1 {
		t.Errorf("%d streams afterwards (%v), want the one that was there", info.Streams, err)
	}
	str, err := c.JS.Stream(ctx, c.Names.GrantStream())
	if err != nil {
		t.Fatal(err)
	}
	if i := str.CachedInfo(); i.State.Msgs != 3 || i.Config.Retention != jetstream.LimitsPolicy {
		t.Errorf("stream has %d messages and %v; want 3 and limits as before", i.State.Msgs, i.Config.Retention)
	}

	_, err = provision.Verify(ctx, c.NC, a.Only(c.Names.GrantStream()))
	if !errors.Is(err, provision.ErrUnsafe) {
		t.Fatalf("Verify = %v, want ErrUnsafe", err)
	}
	for _, want := range []string{"retention is limits, expected workqueue", "executors-default is missing", "herdgate provision"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
}

// The bound may be lowered beneath what is stored: nothing is dropped, new
// requests are refused until there is room again.
func TestLoweringTheBoundKeepsRequests(t *testing.T) {
	t.Parallel()
	for _, memory := range []bool{false, true} {
		ctx, c := empty(t)
		cfg := small
		cfg.MemoryStorage = memory
		apply(t, c, provision.Desired(cfg))
		request := func(i int) error {
			_, err := c.Publish(ctx, bus.Write{Subject: c.Names.TaskRequest("default", contract.TaskID(fmt.Sprint("t", i)))})
			return err
		}
		for i := range 10 {
			if err := request(i); err != nil {
				t.Fatal(err)
			}
		}
		cfg.MaxRunning, cfg.MaxQueued = 2, 2
		done := apply(t, c, provision.Desired(cfg))
		if len(done) != 1 || done[0].Fields[0].Trims {
			t.Errorf("Apply changed %v, want only the bound, without loss", done)
		}
		str, err := c.JS.Stream(ctx, c.Names.WorkStream())
		if err != nil {
			t.Fatal(err)
		}
		if i := str.CachedInfo(); i.State.Msgs != 10 || i.Config.MaxMsgs != 4 {
			t.Errorf("memory %v: %d requests under bound %d; want 10 under 4", memory, i.State.Msgs, i.Config.MaxMsgs)
		}
		if err := request(11); !errors.Is(err, bus.ErrFull) {
			t.Errorf("memory %v: request over the lowered bound: %v, want ErrFull", memory, err)
		}
	}
}

// What an operator has set beside our settings survives an update.
func TestForeignSettingsSurvive(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	a := provision.Desired(small)
	work := a.Streams[0]
	if _, err := c.JS.CreateStream(ctx, jetstream.StreamConfig{
		Name: work.Name, Subjects: work.Subjects, Discard: jetstream.DiscardNew,
		Compression: jetstream.S2Compression, Metadata: map[string]string{"owner": "ops"}, AllowMsgTTL: true,
	}); err != nil {
		t.Fatal(err)
	}
	apply(t, c, a)
	str, err := c.JS.Stream(ctx, work.Name)
	if err != nil {
		t.Fatal(err)
	}
	got := str.CachedInfo().Config
	if got.Compression != jetstream.S2Compression || got.Metadata["owner"] != "ops" || !got.AllowMsgTTL {
		t.Errorf("compression %v, metadata %v, message TTL %v; want s2, owner ops, true as before", got.Compression, got.Metadata, got.AllowMsgTTL)
	}
	if got.MaxMsgs != 67 || !got.DiscardNewPerSubject {
		t.Errorf("bound %d, one per subject %v; want 67, true", got.MaxMsgs, got.DiscardNewPerSubject)
	}
}

// Every managed setting: what Plan says about it is what the server does, and
// Verify tells what a service cannot live with from what it can.
func TestEachStreamSetting(t *testing.T) {
	t.Parallel()
	const (
		work   = 0
		tasks  = 1
		events = 4
	)
	for _, tc := range []struct {
		field   string
		stream  int
		have    func(*api.StreamConfig)
		inPlace bool
		unsafe  bool
		trims   bool
	}{
		{field: "subjects", stream: work, have: func(c *api.StreamConfig) { c.Subjects = append(slices.Clone(c.Subjects), "other") }, inPlace: true, unsafe: true},
		{field: "retention", stream: work, have: func(c *api.StreamConfig) { c.Retention = api.WorkQueuePolicy }, unsafe: true},
		{field: "discard", stream: tasks, have: func(c *api.StreamConfig) { c.Discard = api.DiscardOld }, inPlace: true, unsafe: true},
		{field: "discard_new_per_subject", stream: work, have: func(c *api.StreamConfig) { c.DiscardNewPer = false }, inPlace: true, unsafe: true},
		{field: "max_msgs", stream: work, have: func(c *api.StreamConfig) { c.MaxMsgs = 100 }, inPlace: true},
		{field: "max_msgs", stream: work, have: func(c *api.StreamConfig) { c.MaxMsgs = -1 }, inPlace: true, unsafe: true},
		{field: "max_msgs_per_subject", stream: tasks, have: func(c *api.StreamConfig) { c.MaxMsgsPer = 5 }, inPlace: true, unsafe: true, trims: true},
		{field: "max_bytes", stream: events, have: func(c *api.StreamConfig) { c.MaxBytes *= 2 }, inPlace: true, trims: true},
		{field: "max_bytes", stream: events, have: func(c *api.StreamConfig) { c.MaxBytes /= 2 }, inPlace: true},
		{field: "max_age", stream: events, have: func(c *api.StreamConfig) { c.MaxAge = 0 }, inPlace: true, trims: true},
		{field: "max_age", stream: work, have: func(c *api.StreamConfig) { c.MaxAge = time.Hour }, inPlace: true, unsafe: true},
		{field: "max_msg_size", stream: work, have: func(c *api.StreamConfig) { c.MaxMsgSize = 1 << 20 }, inPlace: true},
		{field: "max_consumers", stream: work, have: func(c *api.StreamConfig) { c.MaxConsumers = 2 }, inPlace: true},
		{field: "storage", stream: work, have: func(c *api.StreamConfig) { c.Storage = api.MemoryStorage }, unsafe: true},
		{field: "duplicate_window", stream: work, have: func(c *api.StreamConfig) { c.Duplicates = time.Second }, inPlace: true},
		{field: "no_ack", stream: work, have: func(c *api.StreamConfig) { c.NoAck = true }, inPlace: true, unsafe: true},
		{field: "deny_delete", stream: work, have: func(c *api.StreamConfig) { c.DenyDelete = true }, unsafe: true},
		{field: "deny_delete", stream: tasks, have: func(c *api.StreamConfig) { c.DenyDelete = false }, inPlace: true},
		{field: "deny_purge", stream: work, have: func(c *api.StreamConfig) { c.DenyPurge = true }, unsafe: true},
		{field: "allow_rollup_hdrs", stream: work, have: func(c *api.StreamConfig) { c.RollupAllowed = true }, inPlace: true, unsafe: true},
		{field: "allow_direct", stream: events, have: func(c *api.StreamConfig) { c.AllowDirect = false }, inPlace: true, unsafe: true},
		{field: "subject_delete_marker_ttl", stream: tasks, have: func(c *api.StreamConfig) { c.SubjectDeleteMarkerTTL = time.Minute }, inPlace: true},
		{field: "subject_delete_marker_ttl", stream: tasks, have: func(c *api.StreamConfig) { c.SubjectDeleteMarkerTTL = 0 }, inPlace: true, unsafe: true},
		{field: "persist_mode", stream: work, have: func(c *api.StreamConfig) { c.PersistMode = api.AsyncPersistMode }, unsafe: true},
		{field: "subject_transform", stream: events, have: func(c *api.StreamConfig) {
			c.SubjectTransform = &api.SubjectTransformConfig{Source: "hg.v1.event.>", Destination: "hg.v1.event.x.>"}
		}, inPlace: true, unsafe: true},
	} {
		t.Run(fmt.Sprint(tc.field, "/", tc.stream, "/unsafe=", tc.unsafe), func(t *testing.T) {
			t.Parallel()
			ctx, c := empty(t)
			all := provision.Desired(small)
			want := all.Streams[tc.stream]
			have := want
			tc.have(&have)
			call(t, c, fmt.Sprintf(api.JSApiStreamCreateT, have.Name), have, true)

			a := provision.Assets{Streams: []api.StreamConfig{want}}
			check(t, ctx, c, a, tc.field, tc.inPlace, tc.unsafe, tc.trims)
			if !tc.inPlace {
				// The server says the same.
				call(t, c, fmt.Sprintf(api.JSApiStreamUpdateT, want.Name), want, false)
			}
		})
	}
}

func TestEachConsumerSetting(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		field   string
		have    func(*api.ConsumerConfig)
		inPlace bool
		unsafe  bool
	}{
		{field: "deliver_policy", have: func(c *api.ConsumerConfig) { c.DeliverPolicy = api.DeliverNew }, unsafe: true},
		{field: "deliver_subject", have: func(c *api.ConsumerConfig) { c.DeliverSubject = "push" }, unsafe: true},
		{field: "ack_policy", have: func(c *api.ConsumerConfig) { c.AckPolicy = api.AckAll }, unsafe: true},
		{field: "replay_policy", have: func(c *api.ConsumerConfig) { c.ReplayPolicy = api.ReplayOriginal }},
		{field: "filter_subject", have: func(c *api.ConsumerConfig) { c.FilterSubject = "hg.v1.event.x.>" }, inPlace: true, unsafe: true},
		{field: "filter_subjects", have: func(c *api.ConsumerConfig) {
			c.FilterSubject, c.FilterSubjects = "", []string{"hg.v1.event.x.>", "hg.v1.event.y.>"}
		}, inPlace: true, unsafe: true},
		{field: "ack_wait", have: func(c *api.ConsumerConfig) { c.AckWait = time.Hour }, inPlace: true},
		{field: "max_deliver", have: func(c *api.ConsumerConfig) { c.MaxDeliver = 3 }, inPlace: true, unsafe: true},
		{field: "max_ack_pending", have: func(c *api.ConsumerConfig) { c.MaxAckPending = 1 }, inPlace: true},
		{field: "backoff", have: func(c *api.ConsumerConfig) { c.BackOff = []time.Duration{provision.SinkAckWait, time.Hour} }, inPlace: true},
		{field: "headers_only", have: func(c *api.ConsumerConfig) { c.HeadersOnly = true }, inPlace: true, unsafe: true},
		{field: "inactive_threshold", have: func(c *api.ConsumerConfig) { c.InactiveThreshold = time.Hour }, inPlace: true, unsafe: true},
		{field: "mem_storage", have: func(c *api.ConsumerConfig) { c.MemoryStorage = true }, unsafe: true},
		{field: "priority_policy", have: func(c *api.ConsumerConfig) {
			c.PriorityPolicy, c.PriorityGroups = api.PriorityOverflow, []string{"g"}
		}, inPlace: true, unsafe: true},
	} {
		t.Run(tc.field, func(t *testing.T) {
			t.Parallel()
			ctx, c := empty(t)
			a := provision.Desired(small).Only(c.Names.EventStream())
			call(t, c, fmt.Sprintf(api.JSApiStreamCreateT, a.Streams[0].Name), a.Streams[0], true)
			want := a.Consumers[0]
			create := func(cfg api.ConsumerConfig, works bool) {
				subject := fmt.Sprintf(api.JSApiConsumerCreateWithNameT, want.Stream, cfg.Durable)
				if cfg.FilterSubject != "" {
					subject += "." + cfg.FilterSubject
				}
				call(t, c, subject, api.JSApiConsumerCreateRequest{Stream: want.Stream, Config: cfg}, works)
			}
			have := want.Config
			tc.have(&have)
			create(have, true)
			check(t, ctx, c, a, tc.field, tc.inPlace, tc.unsafe, false)
			if !tc.inPlace {
				create(want.Config, false)
			}
		})
	}
}

// check holds Plan, Verify and Apply against what is expected of one field.
func check(t *testing.T, ctx context.Context, c *bus.Conn, a provision.Assets, field string, inPlace, unsafe, trims bool) {
	t.Helper()
	plan, err := provision.Plan(ctx, c.NC, a)
	if err != nil {
		t.Fatal(err)
	}
	if len(plan) != 1 {
		t.Fatalf("plan %v, want one change", plan)
	}
	i := slices.IndexFunc(plan[0].Fields, func(f provision.Field) bool { return f.Name == field })
	if i < 0 {
		t.Fatalf("plan %v does not name %s", plan, field)
	}
	f := plan[0].Fields[i]
	if f.InPlace != inPlace || f.Unsafe != unsafe || f.Trims != trims || f.Have == f.Want {
		t.Errorf("%+v; want in place %v, unsafe %v, trims %v", f, inPlace, unsafe, trims)
	}

	warn, err := provision.Verify(ctx, c.NC, a)
	if unsafe {
		if !errors.Is(err, provision.ErrUnsafe) || !strings.Contains(err.Error(), field+" is "+f.Have+", expected "+f.Want) {
			t.Errorf("Verify = %v, want ErrUnsafe that says expected and actual", err)
		}
	} else if err != nil || len(warn) != 1 {
		t.Errorf("Verify = %v, %v; want one warning", warn, err)
	}

	_, err = provision.Apply(ctx, c.NC, a)
	if !inPlace {
		if !errors.Is(err, provision.ErrNotInPlace) {
			t.Errorf("Apply = %v, want ErrNotInPlace", err)
		}
		return
	}
	if err != nil {
		t.Errorf("Apply = %v although the change is in place", err)
	}
	if left, err := provision.Plan(ctx, c.NC, a); err != nil || len(left) != 0 {
		t.Errorf("Plan after Apply = %v, %v; want nothing", left, err)
	}
}

// call sends a raw request of the JetStream API.
func call(t *testing.T, c *bus.Conn, subject string, body any, works bool) {
	t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := c.NC.RequestWithContext(testContext(t), subject, b)
	if err != nil {
		t.Fatal(err)
	}
	var resp api.JSApiResponse
	if err := json.Unmarshal(msg.Data, &resp); err != nil {
		t.Fatal(err)
	}
	if (resp.Error == nil) != works {
		t.Fatalf("%s: the server says %v; works should be %v", subject, resp.Error, works)
	}
}

func TestVerifyMissing(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	_, err := provision.Verify(ctx, c.NC, provision.Desired(small))
	if !errors.Is(err, provision.ErrUnsafe) || !strings.Contains(err.Error(), "stream HG_WORK is missing") {
		t.Errorf("Verify on an empty server = %v, want ErrUnsafe that names HG_WORK", err)
	}
}

// A service may look at its own streams and nothing else.
func TestVerifyWithNarrowRights(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Tune(func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "admin", Password: "a"},
			{Username: "narrow", Password: "n", Permissions: &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: []string{"$JS.API.STREAM.INFO.HG_GRANTS", "$JS.API.CONSUMER.INFO.HG_GRANTS.executors-default"}},
				Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX_narrow.>"}},
			}},
		}
	}))
	admin := s.Connect(bus.Config{Name: "admin", Extra: []nats.Option{nats.UserInfo("admin", "a")}})
	narrow := s.Connect(bus.Config{Name: "narrow", Extra: []nats.Option{nats.UserInfo("narrow", "n")}})
	a := provision.Desired(small)
	apply(t, admin, a)
	if _, err := provision.Verify(testContext(t), narrow.NC, a.Only("HG_GRANTS")); err != nil {
		t.Errorf("Verify of the own stream: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := provision.Verify(ctx, narrow.NC, a.Only("HG_WORK")); err == nil || !strings.Contains(err.Error(), "right") {
		t.Errorf("Verify of a stream without rights = %v, want an error that speaks of rights", err)
	}
}

// Case F-184: core connections work, but there is no JetStream.
func TestServerWithoutJetStream(t *testing.T) {
	t.Parallel()
	srv, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	nc, err := nats.Connect("", nats.InProcessServer(srv))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	a := provision.Desired(small)
	_, planErr := provision.Plan(testContext(t), nc, a)
	_, applyErr := provision.Apply(testContext(t), nc, a)
	_, verifyErr := provision.Verify(testContext(t), nc, a)
	for name, err := range map[string]error{"Plan": planErr, "Apply": applyErr, "Verify": verifyErr} {
		if !errors.Is(err, provision.ErrNoJetStream) {
			t.Errorf("%s = %v, want ErrNoJetStream", name, err)
		}
	}
}

func TestRefusalsSayWhatToDo(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cfg  provision.Config
		says string
	}{
		"replicas without a cluster": {provision.Config{Replicas: 3}, "nats.replicas above 1 needs a NATS cluster"},
		"more than the disk holds":   {provision.Config{EventMaxBytes: 1 << 50}, "more storage"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, c := empty(t)
			_, err := provision.Apply(ctx, c.NC, provision.Desired(tc.cfg))
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("Apply = %v, want an error that says %q", err, tc.says)
			}
		})
	}
	t.Run("subjects taken", func(t *testing.T) {
		t.Parallel()
		ctx, c := empty(t)
		if _, err := c.JS.CreateStream(ctx, jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"hg.v1.event.>"}}); err != nil {
			t.Fatal(err)
		}
		_, err := provision.Apply(ctx, c.NC, provision.Desired(small))
		if err == nil || !strings.Contains(err.Error(), "another stream takes the same subjects") {
			t.Errorf("Apply = %v, want an error that speaks of the other stream", err)
		}
	})
}

// What gets stuck is on record: a delivery that was given up, and one ended by hand.
func TestAdvisoriesAreKept(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	apply(t, c, provision.Desired(small))
	for _, d := range []string{"once", "term"} {
		cfg := jetstream.ConsumerConfig{Durable: d, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second, FilterSubject: c.Names.AllEvents()}
		if d == "once" {
			cfg.MaxDeliver, cfg.AckWait = 1, 100*time.Millisecond
		}
		if _, err := c.JS.CreateConsumer(ctx, c.Names.EventStream(), cfg); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Publish(ctx, bus.Write{Subject: c.Names.Event(contract.EventSubject{Tenant: "default", Thread: "x", Run: "r", Type: "t"})}); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"once", "term"} {
		cons, err := c.JS.Consumer(ctx, c.Names.EventStream(), d)
		if err != nil {
			t.Fatal(err)
		}
		msg, err := cons.Next(jetstream.FetchMaxWait(5 * time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if d == "term" {
			if err := msg.TermWithReason("poison"); err != nil {
				t.Fatal(err)
			}
		}
	}

	seen := map[string]any{}
	cons, err := c.JS.CreateConsumer(ctx, c.Names.AdvisoryStream(), jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		msg, err := cons.Next(jetstream.FetchMaxWait(10 * time.Second))
		if err != nil {
			t.Fatalf("after advisories %v: %v", seen, err)
		}
		_, ev, err := jsm.ParseEvent(msg.Data())
		if err != nil {
			t.Fatal(err)
		}
		switch e := ev.(type) {
		case *advisory.ConsumerDeliveryExceededAdvisoryV1:
			seen[e.Consumer] = e.StreamSeq
		case *advisory.JSConsumerDeliveryTerminatedAdvisoryV1:
			seen[e.Consumer] = e.Reason
		default:
			t.Errorf("advisory of type %T", ev)
		}
	}
	if seen["once"] != uint64(1) || seen["term"] != "poison" {
		t.Errorf("advisories %v; want sequence 1 for once and the reason for term", seen)
	}
}

func TestWriteDiff(t *testing.T) {
	t.Parallel()
	ctx, c := empty(t)
	a := provision.Desired(small)
	apply(t, c, a)
	work, dead, events := a.Streams[0], a.Streams[5], a.Streams[4]
	work.MaxMsgs = -1
	call(t, c, "$JS.API.STREAM.UPDATE.HG_WORK", work, true)
	events.MaxAge = 30 * 24 * time.Hour
	call(t, c, "$JS.API.STREAM.UPDATE.HG_EVENTS", events, true)
	dead.DenyPurge = true
	call(t, c, "$JS.API.STREAM.UPDATE.HG_DEAD", dead, true)
	if err := c.JS.DeleteConsumer(ctx, "HG_EVENTS", "eventsink"); err != nil {
		t.Fatal(err)
	}

	changes, err := provision.Plan(ctx, c.NC, a)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := provision.WriteDiff(&b, changes); err != nil {
		t.Fatal(err)
	}
	const want = `~ stream HG_WORK
  ~ max_msgs: unlimited -> 67
~ stream HG_EVENTS
  ~ max_age: 30d -> 7d (stored messages beyond the limit are removed)
! stream HG_DEAD
  ! deny_purge: true -> not set (cannot be changed on an existing stream)
+ consumer HG_EVENTS/eventsink
    deliver_policy: all
    ack_policy: explicit
    replay_policy: instant
    filter_subject: hg.v1.event.>
    ack_wait: 30s
    max_ack_pending: 5000
`
	if b.String() != want {
		t.Errorf("diff\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	if err := provision.WriteDiff(&b, nil); err != nil || b.String() != "nothing to change\n" {
		t.Errorf("diff of nothing = %q, %v", b.String(), err)
	}
}

// RESULT-03: whatever is stored goes again some day; a blob outlives the record
// that points to it.
func TestNothingIsKeptForEver(t *testing.T) {
	t.Parallel()
	for _, s := range provision.Desired(provision.Config{}).Streams {
		if strings.HasPrefix(s.Name, "OBJ_") && (s.MaxAge < 2*24*time.Hour || s.MaxAge > 30*24*time.Hour) {
			t.Errorf("%s keeps its blobs for %v", s.Name, s.MaxAge)
		}
	}
}
