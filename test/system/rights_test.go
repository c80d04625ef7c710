package system

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentstore"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

var natsBlock = regexp.MustCompile("(?s)```nats\n(.*?)```")

// The blocks of docs/security.md, in their order.
const (
	blockUsers = iota
	blockAccounts
	blockServices
	blockCount
)

// documented returns the options that a block of docs/security.md gives a server. The
// variables in it are passwords.
func documented(t *testing.T, block int) server.Options {
	t.Helper()
	doc, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	found := natsBlock.FindAllSubmatch(doc, -1)
	if len(found) != blockCount {
		t.Fatalf("docs/security.md has %d blocks for the server; want %d", len(found), blockCount)
	}
	text := regexp.MustCompile(`\$[A-Z]+_[A-Z]+`).ReplaceAllString(string(found[block][1]), "secret")
	var o server.Options
	if err := o.ProcessConfigString(text); err != nil {
		t.Fatal(err)
	}
	return o
}

// rights is a server with the users of a block, and an event sink with an event each of
// the tenants acme and rival.
type rights struct {
	t     *testing.T
	srv   *natstest.Server
	admin *bus.Conn
	last  uint64 // sequence of the newest event
}

func newRights(t *testing.T, tune func(*server.Options)) *rights {
	t.Helper()
	srv := natstest.Start(t, natstest.Listen(), natstest.Tune(tune))
	srv.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	r := &rights{t: t, srv: srv, admin: srv.Conn("admin")}
	svc, err := eventsink.New(eventsink.Config{}, eventsink.Deps{Bus: srv.Conn("sink"), Open: sqlite.Opener(t.TempDir()), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- svc.Run(run) }()
	t.Cleanup(func() {
		stop()
		if err := <-stopped; err != nil {
			t.Errorf("sink: %v", err)
		}
	})
	for _, tenant := range []contract.Tenant{"rival", "acme"} {
		r.publish(tenant, 1)
	}
	return r
}

// publish publishes the n-th event of a tenant's task.
func (r *rights) publish(tenant contract.Tenant, n int) {
	r.t.Helper()
	req := contract.TaskRequest{TaskID: contract.TaskID(fmt.Sprint("t_", tenant, n)), RunID: "r_1", ThreadID: "th", Tenant: tenant, Subagent: contract.Subagent{Name: "general-purpose"}, Prompt: "p"}
	w, err := eventwrite.Of(r.admin, event.Queued(req, "", "", 1, "/herdgate/admission/a", time.Now()))
	if err != nil {
		r.t.Fatal(err)
	}
	ack, err := r.admin.Publish(timeout(r.t), w)
	if err != nil {
		r.t.Fatal(err)
	}
	r.last = ack.Seq
}

// user is somebody's connection, with what the server has refused it.
type user struct {
	*nats.Conn
	t       *testing.T
	refused chan error
}

func (r *rights) user(name, inbox string) *user {
	r.t.Helper()
	u := &user{t: r.t, refused: make(chan error, 100)}
	nc, err := nats.Connect(r.srv.URL(), nats.UserInfo(name, "secret"), nats.CustomInboxPrefix(inbox),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { u.refused <- err }))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(nc.Close)
	u.Conn = nc
	return u
}

// list asks for a page of events.
func (u *user) list(subject string, body string) (page eventapi.ListResponse, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	m, err := u.RequestWithContext(ctx, subject, []byte(body))
	if err != nil {
		return page, err
	}
	return page, json.Unmarshal(m.Data, &page)
}

// history waits until the sink answers with all that is stored.
func (u *user) history(r *rights) eventapi.ListResponse {
	u.t.Helper()
	var page eventapi.ListResponse
	natstest.Eventually(u.t, Timeout, func() (bool, string) {
		var err error
		page, err = u.list("hg.v1.svc.events.list.acme", fmt.Sprintf(`{"barrier_seq":%d}`, r.last))
		return err == nil && page.Error == nil && page.LastSeq >= r.last, fmt.Sprintf("the sink does not answer: %v, %+v", err, page)
	})
	return page
}

