package contract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func request() TaskRequest {
	return TaskRequest{
		ContractVersion: Version, TaskID: "t1", RunID: "r1", ThreadID: "th", Tenant: "default",
		Subagent: Subagent{Name: "general-purpose", MaxTurns: 1, TimeoutSeconds: 1}, Prompt: "p",
	}
}

func grant() Grant {
	return Grant{
		TaskID: "t1", Attempt: 1, Epoch: 1, Revision: 1, LeaseTTLMS: 15000, Request: request(),
		Record: TaskRecord{TaskID: "t1", Attempt: 1, State: StateGranted},
	}
}

func TestRequestBothWays(t *testing.T) {
	t.Parallel()
	r := request()
	r.OfferedTools, r.Subagent.Tools, r.Subagent.DisallowedTools = []string{}, nil, []string{}
	r.CreatedAt = time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	b, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeTaskRequest(b)
	if err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("back = %+v, %v, want %+v", back, err, r)
	}
	// null and [] differ: all tools, no tools.
	for _, want := range []string{`"offered_tools":[]`, `"tools":null`, `"disallowed_tools":[]`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("%s has no %s", b, want)
		}
	}
}

func TestRequestRefuses(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*TaskRequest){
		"contract_version":         func(r *TaskRequest) { r.ContractVersion = "2" },
		"task id":                  func(r *TaskRequest) { r.TaskID = "a.b" },
		"run id":                   func(r *TaskRequest) { r.RunID = "" },
		"tenant":                   func(r *TaskRequest) { r.Tenant = "_" },
		"thread id":                func(r *TaskRequest) { r.ThreadID = "a\nb" },
		"pool":                     func(r *TaskRequest) { r.Pool = "*" },
		"subagent.name":            func(r *TaskRequest) { r.Subagent.Name = "" },
		"max_turns":                func(r *TaskRequest) { r.Subagent.MaxTurns = 0 },
		"timeout_seconds":          func(r *TaskRequest) { r.Subagent.TimeoutSeconds = -1 },
		"prompt is empty":          func(r *TaskRequest) { r.Prompt = "" },
		"prompt has":               func(r *TaskRequest) { r.Prompt = strings.Repeat("x", MaxPromptBytes+1) },
		"description has":          func(r *TaskRequest) { r.Description = strings.Repeat("界", MaxDescriptionChars+1) },
		"criteria has":             func(r *TaskRequest) { r.AcceptanceCriteria = make([]string, MaxCriteria+1) },
		"queue_timeout":            func(r *TaskRequest) { r.QueueTimeoutSeconds = -1 },
		"identity.user_id":         func(r *TaskRequest) { r.Identity.UserID = strings.Repeat("界", MaxIdentityChars+1) },
		"identity.oauth_id":        func(r *TaskRequest) { r.Identity.OAuthID = "a\nb" },
		`authz_attributes["team"]`: func(r *TaskRequest) { r.Identity.Attributes = map[string]string{"team": "a\x00"} },
		"65 entries": func(r *TaskRequest) {
			r.Identity.Attributes = map[string]string{}
			for i := range MaxAttributes + 1 {
				r.Identity.Attributes[strconv.Itoa(i)] = ""
			}
		},
		"bytes": func(r *TaskRequest) { r.Subagent.SystemPrompt = strings.Repeat("x", MaxRequestBytes) },
	} {
		r := request()
		change(&r)
		if _, err := r.Encode(); !errors.Is(err, ErrInvalidMessage) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: Encode: %v", name, err)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeTaskRequest(b); !errors.Is(err, ErrInvalidMessage) {
			t.Errorf("%s: Decode: %v", name, err)
		}
	}
	r := request()
	r.Description = strings.Repeat("界", MaxDescriptionChars) // code points, not bytes
	if _, err := r.Encode(); err != nil {
		t.Error(err)
	}
}

