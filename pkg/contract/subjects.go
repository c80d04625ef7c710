package contract

import (
	"errors"
	"fmt"
	"strings"
)

// NoTask stands on event subjects where an event belongs to no task.
const NoTask = "_"

// DefaultPrefix is the prefix of all subjects unless nats.prefix says
// otherwise. Its last token is the version: another version is a parallel tree.
const DefaultPrefix = "hg.v1"

// ErrSubject is returned when a subject is not one of ours.
var ErrSubject = errors.New("not a subject of this contract")

// Names builds and parses every subject, stream, bucket and key name of one
// deployment. The zero value is not usable; use [NewNames].
type Names struct {
	prefix string // hg.v1
	asset  string // HG
}

// NewNames returns the names under prefix, which must be one to four subject
// tokens joined by dots. Stream and bucket names derive from it: the tokens in
// capitals joined by underscores, where a last token v1 is left out (hg.v1
// gives HG_WORK, acme.prod.v2 gives ACME_PROD_V2_WORK).
func NewNames(prefix string) (Names, error) {
	tokens := strings.Split(prefix, ".")
	if len(tokens) > 4 {
		return Names{}, fmt.Errorf("%w: prefix %q has %d tokens; want at most 4", ErrInvalidID, prefix, len(tokens))
	}
	for _, t := range tokens {
		if err := ValidateToken("prefix token", t); err != nil {
			return Names{}, fmt.Errorf("prefix %q: %w", prefix, err)
		}
	}
	if len(tokens) > 1 && tokens[len(tokens)-1] == "v1" {
		tokens = tokens[:len(tokens)-1]
	}
	return Names{prefix: prefix, asset: strings.ToUpper(strings.Join(tokens, "_"))}, nil
}

// MustNames is [NewNames] for prefixes known when the program is written.
func MustNames(prefix string) Names {
	n, err := NewNames(prefix)
	if err != nil {
		panic(err)
	}
	return n
}

// Prefix returns the subject prefix.
func (n Names) Prefix() string { return n.prefix }

// Streams, buckets and durable consumers.

// WorkStream is the bounded queue of task requests.
func (n Names) WorkStream() string { return n.asset + "_WORK" }

// GrantStream is the work queue of grants for executors.
func (n Names) GrantStream() string { return n.asset + "_GRANTS" }

// EventStream keeps all events.
func (n Names) EventStream() string { return n.asset + "_EVENTS" }

// DeadStream keeps what could not be processed.
func (n Names) DeadStream() string { return n.asset + "_DEAD" }

// AdvisoryStream keeps JetStream advisories about our assets.
func (n Names) AdvisoryStream() string { return n.asset + "_ADVISORIES" }

// TaskBucket holds records, leases, cancellations, the leader key and limits.
func (n Names) TaskBucket() string { return n.asset + "_TASKS" }

// RunBucket holds the runs of leads.
func (n Names) RunBucket() string { return n.asset + "_RUNS" }

// AgentBucket holds the definitions of sub-agents that administrators made.
func (n Names) AgentBucket() string { return n.asset + "_AGENTS" }

// BlobStore holds results that are too large for a record.
func (n Names) BlobStore() string { return n.asset + "_BLOBS" }

// GrantConsumer is the durable consumer that the executors of pool share.
func (n Names) GrantConsumer(pool Pool) string { return "executors-" + string(pool) }

// SinkConsumer is the durable consumer of the event sink.
func (n Names) SinkConsumer() string { return "eventsink" }

// KVStream is the stream behind a bucket.
func KVStream(bucket string) string { return "KV_" + bucket }

// KVSubject is the subject on which the key of a bucket is written.
func KVSubject(bucket, key string) string { return "$KV." + bucket + "." + key }

// Keys of the task bucket. Task ids are single tokens, so that a wildcard
// selects one kind of key.
const (
	// LeaderKey holds the admission leader's lease.
	LeaderKey = "leader"
	// LimitsKey holds the limits that the admission leader enforces.
	LimitsKey = "limits"
)

// TaskKey is the key of a task's record. Shape: task.<task_id>
func TaskKey(id TaskID) string { return "task." + string(id) }