// nothingRefused checks that everything so far was allowed.
func (u *user) nothingRefused() {
	u.t.Helper()
	if err := u.Flush(); err != nil {
		u.t.Fatal(err)
	}
	select {
	case err := <-u.refused:
		u.t.Errorf("what the user needs is refused: %v", err)
	default:
	}
}

// wantRefused publishes to and subscribes what the server must not let the user.
func (u *user) wantRefused(publish, subscribe map[string]string) {
	u.t.Helper()
	for what, subject := range publish {
		if err := u.Publish(subject, []byte("{}")); err != nil {
			u.t.Fatal(err)
		}
		wantRefused(u.t, u.refused, what)
	}
	for what, subject := range subscribe {
		sub, err := u.SubscribeSync(subject)
		if err != nil {
			u.t.Fatal(err)
		}
		wantRefused(u.t, u.refused, what)
		_ = sub.Unsubscribe() // the server has none
	}
}

// notOurs is what nobody but the services and operators may do.
var notOurs = map[string]string{
	"another tenant's history":     "hg.v1.svc.events.list.rival",
	"history without a tenant":     "hg.v1.svc.events.list",
	"another tenant's task":        "hg.v1.svc.task.submit.rival",
	"a task without a tenant":      "hg.v1.svc.task.submit",
	"the gate":                     "hg.v1.svc.admission.status",
	"the stored sub-agents":        "hg.v1.svc.agents.list",
	"a sub-agent":                  "hg.v1.svc.agents.put",
	"the end of a sub-agent":       "hg.v1.svc.agents.delete",
	"an event":                     "hg.v1.event.acme.th.r.t.task_failed",
	"a request":                    "hg.v1.task.request.acme.t_1",
	"a grant":                      "hg.v1.task.grant.default.t_1",
	"a cancellation":               "$KV.HG_TASKS.cancel.t_1",
	"a run":                        "$KV.HG_RUNS.run.r_1",
	"a blob":                       "$O.HG_BLOBS.C.x",
	"the read of a blob":           "$JS.API.DIRECT.GET.OBJ_HG_BLOBS.$O.HG_BLOBS.>",
	"a consumer":                   "$JS.API.CONSUMER.CREATE.HG_EVENTS.mine.hg.v1.event.acme.>",
	"a consumer by its body":       "$JS.API.CONSUMER.CREATE.HG_EVENTS.mine",
	"a consumer without a name":    "$JS.API.CONSUMER.CREATE.HG_EVENTS",
	"a consumer of the old kind":   "$JS.API.CONSUMER.DURABLE.CREATE.HG_EVENTS.mine",
	"another consumer":             "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.eventsink",
	"the consumer of an operator":  "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.acme-reader",
	"the end of a consumer":        "$JS.API.CONSUMER.DELETE.HG_EVENTS.acme-reader",
	"a pause of a consumer":        "$JS.API.CONSUMER.PAUSE.HG_EVENTS.eventsink",
	"a message by its sequence":    "$JS.API.STREAM.MSG.GET.HG_EVENTS",
	"a message directly":           "$JS.API.DIRECT.GET.HG_EVENTS.hg.v1.event.rival.>",
	"a record":                     "$JS.API.DIRECT.GET.KV_HG_TASKS.$KV.HG_TASKS.>",
	"a change of a stream":         "$JS.API.STREAM.UPDATE.HG_EVENTS",
	"a stream of one's own":        "$JS.API.STREAM.CREATE.MINE",
	"the end of a message":         "$JS.API.STREAM.MSG.DELETE.HG_EVENTS",
	"a purge":                      "$JS.API.STREAM.PURGE.HG_EVENTS",
	"the end of a stream":          "$JS.API.STREAM.DELETE.HG_EVENTS",
	"a list of streams":            "$JS.API.STREAM.NAMES",
	"an acknowledgement elsewhere": "$JS.ACK.HG_EVENTS.eventsink.1.1.1.1.0",
	"a look at the services":       "$SRV.INFO",
}

var notForUs = map[string]string{
	"another tenant, live": "hg.v1.event.rival.>", "all tenants": "hg.v1.event.>", "everything": ">", "others' answers": "_INBOX.>",
	"grants": "hg.v1.task.grant.>", "records": "$KV.>", "requests for the store": "hg.v1.svc.events.list.acme",
}