// A grant for the largest request there may be can be read, whatever its record repeats of it.
func TestLargestGrant(t *testing.T) {
	t.Parallel()
	g := grant()
	g.Request.Description = strings.Repeat("<", MaxDescriptionChars)
	g.Request.ThreadID = ThreadID(strings.Repeat("<", MaxThreadID))
	g.Request.Prompt = "p"
	b, err := g.Request.Encode()
	if err != nil {
		t.Fatal(err)
	}
	g.Request.Subagent.SystemPrompt = strings.Repeat("x", MaxRequestBytes-len(b)-len(`"system_prompt":"",`))
	if b, err = g.Request.Encode(); err != nil || len(b) != MaxRequestBytes {
		t.Fatalf("request has %d bytes, %v", len(b), err)
	}
	g.Record = TaskRecord{TaskID: g.TaskID, Attempt: g.Attempt, Description: g.Request.Description, ThreadID: g.Request.ThreadID, State: StateGranted, TraceState: strings.Repeat("<", 512), TraceParent: strings.Repeat("x", 512)}
	if b, err = json.Marshal(g); err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeGrant(b); err != nil {
		t.Errorf("%d bytes: %v", len(b), err)
	}
}

func TestGrantBothWays(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(grant())
	if err != nil {
		t.Fatal(err)
	}
	if back, err := DecodeGrant(b); err != nil || !reflect.DeepEqual(back, grant()) {
		t.Errorf("back = %+v, %v", back, err)
	}
	for name, change := range map[string]func(*Grant){
		"attempt":  func(g *Grant) { g.Attempt = 0 },
		"revision": func(g *Grant) { g.Revision = 0 },
		"lease":    func(g *Grant) { g.LeaseTTLMS = 999 },
		"differs":  func(g *Grant) { g.TaskID = "t2" },
		"prompt":   func(g *Grant) { g.Request.Prompt = "" },
		"record":   func(g *Grant) { g.Record.State = StateRunning },
	} {
		g := grant()
		change(&g)
		b, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeGrant(b); !errors.Is(err, ErrInvalidMessage) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A reader survives what a newer writer adds, and refuses what it cannot bound.
func TestDecodeTolerance(t *testing.T) {
	t.Parallel()
	rec := `{"task_id":"t1","run_id":"r1","thread_id":"th","tenant":"default","state":"running","attempt":1,"new_field":{"a":[1]}}`
	if r, err := DecodeTaskRecord([]byte(rec)); err != nil || r.State != StateRunning {
		t.Errorf("record with a new field: %+v, %v", r, err)
	}
	if r, err := DecodeRunRecord([]byte(`{"run_id":"r1","thread_id":"th","tenant":"default","status":"later_status"}`)); err != nil || r.RunID != "r1" {
		t.Errorf("run: %+v, %v", r, err)
	}
	for name, b := range map[string]string{
		"unknown state": strings.Replace(rec, "running", "dancing", 1),
		"no ids":        `{"state":"running"}`,
		"too deep":      `{"x":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
		"too large":     `{"error":"` + strings.Repeat("x", MaxInlineResultBytes*7) + `"}`,
		"no json":       `{`, "empty": ``, "null": `null`,
	} {
		if _, err := DecodeTaskRecord([]byte(b)); !errors.Is(err, ErrInvalidMessage) {
			t.Errorf("%s: %v, want ErrInvalidMessage", name, err)
		}
	}
	if l, err := Decode[Lease]([]byte(`{"executor":"e","attempt":2,"x":1}`)); err != nil || l.Attempt != 2 {
		t.Errorf("lease: %+v, %v", l, err)
	}
	if _, err := Decode[Leader]([]byte(`{"holder":"` + strings.Repeat("x", 64<<10) + `"}`)); !errors.Is(err, ErrInvalidMessage) {
		t.Errorf("large leader: %v", err)
	}
	if err := CheckDepth([]byte(`{"a":"[[[[\"[[["}`), 1); err != nil {
		t.Errorf("brackets in strings were counted: %v", err)
	}
	if err := CheckDepth([]byte(`[[1]]`), 1); !errors.Is(err, ErrTooDeep) {
		t.Errorf("CheckDepth = %v", err)
	}
}

func FuzzDecodeTaskRequest(f *testing.F) {
	b, err := request().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"contract_version":"1","acceptance_criteria":[null]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeTaskRequest(b)
		if err != nil {
			if !errors.Is(err, ErrInvalidMessage) {
				t.Fatalf("error of no known kind: %v", err)
			}
			return
		}
		again(t, r, DecodeTaskRequest)
	})
}

func FuzzDecodeGrant(f *testing.F) {
	b, err := json.Marshal(grant())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, err := DecodeGrant(b); err == nil {
			again(t, g, DecodeGrant)
		} else if !errors.Is(err, ErrInvalidMessage) {
			t.Fatalf("error of no known kind: %v", err)
		}
	})
}

func FuzzDecodeTaskRecord(f *testing.F) {
	f.Add([]byte(`{"task_id":"t1","run_id":"r1","thread_id":"th","tenant":"default","state":"completed","attempt":1,"queued_at":"2026-01-02T03:04:05Z","usage":{"input_tokens":1}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeTaskRecord(b); err == nil {
			again(t, r, DecodeTaskRecord)
		} else if !errors.Is(err, ErrInvalidMessage) {
			t.Fatalf("error of no known kind: %v", err)
		}
	})
}

func FuzzDecodeRunRecord(f *testing.F) {
	f.Add([]byte(`{"run_id":"r1","thread_id":"th","tenant":"default","status":"running","delegations":[{"task_id":"t"}],"messages":[1],"options":{"allowed_subagents":null}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeRunRecord(b); err == nil {
			again(t, r, DecodeRunRecord)
		} else if !errors.Is(err, ErrInvalidMessage) {
			t.Fatalf("error of no known kind: %v", err)
		}
	})
}

func FuzzDecodeSmall(f *testing.F) {
	f.Add([]byte(`{"executor":"e","attempt":1,"holder":"h","max_running":3,"requested_at":"2026-01-02T03:04:05Z"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := Decode[Lease](b); err == nil {
			again(t, v, Decode[Lease])
		}
		if v, err := Decode[Leader](b); err == nil {
			again(t, v, Decode[Leader])
		}
		if v, err := Decode[AdmissionLimits](b); err == nil {
			again(t, v, Decode[AdmissionLimits])
		}
		if v, err := Decode[Cancel](b); err == nil {
			again(t, v, Decode[Cancel])
		}
		if v, err := Decode[Trial](b); err == nil {
			again(t, v, Decode[Trial])
		}
	})
}

// again checks that what was accepted can be written and is accepted again,
// unchanged in what it says. A time zone of whole minutes only exists in what
// others wrote, so that a time that cannot be written is not ours to judge.
func again[T any](t *testing.T, v T, decode func([]byte) (T, error)) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	back, err := decode(b)
	if err != nil {
		if len(b) > 200_000 { // escaping made it longer than the limit
			return
		}
		t.Fatalf("own encoding is refused: %v\n%s", err, b)
	}
	b2, err := json.Marshal(back)
	if err != nil || string(b2) != string(b) {
		t.Fatalf("does not settle:\n%s\n%s", b, b2)
	}
}

// The keys of every message, spelled out: a key that changes its name or goes
// away breaks readers that exist.
func TestMessageKeys(t *testing.T) {
	t.Parallel()
	usage := "usage.cache_read_tokens usage.cost_usd usage.input_tokens usage.output_tokens usage.total_tokens"
	step := "message.kind message.text message.tool_calls.[].args message.tool_calls.[].args_truncated message.tool_calls.[].name message.truncated"
	for _, c := range []struct {
		v    any
		want string
	}{
		{&TaskRequest{}, "acceptance_criteria.[] allowed_subagents.[] contract_version created_at description identity.authz_attributes.k identity.channel_user_id identity.is_internal identity.is_subagent identity.oauth_id identity.oauth_provider identity.user_id identity.user_role offered_tools.[] parent_model pool prompt " +
			"queue_timeout_seconds run_id subagent.description subagent.disallowed_tools.[] subagent.max_turns subagent.model subagent.name subagent.network subagent.pool subagent.skills.[] subagent.system_prompt subagent.timeout_seconds subagent.tools.[] " +
			"task_id tenant thread_id tool_call_id"},
		{&TaskRecord{}, "admission_failure attempt cancel_requested date description epoch error error_code executor finished_at granted_at lost model_name pool queued_at " +
			"receipt_verdict.citation_resolved receipt_verdict.failed.[].id receipt_verdict.failed.[].reason receipt_verdict.no_citation_claims receipt_verdict.resolved.[] receipt_verdict.unknown.[] " +
			"receipts.[].args_sha256 receipts.[].created_at receipts.[].id receipts.[].output_bytes receipts.[].output_sha256 receipts.[].status receipts.[].tool_call_id receipts.[].tool_name " +
			"request_seq result result_ref.name result_ref.sha256 result_ref.size result_truncated run_id slot started started_at state stop_reason subagent_type task_id tenant thread_id timeout_seconds traceparent tracestate " +
			usage + " writer"},
		{&Lease{}, "attempt executor"},
		{&Leader{}, "holder writer"},
		{&AdmissionLimits{}, "admission_policy max_queued max_running pools.k queue_timeout_seconds"},
		{&Cancel{}, "reason requested_at"},
		{&Trial{}, "attempt executor times"},
		{&TaskQueuedData{}, "description queue_position subagent_type task_id"},
		{&TaskAdmittedData{}, "pool slot task_id waited_ms"},
		{&TaskStartedData{}, "description executor max_turns model_name subagent_type task_id timeout_seconds"},
		{&TaskRunningData{}, step + " message_index model_name task_id " + usage},
		{&TaskEndData{}, "admission_failure duration_ms error error_code error_truncated model_name queue_ms result result_truncated status stop_reason task_id " + usage},
		{&RunStartedData{}, "input lead model_name run_id truncated"},
		{&RunMessageData{}, step + " message_index model_name run_id " + usage},
		{&RunEndData{}, "duration_ms error error_code error_truncated model_name output output_truncated run_id status stop_reason " + usage},
		{&EventRecord{}, "category content created_at event_id event_type metadata run_id seq task_id tenant thread_id"},
		{&Delegation{}, "created_at description error_code message_id model_name result_brief result_sha256 run_id status stop_reason subagent_type task_id tool_call_id " + usage},
	} {
		v := reflect.ValueOf(c.v).Elem()
		fill(v)
		b, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatal(err)
		}
		var m any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		got := slices.Sorted(slices.Values(keys("", m)))
		want := slices.Sorted(slices.Values(strings.Fields(c.want)))
		if !slices.Equal(got, want) {
			t.Errorf("%T has the keys\n%s\nwant\n%s", c.v, strings.Join(got, " "), strings.Join(want, " "))
		}
	}
	top := func(v any) string {
		fill(reflect.ValueOf(v).Elem())
		b, _ := json.Marshal(v)
		m := map[string]json.RawMessage{}
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		var out []string
		for k := range m {
			out = append(out, k)
		}
		return strings.Join(slices.Sorted(slices.Values(out)), " ")
	}
	if got, want := top(&Grant{}), "attempt epoch last_event_seq lease_ttl_ms record request revision slot task_id"; got != want {
		t.Errorf("Grant has the keys %s, want %s", got, want)
	}
	if got, want := top(&RunRecord{}), "created_at delegations error error_code finished_at input messages metadata model options output owner run_id status stop_reason tags tenant thread_id trace_id traceparent usage writer"; got != want {
		t.Errorf("RunRecord has the keys %s, want %s", got, want)
	}
	if got, want := top(&RunOptions{}), "allowed_subagents available_skills max_concurrent_subagents max_total_subagents subagent_enabled"; got != want {
		t.Errorf("RunOptions has the keys %s, want %s", got, want)
	}
}

// fill sets every field to something, so that no omitempty hides a key.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(1, 0).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[json.RawMessage]() {
			v.SetBytes([]byte(`1`))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		key.SetString("k")
		fill(value)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	default:
		panic(fmt.Sprintf("no value for %s", v.Type()))
	}
}

