package contract

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/endpoint"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// channel is a subject on which messages travel.
type channel struct {
	id, address, description string
	messages                 []string
	// asset is the stream or bucket that keeps the messages; empty for services.
	asset string
	// taken: Herdgate reads what others write.
	taken bool
	// replies are the answers, for services.
	replies []string
}

// param are the variable parts of subjects.
var params = map[string]string{
	"tenant":  "Tenant that the work belongs to; default without authentication.",
	"task_id": "Task; in events _ stands for no task.",
	"run_id":  "Run.",
	"thread":  "Token of the thread: its id if that is a token, otherwise h_ and a digest of it.",
	"type":    "Type of the event, as in the event itself.",
	"pool":    "Group of executors that share grants.",
	"origin":  "Service that could not use the message.",
}

// channels lists all subjects, made by the functions that the services use.
func channels() []channel {
	const task, run = contract.TaskID("{task_id}"), contract.RunID("{run_id}")
	n := contract.MustNames(contract.DefaultPrefix)
	tasks := func(key string) string { return contract.KVSubject(n.TaskBucket(), key) }
	runs := func(key string) string { return contract.KVSubject(n.RunBucket(), key) }
	var events []string
	for _, t := range contract.EventTypes() {
		events = append(events, "event."+string(t))
	}
	service := func(id, subject, description string, refusals ...string) channel {
		name := strings.TrimPrefix(subject, n.Prefix()+".svc.") // as its schemas are called
		return channel{
			id: id, address: subject, description: description, messages: []string{name + ".request"},
			replies: append([]string{name + ".response"}, refusals...), taken: true,
		}
	}
	list := []channel{
		{
			id: "taskRequest", address: n.TaskRequest("{tenant}", task), asset: n.WorkStream(), messages: []string{"task_request"}, taken: true,
			description: "The bounded queue of requests, let through in stream order. The acknowledgement of the publish is the acceptance.",
		},
		{
			id: "taskGrant", address: n.TaskGrant("{pool}", task), asset: n.GrantStream(), messages: []string{"grant"},
			description: "Rights to run one attempt. Between the gate and executors; not for others.",
		},
		{
			id: "event", asset: n.EventStream(), messages: events,
			address:     n.Event(contract.EventSubject{Tenant: "{tenant}", Thread: "{thread}", Run: run, Task: task, Type: "{type}"}),
			description: "Everything that happens, for any subscriber. In order within a task; more than once is possible.",
		},
		{id: "dead", address: n.Dead("{origin}"), asset: n.DeadStream(), messages: []string{"dead"}, description: "What could not be processed, as it came, with the reason in its headers."},
		{id: "taskRecord", address: tasks(contract.TaskKey(task)), asset: n.TaskBucket(), messages: []string{"task_record"}, description: "State of a task and fence in one. Only Herdgate writes it."},
		{id: "taskLease", address: tasks(contract.LeaseKey(task)), asset: n.TaskBucket(), messages: []string{"lease"}, description: "Heartbeat of an attempt; expires by itself."},
		{id: "taskCancelled", address: tasks(contract.CancelKey(task)), asset: n.TaskBucket(), messages: []string{"cancel"}, description: "Wish to end a task."},
		{id: "taskTrial", address: tasks(contract.TrialKey(task)), asset: n.TaskBucket(), messages: []string{"trial"}, description: "How often a grant was opened and its executor died before the claim."},
		{id: "leader", address: tasks(contract.LeaderKey), asset: n.TaskBucket(), messages: []string{"leader"}, description: "Who leads the gate; expires by itself."},
		{id: "limits", address: tasks(contract.LimitsKey), asset: n.TaskBucket(), messages: []string{"limits"}, description: "What the gate enforces."},
		{id: "runRecord", address: runs(contract.RunKey(run)), asset: n.RunBucket(), messages: []string{"run_record"}, description: "State of a run. Only leads write it."},
		{id: "runLease", address: runs(contract.RunLeaseKey(run)), asset: n.RunBucket(), messages: []string{"lease"}, description: "Heartbeat of the lead that drives a run; expires by itself."},
		{id: "runCancelled", address: runs(contract.RunCancelKey(run)), asset: n.RunBucket(), messages: []string{"cancel"}, description: "Wish to end a run."},
		service("taskSubmit", n.Service("task", "submit"), "Accepts a task, durably.", "problem"),
		service("taskGet", n.Service("task", "get"), "Shows a task.", "problem"),
		service("taskCancel", n.Service("task", "cancel"), "Asks for the end of a task, durably.", "problem"),
		service("eventsList", eventapi.Subject(n), "Lists stored events. A refusal has the field error."),
		service("admissionStatus", admissionapi.Subject(n), "State of the gate; with task_id the place of a waiting task. Only the leader answers."),
		service("agentsList", agentapi.ListSubject(n), "Lists managed sub-agent definitions that a database keeps. Between leads and the event sink; not for others. A refusal has the field error."),
		service("agentsPut", agentapi.PutSubject(n), "Stores such a definition, durably. Between leads and the event sink."),
		service("agentsDelete", agentapi.DeleteSubject(n), "Removes such a definition. Between leads and the event sink."),
	}
	for _, c := range list {
		if c.replies != nil && c.id != "admissionStatus" && !strings.HasPrefix(c.id, "agents") {
			c.id, c.address = c.id+"Bound", endpoint.Bound(c.address, "{tenant}")
			c.description = "The same for one tenant alone, so that permissions can bind a caller to it."
			list = append(list, c)
		}
	}
	return list
}

