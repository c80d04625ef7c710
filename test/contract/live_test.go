package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/test/system"
)

// I11, I6: everything that running services publish, on whatever subject, is on a
// channel of the AsyncAPI document and good for its schema; so is each answer of
// each endpoint, and there are no other endpoints.
func TestRunningServicesKeepTheContract(t *testing.T) {
	t.Parallel()
	s := system.New(t, system.Options{})
	nc := s.Server.Conn("spy").NC
	d, compiled := document(t), compile(t, published(t))

	seen := map[string]int{} // by channel, or event type
	channelOf := d.finder()
	check := func(m *nats.Msg) {
		if len(m.Data) == 0 && strings.HasPrefix(m.Subject, "$KV.") {
			return // the end of a key
		}
		id := channelOf(m.Subject)
		if id == "" {
			if !strings.HasPrefix(m.Subject, "$KV.HG_RUNS.thread.") {
				t.Errorf("no channel for the subject %s", m.Subject)
			}
			return
		}
		c := d.Channels[id]
		name := ""
		for name = range c.Messages {
			if id != "event" || strings.HasSuffix(m.Subject, "."+strings.TrimPrefix(name, "event.")) {
				break
			}
		}
		if id == "event" {
			if m.Header.Get("Content-Type") != "application/cloudevents+json" || m.Header.Get("Nats-Msg-Id") == "" {
				t.Errorf("%s has the headers %v", m.Subject, m.Header)
			}
			seen[name]++
		}
		seen[id]++
		if s := compiled[name]; s == nil {
			t.Errorf("%s: a message %s", m.Subject, name)
		} else if err := validate(s, m.Data); err != nil {
			t.Errorf("%s: %v\n%.2000s", m.Subject, err, m.Data)
		}
	}
	published := make(chan *nats.Msg, 10000) // more than there will be
	for _, subject := range []string{"hg.v1.task.>", "hg.v1.event.>", "hg.v1.dead.>", "$KV.HG_TASKS.>", "$KV.HG_RUNS.>"} {
		sub, err := nc.ChanSubscribe(subject, published)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sub.Unsubscribe() })
	}
	if err := nc.FlushTimeout(system.Timeout); err != nil {
		t.Fatal(err)
	}

	lead := s.Whole()
	ctx, cancel := context.WithTimeout(context.Background(), system.Timeout)
	defer cancel()
	if run, err := lead.RunToEnd(ctx, wire.RunRequest{Input: "say hello"}); err != nil || run.Status != contract.RunCompleted {
		t.Fatalf("run %+v, %v", run, err)
	}
	ask := func(endpoint string, request any, want string) map[string]any {
		t.Helper()
		var reply *nats.Msg
		natstest.Eventually(t, system.Timeout, func() (bool, string) { // the gate's leader may be on its way
			msg, err := nc.Request("hg.v1.svc."+endpoint, encoded(request), 5*time.Second)
			reply = msg
			return err == nil, fmt.Sprintf("%s: %v", endpoint, err)
		})
		if err := validate(compiled[want], reply.Data); err != nil {
			t.Errorf("%s answered with no %s: %v\n%.2000s", endpoint, want, err, reply.Data)
		}
		var out map[string]any
		if err := json.Unmarshal(reply.Data, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	id := ask("task.submit", map[string]any{"subagent_type": "general-purpose", "prompt": "say hello"}, "task.submit.response")["task_id"]
	call := map[string]any{"task_id": id}
	natstest.Eventually(t, system.Timeout, func() (bool, string) {
		status := fmt.Sprint(ask("task.get", call, "task.get.response")["status"])
		return status == string(contract.TaskCompleted), "the task is " + status
	})
	if code := ask("task.cancel", call, "problem")["code"]; code != wire.CodeAlreadyFinished {
		t.Errorf("a task that has ended was cancelled: %v", code)
	}
	for _, f := range []string{"subagent_type", "prompt"} { // what the schema asks for, the endpoint does
		bad := map[string]any{"subagent_type": "general-purpose", "prompt": "say hello"}
		delete(bad, f)
		if code := ask("task.submit", bad, "problem")["code"]; code != wire.CodeInvalidRequest || compiled["task.submit.request"].Validate(bad) == nil {
			t.Errorf("task.submit without %s: %v", f, code)
		}
	}
	if code := ask("task.get", map[string]any{}, "problem")["code"]; code == nil {
		t.Error("task.get without a task id was answered")
	}
	ask("admission.status", map[string]any{}, "admission.status.response")
	ask("events.list", map[string]any{"limit": 5000}, "events.list.response")
	natstest.Eventually(t, system.Timeout, func() (bool, string) {
		page := ask("events.list", map[string]any{"task_id": id}, "events.list.response")
		list, _ := page["events"].([]any)
		for _, e := range list {
			if err := compiled["stored_event"].Validate(e); err != nil {
				t.Errorf("stored: %v", err)
			}
		}
		return len(list) == 5, fmt.Sprintf("%d events of the task are stored; want 5", len(list))
	})

	// The endpoints that announce themselves are those of the document.
	var got []string
	for _, name := range []string{"herdgate-lead", "herdgate-admission", "herdgate-eventsink"} {
		msg, err := nc.Request("$SRV.INFO."+name, nil, system.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		var info struct {
			Endpoints []struct{ Subject string } `json:"endpoints"`
		}
		if err := json.Unmarshal(msg.Data, &info); err != nil {
			t.Fatal(err)
		}
		for _, e := range info.Endpoints {
			got = append(got, e.Subject)
		}
	}
	var want []string
	for _, a := range d.addresses() {
		if strings.HasPrefix(a, "hg.v1.svc.") {
			want = append(want, placeholder.ReplaceAllString(a, "*"))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("endpoints %q, channels %q", got, want)
	}

	wanted := []string{
		"taskRequest", "taskGrant", "event", "taskRecord", "taskLease", "leader", "limits", "runRecord", "runLease",
		"event.task_queued", "event.task_admitted", "event.task_started", "event.task_running", "event.task_completed",
		"event.run_started", "event.run_message", "event.run_completed",
	}
	missing := func() bool { return slices.ContainsFunc(wanted, func(id string) bool { return seen[id] == 0 }) }
	for limit := time.After(system.Timeout); missing() || len(published) > 0; {
		select {
		case m := <-published:
			check(m)
		case <-limit:
			t.Fatalf("of %q only %q were published", wanted, slices.Sorted(maps.Keys(seen)))
		}
	}
}

var oneToken = regexp.MustCompile(`\\\{[a-z_]+\\\}`)

// finder returns a function that finds the channel of a subject, or "".
func (d asyncAPI) finder() func(string) string {
	patterns := map[string]*regexp.Regexp{}
	for id, a := range d.addresses() {
		patterns[id] = regexp.MustCompile("^" + oneToken.ReplaceAllString(regexp.QuoteMeta(a), `[A-Za-z0-9_-]{1,64}`) + "$")
	}
	return func(subject string) string {
		for id, p := range patterns {
			if p.MatchString(subject) {
				return id
			}
		}
		return ""
	}
}