func keys(path string, v any) []string {
	join := func(k string) string {
		if path == "" {
			return k
		}
		return path + "." + k
	}
	switch v := v.(type) {
	case map[string]any:
		var out []string
		for k, e := range v {
			out = append(out, keys(join(k), e)...)
		}
		return out
	case []any:
		return keys(join("[]"), v[0])
	}
	return []string{path}
}

// STEP-05: each kind of step has its own key, and it is never left out.
func TestStepKeys(t *testing.T) {
	t.Parallel()
	name := "bash"
	for want, s := range map[string]Step{
		`{"kind":"ai","text":"","truncated":false,"tool_calls":[]}`:                       {Kind: StepAI, ToolName: &name},
		`{"kind":"tool","text":"","truncated":false,"tool_name":null}`:                    {Kind: StepTool, ToolCalls: []StepCall{{}}},
		`{"kind":"tool","text":"x","truncated":true,"tool_name":"bash"}`:                  {Kind: StepTool, Text: "x", Truncated: true, ToolName: &name},
		`{"kind":"ai","text":"","truncated":false,"tool_calls":[{"name":"a","args":{}}]}`: {Kind: StepAI, ToolCalls: []StepCall{{Name: "a", Args: json.RawMessage(`{}`)}}},
	} {
		b, err := json.Marshal(s)
		if err != nil || string(b) != want {
			t.Errorf("step = %s, %v, want %s", b, err, want)
		}
		var back Step
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatal(err)
		}
		if b2, _ := json.Marshal(back); string(b2) != want {
			t.Errorf("step comes back as %s, want %s", b2, want)
		}
	}
}