// LeaseKey is the key of a task's heartbeat. Shape: lease.<task_id>
func LeaseKey(id TaskID) string { return "lease." + string(id) }

// CancelKey is the key of a cancellation. Shape: cancel.<task_id>
func CancelKey(id TaskID) string { return "cancel." + string(id) }

// TrialKey is the key of a [Trial]. Shape: trial.<task_id>
func TrialKey(id TaskID) string { return "trial." + string(id) }

// KeyKind says what a key of the task or run bucket holds.
type KeyKind string

// The kinds of keys.
const (
	KeyTask   KeyKind = "task"
	KeyLease  KeyKind = "lease"
	KeyCancel KeyKind = "cancel"
	KeyTrial  KeyKind = "trial"
	KeyLeader KeyKind = "leader"
	KeyLimits KeyKind = "limits"
	KeyRun    KeyKind = "run"
	KeyThread KeyKind = "thread"

	KeyWorkspace KeyKind = "workspace"
)

// ParseKey splits a key of the task or run bucket into its kind and id. The
// leader and limits keys have no id.
func ParseKey(key string) (KeyKind, string, error) {
	switch key {
	case LeaderKey:
		return KeyLeader, "", nil
	case LimitsKey:
		return KeyLimits, "", nil
	}
	kind, id, ok := strings.Cut(key, ".")
	if !ok || ValidateToken("id", id) != nil {
		return "", "", fmt.Errorf("%w: key %q", ErrSubject, key)
	}
	switch k := KeyKind(kind); k {
	case KeyTask, KeyLease, KeyCancel, KeyTrial, KeyRun, KeyThread, KeyWorkspace:
		return k, id, nil
	}
	return "", "", fmt.Errorf("%w: key %q", ErrSubject, key)
}

// AgentKey is the key of a managed definition in the agent bucket. Shape: agent.<name>
func AgentKey(name string) string { return "agent." + name }

// Keys of the run bucket.

// RunKey is the key of a run's record. Shape: run.<run_id>
func RunKey(id RunID) string { return "run." + string(id) }

// RunLeaseKey is the key of the heartbeat of the lead that drives a run. Shape: lease.<run_id>
func RunLeaseKey(id RunID) string { return "lease." + string(id) }

// RunCancelKey is the key of a run's cancellation. Shape: cancel.<run_id>
func RunCancelKey(id RunID) string { return "cancel." + string(id) }

// ThreadKey is the key that points from a thread to its last finished run. Tenants
// must not share threads, so the token covers both. Shape: thread.<token>
func ThreadKey(tenant Tenant, id ThreadID) string {
	return "thread." + digest(string(tenant)+"\x00"+string(id))
}

// WorkspaceKey is the key that names the newest snapshot of a thread's workspace.
// Its token is that of the thread's key. Shape: workspace.<token>
func WorkspaceKey(tenant Tenant, id ThreadID) string {
	return "workspace." + digest(string(tenant)+"\x00"+string(id))
}

// Requests.

// TaskRequest is the subject of a request. Shape: <prefix>.task.request.<tenant>.<task_id>
func (n Names) TaskRequest(tenant Tenant, id TaskID) string {
	return n.prefix + ".task.request." + string(tenant) + "." + string(id)
}

// TaskRequests matches all requests.
func (n Names) TaskRequests() string { return n.prefix + ".task.request.*.*" }

// ParseTaskRequest is the inverse of [Names.TaskRequest].
func (n Names) ParseTaskRequest(subject string) (Tenant, TaskID, error) {
	t, err := n.split(subject, "task.request.", 2)
	if err != nil {
		return "", "", err
	}
	return Tenant(t[0]), TaskID(t[1]), errors.Join(Tenant(t[0]).Validate(), TaskID(t[1]).Validate())
}

// Grants.

// TaskGrant is the subject of a grant. Shape: <prefix>.task.grant.<pool>.<task_id>
func (n Names) TaskGrant(pool Pool, id TaskID) string {
	return n.prefix + ".task.grant." + string(pool) + "." + string(id)
}