// The permissions that docs/security.md gives a subscriber let it read its tenant's
// events, live and from the store, and nothing else.
func TestReadOnlySubscriber(t *testing.T) {
	t.Parallel()
	told := documented(t, blockUsers)
	r := newRights(t, func(o *server.Options) {
		// Services are a user of their own, as which everybody counts who gives no name.
		o.Users = append(told.Users, &server.User{Username: "services", Password: "other"})
		o.NoAuthUser = "services"
	})
	u := r.user("acme-reader", "_INBOX_acme")
	live, err := u.SubscribeSync("hg.v1.event.acme.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Flush(); err != nil {
		t.Fatal(err)
	}
	r.publish("rival", 2)
	r.publish("acme", 2)
	m, err := live.NextMsgWithContext(timeout(t))
	if err != nil || !strings.HasPrefix(m.Subject, "hg.v1.event.acme.") {
		t.Errorf("live: %v, %v", m, err)
	}
	if page := u.history(r); len(page.Events) != 2 || page.Events[0].Tenant != "acme" || page.Events[1].Tenant != "acme" {
		t.Errorf("history: %+v; want the two events of acme", page.Events)
	}
	u.nothingRefused()

	if page, err := u.list("hg.v1.svc.events.list.acme", `{"tenant":"rival"}`); err == nil && (page.Error == nil || len(page.Events) > 0) {
		t.Errorf("another tenant in the body: %+v", page)
	}
	u.wantRefused(notOurs, notForUs)
	u.wantRefused(map[string]string{"a task": "hg.v1.svc.task.submit.acme"}, nil)
	r.wantNoForeignAnswer(u, "hg.v1.svc.events.list.acme")
}

// wantNoForeignAnswer checks that an endpoint does not publish its answer where the
// asker may not, and answers into the asker's inbox all the same.
func (r *rights) wantNoForeignAnswer(u *user, endpoint string) {
	r.t.Helper()
	places := map[string]string{
		"$KV.HG_TASKS.task.t_1": "KV_HG_TASKS", "$KV.HG_TASKS.lease.t_1": "KV_HG_TASKS", "hg.v1.task.request.rival.t_1": "HG_WORK", "hg.v1.task.grant.default.t_1": "HG_GRANTS",
		"hg.v1.event.rival.th.r.t.task_failed": "HG_EVENTS", "hg.v1.dead.x": "HG_DEAD", "$O.HG_BLOBS.C.x": "OBJ_HG_BLOBS",
	}
	for reply := range places {
		if err := u.PublishMsg(&nats.Msg{Subject: endpoint, Reply: reply, Data: []byte("{}")}); err != nil {
			r.t.Fatal(err)
		}
	}
	// Requests of one connection are served in their order, but answered side by side:
	// a stored answer could still come. The streams are therefore looked at behind one
	// that has come.
	if _, err := u.list(endpoint, "{}"); err != nil && !errors.As(err, new(*json.UnmarshalTypeError)) {
		r.t.Fatal(err)
	}
	for reply, stream := range places {
		if m, err := r.admin.Last(timeout(r.t), stream, reply); !errors.Is(err, bus.ErrNotFound) {
			r.t.Errorf("an answer was stored as %s: %s, %v", reply, m.Data, err)
		}
	}
}