// AsyncAPI makes the AsyncAPI document.
func AsyncAPI() ([]byte, error) {
	chans, ops, messages := object{}, object{}, object{}
	for _, c := range channels() {
		chans.set(c.id, c.object())
		op := object{{"action", "send"}, {"channel", refTo("#/channels/" + c.id)}}
		if c.taken {
			op.replace("action", "receive")
		}
		op.set("summary", c.description)
		name := op.get("action").(string) + strings.ToUpper(c.id[:1]) + c.id[1:]
		if c.replies != nil {
			chans.set(c.id+"Reply", object{{"address", nil}, {"description", "The inbox of whoever asked."}, {"messages", messageRefs(c.replies)}})
			op.set("reply", object{{"channel", refTo("#/channels/" + c.id + "Reply")}})
			name = "answer" + strings.ToUpper(c.id[:1]) + c.id[1:]
		}
		ops.set(name, op)
	}
	for _, m := range Messages() {
		if m.DataOnly || m.Name == "gap" || m.Name == "stored_event" {
			continue // not messages of their own
		}
		v := object{{"name", m.Name}, {"title", m.Title}, {"contentType", "application/json"}}
		switch {
		case m.Event != "":
			v.replace("contentType", envelope.ContentType)
			v.set("headers", refTo("#/components/schemas/eventHeaders"))
		case m.Name == "task_request":
			v.set("headers", refTo("#/components/schemas/requestHeaders"))
		}
		v.set("payload", refTo("./v1/"+m.Name+".json"))
		messages.set(m.Name, v)
	}
	messages.set("dead", object{
		{"name", "dead"}, {"title", "Dead letter"}, {"contentType", "application/octet-stream"},
		{"headers", refTo("#/components/schemas/deadHeaders")}, {"summary", "Any bytes: the message as it came."},
	})
	header := func(description string) object { return object{{"type", "string"}, {"description", description}} }
	trace := []member{
		{envelope.HeaderTraceParent, header("W3C trace context.")}, {envelope.HeaderTraceState, header("W3C trace context.")},
	}
	doc := object{
		{"asyncapi", "3.0.0"},
		{"info", object{
			{"title", "Herdgate"}, {"version", contract.Version + ".0.0"},
			{"description", "What travels over NATS, with the default prefix " + contract.DefaultPrefix + ". Promises about order and delivery stand in PROTOCOL.md."},
			{"license", object{{"name", "Apache-2.0"}}},
		}},
		{"defaultContentType", "application/json"},
		{"servers", object{{"nats", object{{"host", "127.0.0.1:4222"}, {"protocol", "nats"}, {"description", "Any NATS server or cluster with JetStream."}}}}},
		{"channels", chans},
		{"operations", ops},
		{"components", object{
			{"messages", messages},
			{"schemas", object{
				{"eventHeaders", object{{"type", "object"}, {"properties", append(object{
					{envelope.HeaderContentType, object{{"const", envelope.ContentType}}}, {envelope.HeaderMsgID, header("The event's id.")},
				}, trace...)}, {"required", []string{envelope.HeaderContentType, envelope.HeaderMsgID}}}},
				{"requestHeaders", object{{"type", "object"}, {"properties", append(object{
					{envelope.HeaderContentType, object{{"const", "application/json"}}}, {envelope.HeaderMsgID, header("The task's id: a repeat is stored once.")},
				}, trace...)}}},
				{"deadHeaders", object{{"type", "object"}, {"properties", object{
					{bus.HeaderReason, header("What was wrong, for people.")}, {bus.HeaderOriginSubject, header("Where it came from.")},
					{bus.HeaderOriginStream, header("The stream it came from.")}, {bus.HeaderOriginSeq, header("Its sequence there.")},
					{bus.HeaderOmitted, header("Size in bytes of a body that was too large to be kept.")},
					{bus.HeaderDeliveries, header("How often it had been delivered.")},
				}}, {"required", []string{bus.HeaderReason, bus.HeaderOriginSubject, bus.HeaderOriginStream, bus.HeaderOriginSeq}}}},
			}},
		}},
	}
	node, err := yamlNode(doc)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("# Made by go generate ./test/contract; a test compares it with the code.\n")
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	err = e.Encode(node)
	return b.Bytes(), err
}

var placeholder = regexp.MustCompile(`\{([a-z_]+)\}`)

func (c channel) object() object {
	o := object{{"address", c.address}, {"description", c.description}}
	if found := placeholder.FindAllStringSubmatch(c.address, -1); found != nil {
		p := object{}
		for _, m := range found {
			v := object{{"description", params[m[1]]}}
			if m[1] == "type" {
				v.set("enum", words(contract.EventTypes()))
			}
			p.set(m[1], v)
		}
		o.set("parameters", p)
	}
	o.set("messages", messageRefs(c.messages))
	if c.asset != "" {
		kind := "stream"
		if strings.HasPrefix(c.address, "$KV.") {
			kind = "bucket"
		}
		o.set("x-jetstream", object{{kind, c.asset}})
	}
	return o
}

func messageRefs(names []string) object {
	o := object{}
	for _, n := range names {
		o.set(n, refTo("#/components/messages/"+n))
	}
	return o
}

func refTo(target string) object { return object{{"$ref", target}} }

// yamlNode keeps the order of objects.
func yamlNode(v any) (*yaml.Node, error) {
	switch v := v.(type) {
	case object:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, m := range v {
			value, err := yamlNode(m.value)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.key, err)
			}
			var key yaml.Node
			if err := key.Encode(m.key); err != nil {
				return nil, err
			}
			n.Content = append(n.Content, &key, value)
		}
		return n, nil
	default:
		n := &yaml.Node{}
		return n, n.Encode(v)
	}
}