// STATUS-01, STATUS-02, STATUS-03, ADM-11: the words, and what the outside sees of a state.
func TestWords(t *testing.T) {
	t.Parallel()
	for s, want := range map[State]struct {
		status         TaskStatus
		terminal, live bool
		event          EventType
	}{
		StateGranted: {TaskQueued, false, true, ""}, StateReleased: {TaskQueued, false, true, ""}, StateRunning: {TaskRunning, false, true, ""},
		StateCompleted: {TaskCompleted, true, false, EventTaskCompleted}, StateFailed: {TaskFailed, true, false, EventTaskFailed},
		StateTimedOut: {TaskTimedOut, true, false, EventTaskTimedOut}, StateCancelled: {TaskCancelled, true, false, EventTaskCancelled},
	} {
		if s.Status() != want.status || s.Terminal() != want.terminal || s.Live() != want.live || TerminalEvent(s) != want.event || !s.Valid() {
			t.Errorf("%s: status %s terminal %v live %v event %q", s, s.Status(), s.Terminal(), s.Live(), TerminalEvent(s))
		}
		if s.Status().Terminal() != want.terminal || !s.Status().Valid() || want.event != "" && !want.event.Terminal() {
			t.Errorf("%s: status or event disagrees", s)
		}
	}
	if State("max_turns_reached").Valid() || TaskStatus("granted").Valid() || State("").Valid() {
		t.Error("a word is valid that is none")
	}
	for r, want := range map[StopReason]bool{StopTokenCapped: true, StopTurnCapped: true, StopLoopCapped: true, StopSafetyCapped: false, StopSubagentCapped: false, StopLengthCapped: false, "": false} {
		if r.ValidForTask() != want {
			t.Errorf("%q for a task: %v, want %v", r, !want, want)
		}
	}
	for s, want := range map[RunStatus]bool{RunRunning: false, RunCompleted: true, RunFailed: true, RunCancelled: true} {
		if s.Terminal() != want {
			t.Errorf("run %s terminal: %v", s, !want)
		}
	}
	terminal := 0
	for _, typ := range EventTypes() {
		if typ.Terminal() {
			terminal++
		}
	}
	if terminal != 7 || EventTaskStarted.Terminal() {
		t.Errorf("%d terminal event types, want 7", terminal)
	}
}

