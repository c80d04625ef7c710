package system

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

var natsBlock = regexp.MustCompile("(?s)```nats\n(.*?)```")

// The permissions that docs/security.md gives a subscriber let it read its tenant's
// events, live, from the store and from a consumer, and nothing else.
func TestReadOnlySubscriber(t *testing.T) {
	t.Setenv("ACME_READER", "secret")
	doc, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	block := natsBlock.FindSubmatch(doc)
	if block == nil {
		t.Fatal("docs/security.md has no block of permissions")
	}
	var told server.Options
	if err := told.ProcessConfigString(string(block[1])); err != nil {
		t.Fatal(err)
	}
	srv := natstest.Start(t, natstest.Listen(), natstest.Tune(func(o *server.Options) {
		// Services are a user of their own, as which everybody counts who gives no name.
		o.Users = append(told.Users, &server.User{Username: "services", Password: "other"})
		o.NoAuthUser = "services"
	}))
	srv.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	admin := srv.Conn("admin")
	ctx := timeout(t)

	svc, err := eventsink.New(eventsink.Config{}, eventsink.Deps{Bus: srv.Conn("sink"), Open: sqlite.Opener(t.TempDir()), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- svc.Run(run) }()
	defer func() {
		stop()
		if err := <-stopped; err != nil {
			t.Errorf("sink: %v", err)
		}
	}()
	if _, err := admin.JS.CreateConsumer(ctx, "HG_EVENTS", jetstream.ConsumerConfig{
		Durable: "acme-reader", FilterSubject: "hg.v1.event.acme.>", AckPolicy: jetstream.AckExplicitPolicy,
	}); err != nil {
		t.Fatal(err)
	}

	refused := make(chan error, 100)
	nc, err := nats.Connect(srv.URL(), nats.UserInfo("acme-reader", "secret"), nats.CustomInboxPrefix("_INBOX_acme"),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	live, err := nc.SubscribeSync("hg.v1.event.acme.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	var last uint64
	for _, tenant := range []contract.Tenant{"rival", "acme"} {
		req := contract.TaskRequest{TaskID: contract.TaskID("t_" + string(tenant)), RunID: "r_1", ThreadID: "th", Tenant: tenant, Subagent: contract.Subagent{Name: "general-purpose"}, Prompt: "p"}
		w, err := eventwrite.Of(admin, event.Queued(req, "", "", 1, "/herdgate/admission/a", time.Now()))
		if err != nil {
			t.Fatal(err)
		}
		ack, err := admin.Publish(ctx, w)
		if err != nil {
			t.Fatal(err)
		}
		last = ack.Seq
	}

	// What it may do.
	m, err := live.NextMsgWithContext(ctx)
	if err != nil || !regexp.MustCompile(`^hg\.v1\.event\.acme\.`).MatchString(m.Subject) {
		t.Errorf("live: %v, %v", m, err)
	}
	body, err := json.Marshal(eventapi.ListRequest{BarrierSeq: last})
	if err != nil {
		t.Fatal(err)
	}
	list := func(subject string, body []byte) (page eventapi.ListResponse, err error) {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		m, err := nc.RequestWithContext(ctx, subject, body)
		if err != nil {
			return page, err
		}
		return page, json.Unmarshal(m.Data, &page)
	}
	var page eventapi.ListResponse
	natstest.Eventually(t, Timeout, func() (bool, string) {
		page, err = list("hg.v1.svc.events.list.acme", body)
		return err == nil && page.LastSeq >= last, "the sink does not answer"
	})
	if len(page.Events) != 1 || page.Events[0].Tenant != "acme" {
		t.Errorf("history: %+v; want the one event of acme", page.Events)
	}
	cons, err := js.Consumer(ctx, "HG_EVENTS", "acme-reader")
	if err != nil {
		t.Fatal(err)
	}
	msg, err := cons.Next(jetstream.FetchMaxWait(Timeout))
	if err != nil {
		t.Fatal(err)
	}
	if err := msg.Ack(); err != nil || !regexp.MustCompile(`^hg\.v1\.event\.acme\.`).MatchString(msg.Subject()) {
		t.Errorf("consumer: %s, %v", msg.Subject(), err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-refused:
		t.Errorf("what the subscriber needs is refused: %v", err)
	default:
	}

	// What it may not: none of it gets an answer, and the server says so each time.
	if page, err := list("hg.v1.svc.events.list.acme", []byte(`{"tenant":"rival"}`)); err == nil && (page.Error == nil || len(page.Events) > 0) {
		t.Errorf("another tenant in the body: %+v", page)
	}
	for what, subject := range map[string]string{
		"another tenant's history":     "hg.v1.svc.events.list.rival",
		"history without a tenant":     "hg.v1.svc.events.list",
		"a task":                       "hg.v1.svc.task.submit.acme",
		"an event":                     "hg.v1.event.acme.th.r.t.task_failed",
		"a request":                    "hg.v1.task.request.acme.t_1",
		"a cancellation":               "$KV.HG_TASKS.cancel.t_1",
		"a consumer":                   "$JS.API.CONSUMER.CREATE.HG_EVENTS.mine.hg.v1.event.acme.>",
		"a consumer of the old kind":   "$JS.API.CONSUMER.DURABLE.CREATE.HG_EVENTS.mine",
		"another consumer":             "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.eventsink",
		"the end of a consumer":        "$JS.API.CONSUMER.DELETE.HG_EVENTS.acme-reader",
		"a message by its sequence":    "$JS.API.STREAM.MSG.GET.HG_EVENTS",
		"a message directly":           "$JS.API.DIRECT.GET.HG_EVENTS.hg.v1.event.rival.>",
		"a record":                     "$JS.API.DIRECT.GET.KV_HG_TASKS.$KV.HG_TASKS.>",
		"a purge":                      "$JS.API.STREAM.PURGE.HG_EVENTS",
		"the end of a stream":          "$JS.API.STREAM.DELETE.HG_EVENTS",
		"a list of streams":            "$JS.API.STREAM.NAMES",
		"an acknowledgement elsewhere": "$JS.ACK.HG_EVENTS.eventsink.1.1.1.1.0",
	} {
		if err := nc.Publish(subject, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		wantRefused(t, refused, what)
	}
	for what, subject := range map[string]string{
		"another tenant, live": "hg.v1.event.rival.>", "all tenants": "hg.v1.event.>", "everything": ">", "others' answers": "_INBOX.>", "grants": "hg.v1.task.grant.>",
	} {
		sub, err := nc.SubscribeSync(subject)
		if err != nil {
			t.Fatal(err)
		}
		wantRefused(t, refused, what)
		_ = sub.Unsubscribe() // the server has none
	}
}

// wantRefused waits for the server's word that it does not let that be done.
func wantRefused(t *testing.T, refused <-chan error, what string) {
	t.Helper()
	select {
	case err := <-refused:
		if !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("%s: %v, want a violation of permissions", what, err)
		}
	case <-time.After(Timeout):
		t.Errorf("%s is not refused", what)
	}
}
