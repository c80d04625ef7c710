package system

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// Why docs/security.md gives nobody outside a right on JetStream: what it answers, and
// what it delivers, it publishes where the question says, with no right of who asks.
// Where this fails the server has learned to look, and the rules can be made milder.
func TestJetStreamAnswersWhereverItIsTold(t *testing.T) {
	t.Parallel()
	var told server.Options
	if err := told.ProcessConfigString(`authorization { users = [ { user: "services", password: "other" }, { user: "asker", password: "secret", permissions {
		subscribe { allow: ["_INBOX_asker.>"] }
		publish { allow: ["$JS.API.CONSUMER.INFO.HG_EVENTS.acme-reader", "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.acme-reader", "$JS.API.STREAM.INFO.HG_EVENTS", "$JS.API.DIRECT.GET.KV_HG_TASKS.>"] }
	} } ] }`); err != nil {
		t.Fatal(err)
	}
	r := newRights(t, func(o *server.Options) { o.Users, o.NoAuthUser = told.Users, "services" })
	if _, err := r.admin.JS.CreateConsumer(timeout(t), "HG_EVENTS", jetstream.ConsumerConfig{
		Durable: "acme-reader", FilterSubject: "hg.v1.event.acme.>", AckPolicy: jetstream.AckExplicitPolicy,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin.Publish(timeout(t), bus.Write{Subject: "$KV.HG_TASKS.task.t_there", Data: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	u := r.user("asker", "_INBOX_asker")
	for what, q := range map[string]struct{ subject, body string }{
		"info":   {"$JS.API.CONSUMER.INFO.HG_EVENTS.acme-reader", ""},
		"stream": {"$JS.API.STREAM.INFO.HG_EVENTS", ""},
		"get":    {"$JS.API.DIRECT.GET.KV_HG_TASKS.$KV.HG_TASKS.task.t_there", ""},
	} {
		foreign := "$KV.HG_TASKS.task.t_" + what
		if err := u.PublishMsg(&nats.Msg{Subject: q.subject, Reply: foreign, Data: []byte(q.body)}); err != nil {
			t.Fatal(err)
		}
		natstest.Eventually(t, Timeout, func() (bool, string) {
			_, err := r.admin.Last(timeout(t), "KV_HG_TASKS", foreign)
			return err == nil, fmt.Sprintf("%s: the answer is not stored as a record: %v", what, err)
		})
	}

	// A delivered message keeps its subject, in whatever stream it comes to: the queue of
	// requests can be filled with events.
	if err := u.PublishMsg(&nats.Msg{Subject: "$JS.API.CONSUMER.MSG.NEXT.HG_EVENTS.acme-reader", Reply: "hg.v1.task.request.acme.t_1", Data: []byte("1")}); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, Timeout, func() (bool, string) {
		m, err := r.admin.Last(timeout(t), "HG_WORK", ">")
		return err == nil && strings.HasPrefix(m.Subject, "hg.v1.event.acme."), fmt.Sprintf("no event in the queue of requests: %+v, %v", m, err)
	})
	u.nothingRefused()
}