// The permissions of docs/security.md for who delegates for one tenant.
func TestSubmitter(t *testing.T) {
	t.Parallel()
	told := documented(t, blockUsers)
	s := New(t, Options{Listen: true, Server: []natstest.Option{natstest.Tune(func(o *server.Options) {
		o.Users = append(told.Users, &server.User{Username: "services", Password: "other"})
		o.NoAuthUser = "services"
	})}})
	s.Whole()
	r := &rights{t: t, srv: s.Server, admin: s.Bus}
	u := r.user("acme-submitter", "_INBOX_acme-submitter")
	live, err := u.SubscribeSync("hg.v1.event.acme.>")
	if err != nil {
		t.Fatal(err)
	}
	ask := func(what, body string) (out struct {
		TaskID contract.TaskID `json:"task_id"`
		Status string          `json:"status"`
		Code   string          `json:"code"`
	},
	) {
		t.Helper()
		m, err := u.RequestWithContext(timeout(t), "hg.v1.svc.task."+what+".acme", []byte(body))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if err := json.Unmarshal(m.Data, &out); err != nil {
			var problem struct {
				Code string `json:"code"`
			}
			if json.Unmarshal(m.Data, &problem) != nil {
				t.Fatalf("%s: %s: %v", what, m.Data, err)
			}
			out.Code = problem.Code
		}
		return out
	}
	got := ask("submit", `{"subagent_type":"general-purpose","prompt":"hello"}`)
	if got.TaskID == "" {
		t.Fatalf("submit: %+v", got)
	}
	for {
		m, err := live.NextMsgWithContext(timeout(t))
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(m.Subject, ".task_completed") {
			break
		}
	}
	if v := ask("get", fmt.Sprintf(`{"task_id":%q}`, got.TaskID)); v.Status != "completed" {
		t.Errorf("get: %+v", v)
	}
	if v := ask("cancel", fmt.Sprintf(`{"task_id":%q}`, got.TaskID)); v.Code != wire.CodeAlreadyFinished {
		t.Errorf("cancel: %+v", v)
	}
	if v := ask("submit", `{"subagent_type":"general-purpose","prompt":"hello","tenant":"rival"}`); v.TaskID != "" || v.Code == "" {
		t.Errorf("another tenant in the body: %+v", v)
	}
	u.nothingRefused()
	u.wantRefused(notOurs, notForUs)
	for _, endpoint := range []string{"get", "cancel"} {
		r.wantNoForeignAnswer(u, "hg.v1.svc.task."+endpoint+".acme")
	}
}

// An account of its own, as docs/security.md describes it, gives a reader one durable
// consumer, and an answer goes nowhere but back.
func TestReaderInItsOwnAccount(t *testing.T) {
	t.Parallel()
	told := documented(t, blockAccounts)
	r := newRights(t, func(o *server.Options) {
		o.Accounts, o.Users, o.NoAuthUser = told.Accounts, told.Users, "services"
	})
	if _, err := r.admin.JS.CreateConsumer(timeout(t), "HG_EVENTS", jetstream.ConsumerConfig{
		Durable: "acme-reader", FilterSubject: "hg.v1.event.acme.>", AckPolicy: jetstream.AckExplicitPolicy,
	}); err != nil {
		t.Fatal(err)
	}
	u := r.user("acme", "_INBOX")
	live, err := u.SubscribeSync("hg.v1.event.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := u.Flush(); err != nil {
		t.Fatal(err)
	}
	r.publish("rival", 2)
	r.publish("acme", 2)
	if m, err := live.NextMsgWithContext(timeout(t)); err != nil || !strings.HasPrefix(m.Subject, "hg.v1.event.acme.") {
		t.Errorf("live: %v, %v", m, err)
	}
	if page := u.history(r); len(page.Events) != 2 || page.Events[0].Tenant != "acme" {
		t.Errorf("history: %+v; want the two events of acme", page.Events)
	}
	js, err := jetstream.NewWithAPIPrefix(u.Conn, "HERDGATE.API")
	if err != nil {
		t.Fatal(err)
	}
	cons, err := js.Consumer(timeout(t), "HG_EVENTS", "acme-reader")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		msg, err := cons.Next(jetstream.FetchMaxWait(Timeout))
		if err != nil {
			t.Fatal(err)
		}
		if err := msg.DoubleAck(timeout(t)); err != nil || !strings.HasPrefix(msg.Subject(), "hg.v1.event.acme.") {
			t.Errorf("consumer: %s, %v", msg.Subject(), err)
		}
	}
	u.nothingRefused()

	// Its subjects are its own: what it publishes reaches nobody else, and an answer that
	// it wants elsewhere comes to its own account.
	r.publish("acme", 3)
	for _, subject := range []string{"hg.v1.svc.events.list.acme", "HERDGATE.API.CONSUMER.INFO.HG_EVENTS.acme-reader", "HERDGATE.API.CONSUMER.MSG.NEXT.HG_EVENTS.acme-reader"} {
		const foreign = "$KV.HG_TASKS.task.t_1"
		back, err := u.SubscribeSync(foreign)
		if err != nil {
			t.Fatal(err)
		}
		body := "{}"
		if strings.Contains(subject, "INFO") {
			body = ""
		}
		if err := u.PublishMsg(&nats.Msg{Subject: subject, Reply: foreign, Data: []byte(body)}); err != nil {
			t.Fatal(err)
		}
		if _, err := back.NextMsgWithContext(timeout(t)); err != nil {
			t.Errorf("%s: the answer does not come back: %v", subject, err)
		}
		// A message of a consumer would be stored under a subject of its own.
		if m, err := r.admin.Last(timeout(t), "KV_HG_TASKS", ">"); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("%s: the answer is stored among the records: %s %s, %v", subject, m.Subject, m.Data, err)
		}
		if err := back.Unsubscribe(); err != nil {
			t.Fatal(err)
		}
	}
	for _, subject := range []string{"hg.v1.svc.events.list.rival", "$JS.API.STREAM.INFO.HG_EVENTS", "HERDGATE.API.STREAM.INFO.HG_EVENTS", "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.eventsink", "HERDGATE.API.CONSUMER.MSG.NEXT.HG_EVENTS.eventsink", "hg.v1.svc.task.submit.acme"} {
		ctx, cancel := context.WithTimeout(t.Context(), Timeout)
		if m, err := u.RequestWithContext(ctx, subject, []byte("{}")); !errors.Is(err, nats.ErrNoResponders) && (err != nil || !strings.Contains(string(m.Data), "not enabled")) {
			t.Errorf("%s: %v, %v; want nobody there", subject, m, err)
		}
		cancel()
	}
}

