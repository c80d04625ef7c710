package contract

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
)

type asyncAPI struct {
	AsyncAPI string
	Channels map[string]struct {
		Address    *string
		Parameters map[string]any
		Messages   map[string]ref
		JetStream  map[string]string `yaml:"x-jetstream"`
	}
	Operations map[string]struct {
		Action  string
		Channel ref
		Reply   *struct{ Channel ref }
	}
	Components struct {
		Messages map[string]struct {
			Name        string
			ContentType string `yaml:"contentType"`
			Payload     ref
		}
	}
}

type ref struct {
	To string `yaml:"$ref"`
}

func document(t *testing.T) asyncAPI {
	t.Helper()
	var d asyncAPI
	if err := yaml.Unmarshal(schema.AsyncAPI(), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// addresses are the subjects of the document, by channel.
func (d asyncAPI) addresses() map[string]string {
	out := map[string]string{}
	for id, c := range d.Channels {
		if c.Address != nil {
			out[id] = *c.Address
		}
	}
	return out
}

var (
	shapeComment = regexp.MustCompile(`Shape: (\S.*)`)
	variable     = regexp.MustCompile(`<([a-z_]+)[^>]*>`)
)

// Every shape of a subject or key that pkg/contract documents is a channel, and
// every channel is one of them, or an endpoint.
func TestAsyncAPIHasEverySubject(t *testing.T) {
	t.Parallel()
	src, err := os.ReadFile(filepath.Join(root, "pkg/contract/subjects.go"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"$KV.HG_TASKS.leader", "$KV.HG_TASKS.limits"}
	for _, m := range shapeComment.FindAllStringSubmatch(string(src), -1) {
		shape := strings.TrimSpace(strings.ReplaceAll(m[1], "<prefix>", "hg.v1"))
		shape = variable.ReplaceAllString(shape, "{$1}")
		switch {
		case strings.Contains(shape, "<"):
			t.Fatalf("the shape %q was not understood", m[1])
		case strings.HasPrefix(shape, "thread."), strings.HasPrefix(shape, "workspace."), strings.HasPrefix(shape, "agent."):
			continue // leads and executors keep notes of their own there
		case strings.HasPrefix(shape, "hg.v1.svc."):
			continue // compared with live services
		case !strings.HasPrefix(shape, "hg.v1."):
			bucket := "$KV.HG_TASKS."
			if strings.Contains(shape, "{run_id}") {
				bucket = "$KV.HG_RUNS."
			}
			shape = bucket + shape
		}
		want = append(want, shape)
	}
	got := map[string]string{}
	for id, a := range document(t).addresses() {
		if !strings.HasPrefix(a, "hg.v1.svc.") {
			got[a] = id
		}
	}
	slices.Sort(want)
	if have := slices.Sorted(maps.Keys(got)); !slices.Equal(have, want) {
		t.Errorf("channels\n%s\nsubjects and keys of the code\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

// The addresses are what the parsers of pkg/contract take.
func TestAsyncAPIAddressesParse(t *testing.T) {
	t.Parallel()
	n := contract.MustNames(contract.DefaultPrefix)
	fill := strings.NewReplacer("{tenant}", "acme", "{task_id}", "t_1", "{run_id}", "r_1", "{thread}", "th_1", "{type}", "task_failed", "{pool}", "gpu", "{origin}", "admission")
	d := document(t)
	for id, a := range d.addresses() {
		subject := fill.Replace(a)
		var err error
		switch {
		case strings.Contains(a, ".request."):
			_, _, err = n.ParseTaskRequest(subject)
		case strings.Contains(a, ".grant."):
			_, _, err = n.ParseTaskGrant(subject)
		case strings.Contains(a, ".event."):
			_, err = n.ParseEvent(subject)
		case strings.HasPrefix(a, "$KV."):
			_, _, err = contract.ParseKey(strings.SplitN(subject, ".", 3)[2])
		}
		if err != nil || strings.ContainsAny(subject, "{}") {
			t.Errorf("%s: %s as %s: %v", id, a, subject, err)
		}
		found := map[string]bool{}
		for _, m := range placeholder.FindAllStringSubmatch(a, -1) {
			found[m[1]] = true
		}
		if !slices.Equal(slices.Sorted(maps.Keys(found)), slices.Sorted(maps.Keys(d.Channels[id].Parameters))) {
			t.Errorf("%s: %s has the parameters %v", id, a, slices.Sorted(maps.Keys(d.Channels[id].Parameters)))
		}
	}
}

// Every message is on a channel, every channel in an operation, every payload a
// schema; the events are those of the code.
func TestAsyncAPIHasEveryMessage(t *testing.T) {
	t.Parallel()
	d := document(t)
	if !strings.HasPrefix(d.AsyncAPI, "3.") {
		t.Errorf("version %q; want 3.x", d.AsyncAPI)
	}
	used := map[string]int{}
	for id, c := range d.Channels {
		for name, r := range c.Messages {
			used[name]++
			if r.To != "#/components/messages/"+name || d.Components.Messages[name].Name != name {
				t.Errorf("%s: message %s refers to %q", id, name, r.To)
			}
		}
	}
	for name, m := range d.Components.Messages {
		if used[name] == 0 {
			t.Errorf("message %s is on no channel", name)
		}
		file, ok := strings.CutPrefix(m.Payload.To, "./v1/")
		if name == "dead" {
			continue // any bytes
		}
		if _, err := schema.Get(strings.TrimSuffix(file, ".json")); !ok || err != nil || file != name+".json" {
			t.Errorf("message %s has the payload %q", name, m.Payload.To)
		}
	}
	for _, m := range Messages() {
		if _, ok := d.Components.Messages[m.Name]; !ok && !m.DataOnly && m.Name != "gap" && m.Name != "stored_event" {
			t.Errorf("no message %s", m.Name)
		}
	}
	var events []string
	for name := range d.Channels["event"].Messages {
		events = append(events, strings.TrimPrefix(name, "event."))
		if d.Components.Messages[name].ContentType != "application/cloudevents+json" {
			t.Errorf("%s has the content type %q", name, d.Components.Messages[name].ContentType)
		}
	}
	slices.Sort(events)
	if want := slices.Sorted(slices.Values(words(contract.EventTypes()))); !slices.Equal(events, want) {
		t.Errorf("events %q, want %q", events, want)
	}
	operations := map[string]int{}
	for name, op := range d.Operations {
		operations[op.Channel.To]++
		if _, ok := d.Channels[strings.TrimPrefix(op.Channel.To, "#/channels/")]; !ok || op.Action != "send" && op.Action != "receive" {
			t.Errorf("operation %s: %s on %s", name, op.Action, op.Channel.To)
		}
		if op.Reply != nil {
			operations[op.Reply.Channel.To]++
		}
	}
	for id := range d.Channels {
		if operations["#/channels/"+id] != 1 {
			t.Errorf("channel %s is in %d operations, want 1", id, operations["#/channels/"+id])
		}
	}
}

// The document names streams and buckets that there are.
func TestAsyncAPIAssets(t *testing.T) {
	t.Parallel()
	n := contract.MustNames(contract.DefaultPrefix)
	for id, c := range document(t).Channels {
		if c.Address == nil {
			continue
		}
		var want map[string]string
		for front, asset := range map[string]map[string]string{
			"hg.v1.task.request.": {"stream": n.WorkStream()}, "hg.v1.task.grant.": {"stream": n.GrantStream()}, "hg.v1.event.": {"stream": n.EventStream()},
			"hg.v1.dead.": {"stream": n.DeadStream()}, "$KV.HG_TASKS.": {"bucket": n.TaskBucket()}, "$KV.HG_RUNS.": {"bucket": n.RunBucket()},
		} {
			if strings.HasPrefix(*c.Address, front) {
				want = asset
			}
		}
		if !maps.Equal(c.JetStream, want) {
			t.Errorf("%s is kept in %v, want %v", id, c.JetStream, want)
		}
	}
}