// USAGE-02, USAGE-06: sums, and unknown stays unknown.
func TestUsageAdd(t *testing.T) {
	t.Parallel()
	var none *Usage
	a := &Usage{1, 2, 3, 1, nil}
	if none.Add(nil) != nil {
		t.Error("nothing and nothing is something")
	}
	if got := none.Add(a); *got != *a || got == a {
		t.Errorf("nothing and %v = %v", a, got)
	}
	if got := a.Add(nil); *got != *a || got == a {
		t.Errorf("%v and nothing = %v", a, got)
	}
	if got := a.Add(&Usage{10, 20, 30, 0, nil}); *got != (Usage{11, 22, 33, 1, nil}) || *a != (Usage{1, 2, 3, 1, nil}) {
		t.Errorf("sum = %v", got)
	}
}

// A record of a run's own event has every key that a record has; task_id is
// null, and comes back as no id.
func TestRecordWithoutTask(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(EventRecord{Seq: 1, RunID: "r_1", EventType: RecordRunStarted, Content: json.RawMessage(`{}`), Metadata: json.RawMessage(`{}`)})
	if err != nil || !bytes.Contains(b, []byte(`"task_id":null,`)) {
		t.Fatalf("a record of a run is %s, %v; want task_id null", b, err)
	}
	var back EventRecord
	if err := json.Unmarshal(b, &back); err != nil || back.TaskID != "" || back.RunID != "r_1" {
		t.Errorf("it comes back as %+v, %v", back, err)
	}
	b, err = json.Marshal(EventRecord{TaskID: "t_1", Content: json.RawMessage(`{}`), Metadata: json.RawMessage(`{}`)})
	if err != nil || !bytes.Contains(b, []byte(`"task_id":"t_1",`)) {
		t.Errorf("a record of a task is %s, %v", b, err)
	}
}

