package doctor

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/jsm.go/api"
	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/provision"
)

// rightsGuide is where the permissions of an operator are.
const rightsGuide = "docs/security.md has the rights that an operator needs"

// refusals are the subjects that the server does not let the user of a connection
// publish to or subscribe to. Without looking at them a refusal is just an answer that
// does not come.
type refusals struct {
	mu                 sync.Mutex
	publish, subscribe []string
	heard              context.CancelCauseFunc
}

var violation = regexp.MustCompile(`(?i)permissions violation for (publish|subscription) to "([^"]+)"`)

// passing are subjects with a name in them that is another one each time.
var passing = regexp.MustCompile(`^(_INBOX[^.]*\.|\$JS\.API\.CONSUMER\.(?:CREATE|MSG\.NEXT|DELETE)\.[^.]+\.).*`)

// options make a connection tell what is refused.
func (r *refusals) options() []nats.Option {
	return []nats.Option{nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		found := violation.FindStringSubmatch(err.Error())
		if found == nil {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		list, subject := &r.publish, passing.ReplaceAllString(found[2], "$1>")
		if strings.EqualFold(found[1], "subscription") {
			list = &r.subscribe
		}
		if !slices.Contains(*list, subject) {
			*list = append(*list, subject)
		}
		if r.heard != nil {
			r.heard(err)
		}
	})}
}

// until is ctx, which also ends with the next refusal.
func (r *refusals) until(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = cancel
	return ctx, func() { cancel(nil) }
}

// of tells what is refused, and what to add; empty if nothing is.
func (r *refusals) of() (detail, mend string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list, add []string
	for _, x := range []struct {
		what, to string
		subjects []string
	}{{"publish to", "publish", r.publish}, {"subscribe to", "subscribe", r.subscribe}} {
		if len(x.subjects) > 0 {
			list = append(list, x.what+" "+strings.Join(x.subjects, ", "))
			add = append(add, fmt.Sprintf(`%s { allow: ["%s"] }`, x.to, strings.Join(x.subjects, `", "`)))
		}
	}
	if len(list) == 0 {
		return "", ""
	}
	return "the server does not let this user " + strings.Join(list, ", nor "),
		"add to the user's permissions on the server, or take another user: " + strings.Join(add, ", ") + "; " + rightsGuide
}

func (r *refusals) publishing(subject string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.publish, subject)
}

// rights asks for everything that is asked for later, without waiting for an answer,
// and hears what is refused. That changes nothing: none of it is more than a question.
// It says whether JetStream can be asked.
func (d *doctor) rights(ctx context.Context, cfg bus.Config, a provision.Assets) bool {
	var refused refusals
	closed := make(chan struct{})
	cfg.Extra = slices.Concat(cfg.Extra, refused.options(), []nats.Option{nats.ClosedHandler(func(*nats.Conn) { close(closed) })})
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	conn, err := bus.Connect(ctx, cfg, d.Env.Log)
	if err != nil {
		d.say(Fail, "nats rights", err.Error(), "see that the server takes a second connection of this user")
		return true
	}
	questions := []string{api.JSApiAccountInfo}
	for _, s := range a.Streams {
		questions = append(questions, fmt.Sprintf(api.JSApiStreamInfoT, s.Name))
	}
	for _, c := range a.Consumers {
		questions = append(questions, fmt.Sprintf(api.JSApiConsumerInfoT, c.Stream, c.Config.Durable))
	}
	events := eventapi.Subject(conn.Names)
	for _, q := range questions {
		err = errors.Join(err, conn.NC.Publish(q, nil)) // without a subject for the answer there is none
	}
	err = errors.Join(err, conn.NC.PublishRequest(events, conn.NC.NewInbox(), []byte(`{"limit":1}`)))
	if err == nil {
		err = conn.NC.FlushWithContext(ctx)
	}
	// Refusals come before the answer to the flush, and are told before the end.
	conn.Close()
	select {
	case <-closed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	d.eventsRefused = refused.publishing(events) || len(refused.subscribe) > 0
	detail, mend := refused.of()
	switch {
	case detail != "":
		d.say(Fail, "nats rights", detail, mend)
	case err != nil:
		d.say(Fail, "nats rights", "they could not be found out: "+err.Error(), "look at the server's log")
	default:
		d.say(OK, "nats rights", "this user may ask for all that is looked at", "")
	}
	return len(refused.subscribe) == 0 && !slices.ContainsFunc(questions, refused.publishing)
}
