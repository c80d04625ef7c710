package contract

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestNewNames(t *testing.T) {
	t.Parallel()
	for prefix, work := range map[string]string{
		"hg.v1": "HG_WORK", "acme.prod.v2": "ACME_PROD_V2_WORK", "x": "X_WORK", "v1": "V1_WORK", "a.b.c.v1": "A_B_C_WORK",
	} {
		n, err := NewNames(prefix)
		if err != nil || n.WorkStream() != work || n.Prefix() != prefix {
			t.Errorf("NewNames(%q): %q, %v, want %q", prefix, n.WorkStream(), err, work)
		}
	}
	for _, prefix := range []string{"", "a..b", "a.b.c.d.e", "hg.*", "hg.>", "hg v1", "hg.v1.", strings.Repeat("x", 65), "$KV"} {
		if _, err := NewNames(prefix); !errors.Is(err, ErrInvalidID) {
			t.Errorf("NewNames(%q): %v, want ErrInvalidID", prefix, err)
		}
	}
}

// The names that other programs hold on to.
func TestFixedNames(t *testing.T) {
	t.Parallel()
	n := MustNames(DefaultPrefix)
	for got, want := range map[string]string{
		n.WorkStream(): "HG_WORK", n.GrantStream(): "HG_GRANTS", n.EventStream(): "HG_EVENTS", n.DeadStream(): "HG_DEAD",
		n.AdvisoryStream(): "HG_ADVISORIES", n.TaskBucket(): "HG_TASKS", n.RunBucket(): "HG_RUNS", n.AgentBucket(): "HG_AGENTS", n.BlobStore(): "HG_BLOBS",
		n.GrantConsumer(DefaultPool): "executors-default", n.SinkConsumer(): "eventsink",
		n.TaskRequest("default", "t1"): "hg.v1.task.request.default.t1", n.TaskRequests(): "hg.v1.task.request.*.*",
		n.TaskGrant("default", "t1"): "hg.v1.task.grant.default.t1", n.TaskGrants("gpu"): "hg.v1.task.grant.gpu.*", n.TaskGrants(""): "hg.v1.task.grant.*.*",
		n.Event(EventSubject{"default", "th", "r1", "t1", EventTaskStarted}): "hg.v1.event.default.th.r1.t1.task_started",
		n.Event(EventSubject{"default", "th", "r1", "", EventRunStarted}):    "hg.v1.event.default.th.r1._.run_started",
		n.Events(EventSubject{Run: "r1"}):                                    "hg.v1.event.*.*.r1.*.*",
		n.TaskEvents("default", "th", "r1", "t1"):                            "hg.v1.event.default.th.r1.t1.>",
		n.AllEvents():       "hg.v1.event.>",
		n.Dead("eventsink"): "hg.v1.dead.eventsink", n.AllDead(): "hg.v1.dead.>",
		n.Service("events", "list"): "hg.v1.svc.events.list",
		TaskKey("t1"):               "task.t1", LeaseKey("t1"): "lease.t1", CancelKey("t1"): "cancel.t1", TrialKey("t1"): "trial.t1", RunKey("r1"): "run.r1",
		KVSubject("HG_TASKS", "task.t1"): "$KV.HG_TASKS.task.t1", KVStream("HG_TASKS"): "KV_HG_TASKS",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Every subject and key that is built is parsed back into what it was built from.
func TestSubjectsBothWays(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"hg.v1", "a.b.c.d", "x"} {
		n := MustNames(prefix)
		tenant, id, err := n.ParseTaskRequest(n.TaskRequest("acme", "t_1"))
		if err != nil || tenant != "acme" || id != "t_1" {
			t.Errorf("request: %q %q %v", tenant, id, err)
		}
		pool, id, err := n.ParseTaskGrant(n.TaskGrant("gpu", "t-1"))
		if err != nil || pool != "gpu" || id != "t-1" {
			t.Errorf("grant: %q %q %v", pool, id, err)
		}
		for _, typ := range EventTypes() {
			e := EventSubject{Tenant: "acme", Thread: ThreadID("any thing/界").Token(), Run: "r1", Type: typ}
			if strings.HasPrefix(string(typ), "task_") {
				e.Task = "t1"
			}
			if back, err := n.ParseEvent(n.Event(e)); err != nil || back != e {
				t.Errorf("event: %+v, %v, want %+v", back, err, e)
			}
		}
	}
	for key, want := range map[string]KeyKind{TaskKey("t1"): KeyTask, LeaseKey("t1"): KeyLease, CancelKey("t1"): KeyCancel, TrialKey("t1"): KeyTrial, RunKey("t1"): KeyRun} {
		if kind, id, err := ParseKey(key); err != nil || kind != want || id != "t1" {
			t.Errorf("key %q: %q %q %v", key, kind, id, err)
		}
	}
	for key, want := range map[string]KeyKind{LeaderKey: KeyLeader, LimitsKey: KeyLimits} {
		if kind, id, err := ParseKey(key); err != nil || kind != want || id != "" {
			t.Errorf("key %q: %q %q %v", key, kind, id, err)
		}
	}
	if kind, id, err := ParseKey(WorkspaceKey("acme", "x y")); err != nil || kind != KeyWorkspace || ThreadKey("acme", "x y") != "thread."+id {
		t.Errorf("workspace key: %s, %s, %v", kind, id, err)
	}
	if kind, id, err := ParseKey(ThreadKey("acme", "x y")); err != nil || kind != KeyThread || len(id) != 26 {
		t.Errorf("thread key: %q %q %v", kind, id, err)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	n := MustNames(DefaultPrefix)
	for _, s := range []string{"", "hg.v1.task.request.a", "hg.v1.task.request.a.b.c", "hg.v2.task.request.a.b", "hg.v1.task.request.*.b", "hg.v1.task.request.a._", "hg.v1.task.request..b", "xhg.v1.task.request.a.b"} {
		if _, _, err := n.ParseTaskRequest(s); err == nil {
			t.Errorf("ParseTaskRequest(%q) was accepted", s)
		}
	}
	for _, s := range []string{"hg.v1.task.grant.a", "hg.v1.task.grant.a.>", "hg.v1.task.request.a.b"} {
		if _, _, err := n.ParseTaskGrant(s); err == nil {
			t.Errorf("ParseTaskGrant(%q) was accepted", s)
		}
	}
	for _, s := range []string{"hg.v1.event.a.b.c.d", "hg.v1.event.a._.c.d.e", "hg.v1.event.a.b.c.d.", "hg.v1.event.a.b.c..e", "hg.v1.event._.b.c.d.e", "hg.v1.event.a.b.c.d.e.f"} {
		if _, err := n.ParseEvent(s); err == nil {
			t.Errorf("ParseEvent(%q) was accepted", s)
		}
	}
	for _, s := range []string{"", "task", "task.", "task.a.b", "odd.a", "leader.x", "task.*"} {
		if _, _, err := ParseKey(s); err == nil {
			t.Errorf("ParseKey(%q) was accepted", s)
		}
	}
}

func FuzzParseEvent(f *testing.F) {
	n := MustNames(DefaultPrefix)
	f.Add("hg.v1.event.default.th.r1._.run_started")
	f.Add("hg.v1.event.default.h_abc.r1.t1.task_completed")
	f.Add("hg.v1.event.*.>")
	f.Fuzz(func(t *testing.T, s string) {
		e, err := n.ParseEvent(s)
		if err != nil {
			return
		}
		if back := n.Event(e); back != s {
			t.Fatalf("%q parses to %+v, which builds %q", s, e, back)
		}
	})
}

func FuzzParseKey(f *testing.F) {
	f.Add("task.t1")
	f.Add("leader")
	f.Fuzz(func(t *testing.T, s string) {
		kind, id, err := ParseKey(s)
		if err == nil && id != "" && string(kind)+"."+id != s {
			t.Fatalf("%q parses to %q %q", s, kind, id)
		}
	})
}

func TestIDs(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"a", "A-b_9", strings.Repeat("x", 64), "__", "-"} {
		if err := TaskID(ok).Validate(); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "_", "a.b", "a b", "a*", ">", "ä", "a\n", strings.Repeat("x", 65), "a\x00"} {
		for what, err := range map[string]error{"task": TaskID(bad).Validate(), "run": RunID(bad).Validate(), "tenant": Tenant(bad).Validate()} {
			if !errors.Is(err, ErrInvalidID) {
				t.Errorf("%s id %q: %v, want ErrInvalidID", what, bad, err)
			}
		}
	}
	if err := Pool("a.b").Validate(); !errors.Is(err, ErrInvalidID) {
		t.Errorf("pool: %v", err)
	}
	for _, ok := range []string{"a", "any thing / 界 * > .", strings.Repeat("x", MaxThreadID)} {
		if err := ThreadID(ok).Validate(); err != nil {
			t.Errorf("thread %.20q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "a\r\nb", "\x00", "\xff", strings.Repeat("x", MaxThreadID+1)} {
		if err := ThreadID(bad).Validate(); !errors.Is(err, ErrInvalidID) {
			t.Errorf("thread %.20q: %v, want ErrInvalidID", bad, err)
		}
	}
}

// EXEC-02, STEP-09: the id of a delegation is made here, from the place of its
// call, and never from what a provider sent.
func TestNewTaskID(t *testing.T) {
	t.Parallel()
	seen := map[TaskID]bool{}
	for _, run := range []RunID{"r1", "r1/1", "r2"} {
		for m := range 12 {
			for p := range 12 {
				id := NewTaskID(run, m, p)
				if id.Validate() != nil || seen[id] {
					t.Fatalf("NewTaskID(%q, %d, %d) = %q is unfit or used twice", run, m, p, id)
				}
				seen[id] = true
				if again := NewTaskID(run, m, p); again != id {
					t.Fatalf("the same call got %q and %q", id, again)
				}
			}
		}
	}
	if got, want := NewTaskID("r1", 0, 1), TaskID("t_"+digest("r1/0/1")); got != want || len(got) != 28 {
		t.Errorf("NewTaskID = %q, want %q", got, want)
	}
}

func TestThreadToken(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"plain", "a-b_9"} {
		if got := ThreadID(id).Token(); got != id {
			t.Errorf("Token(%q) = %q, want itself", id, got)
		}
	}
	tricky := []string{"_", "h_x", "a.b", "a b", "A B", "界", strings.Repeat("x", 65), "h_" + digest("a.b")}
	seen := map[string]string{}
	for _, id := range tricky {
		token := ThreadID(id).Token()
		if !strings.HasPrefix(token, hashedPrefix) || ValidateToken("token", token) != nil {
			t.Errorf("Token(%q) = %q, want a digest", id, token)
		}
		if other, dup := seen[token]; dup {
			t.Errorf("%q and %q share the token %q", id, other, token)
		}
		seen[token] = id
	}
	if ThreadKey("a", "b") == ThreadKey("a", "c") || ThreadKey("a", "b") == ThreadKey("c", "b") {
		t.Error("thread keys of different threads are the same")
	}
}

func FuzzThreadToken(f *testing.F) {
	for _, s := range []string{"plain", "_", "h_abc", "a.b", "", "界", "\xff"} {
		f.Add(s, "other")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := ThreadID(a).Token(), ThreadID(b).Token()
		if err := validateID("token", x); err != nil {
			t.Fatalf("Token(%q): %v", a, err)
		}
		if a != b && x == y {
			t.Fatalf("%q and %q share the token %q", a, b, x)
		}
	})
}

func TestEventTypesAreTokens(t *testing.T) {
	t.Parallel()
	for _, typ := range EventTypes() {
		if err := ValidateToken("type", string(typ)); err != nil {
			t.Error(err)
		}
	}
	if n := len(EventTypes()); n != 13 || len(slices.Compact(slices.Sorted(slices.Values(EventTypes())))) != n {
		t.Errorf("%d event types, or one twice", n)
	}
}