// TaskGrants matches all grants, or those of one pool.
func (n Names) TaskGrants(pool Pool) string {
	if pool == "" {
		pool = "*"
	}
	return n.prefix + ".task.grant." + string(pool) + ".*"
}

// ParseTaskGrant is the inverse of [Names.TaskGrant].
func (n Names) ParseTaskGrant(subject string) (Pool, TaskID, error) {
	t, err := n.split(subject, "task.grant.", 2)
	if err != nil {
		return "", "", err
	}
	return Pool(t[0]), TaskID(t[1]), errors.Join(Pool(t[0]).Validate(), TaskID(t[1]).Validate())
}

// Events.

// EventSubject is what an event's subject tells without opening the event.
type EventSubject struct {
	Tenant Tenant
	// Thread is the thread's token (see [ThreadID.Token]), not its id.
	Thread string
	Run    RunID
	// Task is empty for events that belong to no task.
	Task TaskID
	Type EventType
}

// Event is the subject of an event.
// Shape: <prefix>.event.<tenant>.<thread>.<run_id>.<task_id or _>.<type>
func (n Names) Event(e EventSubject) string {
	task := string(e.Task)
	if task == "" {
		task = NoTask
	}
	return strings.Join([]string{n.prefix, "event", string(e.Tenant), e.Thread, string(e.Run), task, string(e.Type)}, ".")
}

// Events matches events; empty fields match anything.
func (n Names) Events(e EventSubject) string {
	any := func(s string) string {
		if s == "" {
			return "*"
		}
		return s
	}
	return strings.Join([]string{n.prefix, "event", any(string(e.Tenant)), any(e.Thread), any(string(e.Run)), any(string(e.Task)), any(string(e.Type))}, ".")
}

// AllEvents matches every event.
func (n Names) AllEvents() string { return n.prefix + ".event.>" }

// TaskEvents matches every event of one task. The writers of a task's events
// use it as the scope in which they expect the sequence of the last event.
func (n Names) TaskEvents(tenant Tenant, thread ThreadID, run RunID, task TaskID) string {
	return strings.Join([]string{n.prefix, "event", string(tenant), thread.Token(), string(run), string(task), ">"}, ".")
}

// ParseEvent is the inverse of [Names.Event].
func (n Names) ParseEvent(subject string) (EventSubject, error) {
	t, err := n.split(subject, "event.", 5)
	if err != nil {
		return EventSubject{}, err
	}
	e := EventSubject{Tenant: Tenant(t[0]), Thread: t[1], Run: RunID(t[2]), Task: TaskID(t[3]), Type: EventType(t[4])}
	errs := []error{e.Tenant.Validate(), validateID("thread token", e.Thread), e.Run.Validate(), ValidateToken("event type", t[4])}
	if t[3] == NoTask {
		e.Task = ""
	} else {
		errs = append(errs, e.Task.Validate()) // an empty token is refused here
	}
	return e, errors.Join(errs...)
}

// Dead letters.

// Dead is the subject for what origin could not process. Shape: <prefix>.dead.<origin>
func (n Names) Dead(origin string) string { return n.prefix + ".dead." + origin }

// AllDead matches all dead letters.
func (n Names) AllDead() string { return n.prefix + ".dead.>" }

// Services.

// Service is the subject of a request-reply endpoint. Shape: <prefix>.svc.<service>.<endpoint>
func (n Names) Service(service, endpoint string) string {
	return n.prefix + ".svc." + service + "." + endpoint
}

// split checks the fixed front of subject and returns its count variable tokens.
func (n Names) split(subject, kind string, count int) ([]string, error) {
	rest, ok := strings.CutPrefix(subject, n.prefix+"."+kind)
	if !ok {
		return nil, fmt.Errorf("%w: %q does not begin with %q", ErrSubject, subject, n.prefix+"."+kind)
	}
	t := strings.Split(rest, ".")
	if len(t) != count {
		return nil, fmt.Errorf("%w: %q has %d tokens after %q; want %d", ErrSubject, subject, len(t), kind, count)
	}
	return t, nil
}