// wordy answers "large" with a result that has to be kept beside the record.
type wordy struct{ *Held }

// Generate implements model.Model.
func (w wordy) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	resp, err := w.Held.Generate(ctx, req, onDelta)
	if taskOf(req) == "large" {
		resp.Message.Text = strings.Repeat("large ", contract.MaxInlineResultBytes/6+1)
	}
	return resp, err
}

// lines keeps what is logged.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) with(text string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for line := range strings.Lines(l.b.String()) {
		if strings.Contains(strings.ToLower(line), text) {
			out = append(out, line)
		}
	}
	return out
}

// The permissions of docs/security.md for the services are enough for all that they do,
// and keep each from what it has no business with.
func TestServicesUnderTheirRights(t *testing.T) {
	t.Parallel()
	told := documented(t, blockServices)
	var log lines
	held := wordy{NewHeld()}
	s := New(t, Options{
		Listen: true, Model: held, Log: zerolog.New(&log), Unrecorded: true,
		Server: []natstest.Option{natstest.Tune(func(o *server.Options) { o.Users, o.NoAuthUser = told.Users, "operator" })},
		As: func(name string) []nats.Option {
			who := map[string]string{"sink": "eventsink", "adm": "admission", "ex": "executor", "lead": "lead", "test": "operator"}
			kind, _, _ := strings.Cut(name, "-")
			return []nats.Option{nats.UserInfo(who[kind], "secret")}
		},
	})
	defer func() {
		if refused := log.with("permissions violation"); len(refused) > 0 {
			t.Errorf("services are refused what they need:\n%s", strings.Join(refused, ""))
		}
	}()
	api := s.Whole()
	ctx := timeout(t)
	start := func(prompt string) contract.TaskID {
		t.Helper()
		acc, err := api.SubmitTask(ctx, wire.TaskRequest{SubagentType: "general-purpose", Prompt: prompt})
		if err != nil {
			t.Fatal(err)
		}
		return acc.TaskID
	}
	status := func(id contract.TaskID, want contract.TaskStatus) {
		t.Helper()
		natstest.Eventually(t, Timeout, func() (bool, string) {
			v, err := api.GetTask(ctx, id)
			return err == nil && v.Status == want, fmt.Sprintf("task: %+v, %v; want %s", v, err, want)
		})
	}
	stopped := start("hold this")
	status(stopped, "running")
	if err := api.CancelTask(ctx, stopped); err != nil {
		t.Fatal(err)
	}
	status(stopped, "cancelled")

	kept := start("hold that")
	status(kept, "running")
	// A standby takes the gate over; the sink finds what it cannot store.
	s.Admission("adm-2")
	s.gate.Stop()
	bad := s.Bus.Names.Event(contract.EventSubject{Tenant: "default", Thread: "th", Run: "r_1", Task: "t_1", Type: contract.EventTaskRunning})
	if _, err := s.Bus.Publish(ctx, bus.Write{Subject: bad, Data: []byte("no event")}); err != nil {
		t.Fatal(err)
	}
	held.LetGo("hold that")
	status(kept, "completed")
	large := start("large")
	status(large, "completed")
	run, err := api.StartRun(ctx, wire.RunRequest{Input: "hello"})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		v, err := api.GetRun(ctx, run.RunID)
		return err == nil && v.Status.Terminal(), fmt.Sprintf("run: %+v, %v", v, err)
	})
	natstest.Eventually(t, Timeout, func() (bool, string) {
		page, err := api.ListEvents(ctx, client.EventQuery{RunID: run.RunID}, 0)
		return err == nil && len(page.Events) > 1, fmt.Sprintf("events of the run: %+v, %v", page, err)
	})
	if st, err := api.Admission(ctx); err != nil || st.MaxRunning != 3 {
		t.Errorf("admission: %+v, %v", st, err)
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		_, err := s.Bus.Last(ctx, s.Bus.Names.DeadStream(), s.Bus.Names.Dead("eventsink"))
		return err == nil, fmt.Sprint("no dead letter: ", err)
	})

	// What a lead does whose definitions lie in the sink's database, and what both say.
	notices, err := s.Bus.NC.SubscribeSync("hg.v1.svc.agents.changed")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Bus.NC.Flush(); err != nil {
		t.Fatal(err)
	}
	agents := agentstore.NewSink(s.connect("lead-2"), zerolog.Nop())
	def, err := agents.Create(ctx, subagent.Managed{Name: "coder", Description: "d", SystemPrompt: "p"})
	if err == nil {
		_, err = agents.Delete(ctx, "coder", def.Revision)
	}
	if err != nil {
		t.Errorf("sub-agent definitions: %v", err)
	}
	for range 2 {
		if _, err := notices.NextMsgWithContext(ctx); err != nil {
			t.Errorf("no notice of a change: %v", err)
		}
	}

	r := &rights{t: t, srv: s.Server, admin: s.Bus}
	for who, what := range map[string]map[string]string{
		"lead": {
			"a record": "$KV.HG_TASKS.task.t_1", "the leader's key": "$KV.HG_TASKS.leader", "a lease": "$KV.HG_TASKS.lease.t_1", "a grant": "hg.v1.task.grant.default.t_1",
			"the next grant": "$JS.API.CONSUMER.MSG.NEXT.HG_GRANTS.executors", "a purge": "$JS.API.STREAM.PURGE.HG_EVENTS", "the end of a request": "$JS.API.STREAM.MSG.DELETE.HG_WORK",
		},
		"admission": {"a run": "$KV.HG_RUNS.run.r_1", "a request": "hg.v1.task.request.default.t_1", "a blob": "$O.HG_BLOBS.C.x", "the end of a stream": "$JS.API.STREAM.DELETE.HG_WORK"},
		"executor": {
			"the leader's key": "$KV.HG_TASKS.leader", "the limits": "$KV.HG_TASKS.limits", "a cancellation": "$KV.HG_TASKS.cancel.t_1", "a request": "hg.v1.task.request.default.t_1",
			"a grant": "hg.v1.task.grant.default.t_1", "a run": "$KV.HG_RUNS.run.r_1", "the end of a request": "$JS.API.STREAM.MSG.DELETE.HG_WORK",
		},
		"eventsink": {"a sub-agent": "hg.v1.svc.agents.put", "an event": "hg.v1.event.a.th.r.t.task_failed", "a record": "$KV.HG_TASKS.task.t_1", "a request": "hg.v1.task.request.default.t_1", "a consumer": "$JS.API.CONSUMER.CREATE.HG_EVENTS.mine"},
	} {
		r.user(who, "_INBOX").wantRefused(what, nil)
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