// USAGE-06: a cost adds up where it is known, stays away where it is not, and is
// written in decimals that people can read.
func TestCost(t *testing.T) {
	t.Parallel()
	cost := func(v float64) *Usage { m := Money(v); return &Usage{CostUSD: &m} }
	var sum *Usage
	for range 10 {
		sum = sum.Add(cost(0.1)).Add(&Usage{})
	}
	sum = sum.Add(cost(0.00000025))
	for want, u := range map[string]*Usage{
		`{"input_tokens":0,"output_tokens":0,"total_tokens":0,"cost_usd":1.00000025}`: sum,
		`{"input_tokens":0,"output_tokens":0,"total_tokens":0,"cost_usd":0}`:          cost(0),
		`{"input_tokens":0,"output_tokens":0,"total_tokens":0}`:                       (&Usage{}).Add(&Usage{}),
	} {
		got, err := json.Marshal(u)
		if err != nil || string(got) != want {
			t.Errorf("Marshal = %s, %v; want %s", got, err, want)
		}
		var back Usage
		if err := json.Unmarshal(got, &back); err != nil || (back.CostUSD == nil) != (u.CostUSD == nil) {
			t.Errorf("Unmarshal(%s) = %+v, %v", got, back, err)
		}
	}
	if b, err := json.Marshal(cost(math.Inf(1))); err == nil {
		t.Errorf("an infinite amount is written as %s", b)
	}
}
