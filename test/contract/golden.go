package contract

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead"
)

// Golden is an example of a message.
type Golden struct {
	// Name is the message's.
	Name string
	// Variant is min, with what is always there, full, with all that may be there,
	// or a word for what neither can hold. Those above MaxGolden are not kept as
	// files.
	Variant string
	Body    []byte
	// Event is the event before it was encoded.
	Event *envelope.Event
}

// MaxGolden bounds a golden message that is kept as a file, in bytes.
const MaxGolden = 16 << 10

const (
	goldenTrace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	goldenState = "vendor=value"
	goldenHash  = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
)

// at is the time of the examples, second by second.
func at(second int) time.Time {
	return time.Date(2026, 1, 2, 3, 4, second, 123456000, time.UTC)
}

func ptr[T any](v T) *T { return &v }

func goldenRequest(full bool) contract.TaskRequest {
	r := contract.TaskRequest{
		ContractVersion: contract.Version, TaskID: "t_1", RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant,
		Subagent: contract.Subagent{Name: "general-purpose", MaxTurns: 100, TimeoutSeconds: 1800}, Prompt: "Count the tests.", CreatedAt: at(0),
	}
	if full {
		r.ThreadID, r.Tenant, r.Pool, r.ToolCallID = "any thing / 界", "acme", "gpu", "call_1"
		r.Subagent = contract.Subagent{
			Name: "searcher", Description: "Searches.", SystemPrompt: "You search.", Tools: []string{"grep"}, DisallowedTools: []string{"bash"},
			Model: "inherit", Pool: "gpu", MaxTurns: 20, TimeoutSeconds: 60, Network: true,
			Skills: []string{"review"},
		}
		r.Description, r.AcceptanceCriteria, r.ParentModel = "Count tests", []string{"every folder is covered"}, "main"
		r.OfferedTools, r.QueueTimeoutSeconds = []string{"grep", "ls"}, 300
		r.AllowedSubagents = []string{r.Subagent.Name, "coder"}
		r.Identity = contract.Identity{
			UserID: "u_1", UserRole: "member", OAuthProvider: "example", OAuthID: "o_1", ChannelUserID: "c_1", IsInternal: true,
			Attributes: map[string]string{"team": "a"}, IsSubagent: true,
		}
	}
	return r
}

func goldenUsage() *contract.Usage {
	return &contract.Usage{InputTokens: 1200, OutputTokens: 340, TotalTokens: 1540, CacheReadTokens: 800, CostUSD: ptr(contract.Money(0.0125))}
}

// goldenRecord is a record as the gate writes it with a grant, or a full one in the
// given state.
func goldenRecord(full bool, state contract.State) contract.TaskRecord {
	r := contract.TaskRecord{
		TaskID: "t_1", RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, State: state, Attempt: 1, Slot: 1, Epoch: 7,
		Writer: "adm-1/k3/12", RequestSeq: 41, SubagentType: "general-purpose", QueuedAt: at(0),
	}
	if state.Terminal() {
		r.FinishedAt = ptr(at(9))
	}
	if !full {
		return r
	}
	r.ThreadID, r.Tenant, r.Pool, r.Attempt, r.Lost, r.Slot = "any thing / 界", "acme", "gpu", 2, 1, 3
	r.CancelRequested, r.Started, r.Executor = true, true, "ex-1"
	r.SubagentType, r.Description, r.TimeoutSeconds = "searcher", "Count tests", 60
	r.TraceParent, r.TraceState = goldenTrace, goldenState
	r.GrantedAt, r.StartedAt, r.Date = ptr(at(2)), ptr(at(3)), "2026-01-02"
	r.ModelName, r.Usage, r.StopReason = "main", goldenUsage(), contract.StopTurnCapped
	if state == contract.StateCompleted {
		r.Result, r.ResultRef, r.ResultTruncated = "There are 12 tests.", &contract.BlobRef{Name: "result.t_1", SHA256: goldenHash, Size: 300000}, true
		r.ReceiptVerdict = &contract.ReceiptVerdict{
			Resolved: []string{"r1"}, Failed: []contract.FailedCitation{{ID: "r2", Reason: contract.CitationStatus}}, Unknown: []string{"r9"},
		}
	} else {
		r.Error, r.ErrorCode = "the provider refused the key", contract.ErrLLM
	}
	r.Receipts = []contract.Receipt{
		{ID: "r1", ToolCallID: "call_1", ToolName: "grep", Status: "success", ArgsSHA256: goldenHash[:16], OutputSHA256: goldenHash[16:32], OutputBytes: 120, CreatedAt: ptr(at(4))},
		{ID: "r2"},
	}
	return r
}

func goldenRun(full bool, status contract.RunStatus) contract.RunRecord {
	r := contract.RunRecord{
		RunID: "r_1", ThreadID: "th_1", Tenant: contract.DefaultTenant, Status: status, Input: "How many tests are there?",
		Owner: "lead-1", Writer: "lead-1/k3/4", CreatedAt: at(0),
	}
	if status.Terminal() {
		r.FinishedAt = ptr(at(9))
	}
	if !full {
		return r
	}
	r.Tenant, r.ThreadID, r.TraceParent, r.TraceID = "acme", "any thing / 界", goldenTrace, goldenTrace[3:35]
	r.Model, r.Usage, r.StopReason = "main", goldenUsage(), contract.StopLoopCapped
	r.Messages = json.RawMessage(`{"messages":[]}`)
	r.Options = contract.RunOptions{SubagentEnabled: true, MaxConcurrentSubagents: 3, MaxTotalSubagents: 6, AllowedSubagents: []string{"searcher"}, AvailableSkills: []string{"review", "release-notes"}}
	r.Metadata, r.Tags = map[string]string{"ticket": "7"}, []string{"nightly"}
	r.Delegations = []contract.Delegation{
		{
			TaskID: "t_1", ToolCallID: "call_1", RunID: "r_1", Description: "Count tests", SubagentType: "searcher", Status: string(contract.ToolCompleted),
			StopReason: contract.StopTurnCapped, ErrorCode: contract.ErrLLM, ResultBrief: "There are 12 tests.",
			ResultSHA256: strings.Repeat("0f", 32), MessageID: "m4", ModelName: "main", Usage: goldenUsage(), CreatedAt: at(1),
		},
		{TaskID: "t_2", RunID: "r_1", Description: "Count files", SubagentType: "searcher", Status: contract.DelegationInProgress, CreatedAt: at(1)},
	}
	r.Output = "There are 12 tests."
	if status != contract.RunCompleted {
		r.Error, r.ErrorCode = "the provider refused the key", contract.ErrLLM
	}
	return r
}

func aiStep(args string) contract.Step {
	return contract.Step{Kind: contract.StepAI, Text: "I look for tests.", Truncated: true, ToolCalls: []contract.StepCall{
		{Name: "grep", Args: json.RawMessage(args)}, {Name: "write_file", Args: json.RawMessage(`"{\"content\":\"a long"`), ArgsTruncated: true},
	}}
}

func toolStep(known bool) contract.Step {
	s := contract.Step{Kind: contract.StepTool, Text: "a_test.go:12: func TestA"}
	if known {
		s.ToolName = ptr("grep")
	}
	return s
}

// goldenEvents are the events as the services build them.
func goldenEvents() (map[string]envelope.Event, error) {
	const source = "/herdgate/executor/ex-1"
	min, full := goldenRecord(false, contract.StateRunning), goldenRecord(true, contract.StateRunning)
	run, fullRun := goldenRun(false, contract.RunRunning), goldenRun(true, contract.RunRunning)
	long := strings.Repeat("long ", contract.MaxStepChars)
	longRun := fullRun
	longRun.Input = long
	out := map[string]envelope.Event{
		"task_queued.min":    event.Queued(goldenRequest(false), "", "", 0, source, at(0)),
		"task_queued.full":   event.Queued(goldenRequest(true), goldenTrace, goldenState, 4, source, at(0)),
		"task_admitted.min":  event.Admitted(min, source, at(2)),
		"task_admitted.full": event.Admitted(full, source, at(2)),
		"task_started.min":   event.Started(min, contract.TaskStartedData{}, source, at(3)),
		"task_started.full":  event.Started(full, contract.TaskStartedData{ModelName: "main", MaxTurns: 20, TimeoutSeconds: 60, Executor: "ex-1"}, source, at(3)),
		"task_running.min":   event.Running(min, 1, contract.Step{Kind: contract.StepAI}, "", nil, source, at(4)),
		"task_running.full":  event.Running(full, 4, aiStep(`{"pattern":"func Test","paths":["a","b"],"depth":1.5}`), "main", goldenUsage(), source, at(4)),
		"task_running.tool":  event.Running(full, 5, toolStep(true), "main", goldenUsage(), source, at(5)),
		"task_running.no_tool": event.Running(full, 6, toolStep(false), "main",
			&contract.Usage{InputTokens: 1, OutputTokens: 1, TotalTokens: 2}, source, at(6)),
		"task_running.long": event.Running(full, 7, contract.Step{Kind: contract.StepAI, Text: long, ToolCalls: []contract.StepCall{
			{Name: long, Args: json.RawMessage(`{"text":"` + long + `"}`)},
		}}, long, goldenUsage(), source, at(6)),
		"run_started.min":  event.RunStarted(run, source, at(0)),
		"run_started.full": event.RunStarted(fullRun, source, at(0)),
		"run_started.long": event.RunStarted(longRun, source, at(0)),
		"run_message.min":  event.RunMessage(run, 1, contract.Step{Kind: contract.StepAI}, "", nil, source, at(1)),
		"run_message.full": event.RunMessage(fullRun, 2, aiStep(`{"prompt":"Count the tests."}`), "main", goldenUsage(), source, at(1)),
		"run_message.tool": event.RunMessage(fullRun, 3, toolStep(true), "main", goldenUsage(), source, at(2)),
	}
	for _, state := range contract.States() {
		if !state.Terminal() {
			continue
		}
		name := "task_" + string(state)
		whole, longer := goldenRecord(true, state), goldenRecord(true, state)
		longer.Result, longer.Error = long, long
		never := goldenRecord(false, state) // ended before it had a slot
		never.Attempt = 0
		never.ErrorCode, never.AdmissionFailure = contract.ErrQueueTimeout, true
		for variant, rec := range map[string]contract.TaskRecord{"min": goldenRecord(false, state), "full": whole, "long": longer, "never_admitted": never} {
			if variant == "never_admitted" && state == contract.StateCompleted {
				continue
			}
			ev, err := event.Terminal(rec, source)
			if err != nil {
				return nil, err
			}
			out[name+"."+variant] = ev
		}
	}
	for _, status := range contract.RunStatuses() {
		if !status.Terminal() {
			continue
		}
		longer := goldenRun(true, status)
		longer.Output, longer.Error = strings.Repeat("long ", event.MaxRunOutputChars), long
		for variant, rec := range map[string]contract.RunRecord{"min": goldenRun(false, status), "full": goldenRun(true, status), "long": longer} {
			ev, err := event.RunEnd(rec, source)
			if err != nil {
				return nil, err
			}
			out["run_"+string(status)+"."+variant] = ev
		}
	}
	return out, nil
}

// Goldens makes all examples, in alphabetical order.
var Goldens = sync.OnceValues(makeGoldens)

func makeGoldens() ([]Golden, error) {
	events, err := goldenEvents()
	if err != nil {
		return nil, err
	}
	var list []Golden
	var stored []contract.EventRecord
	for key, ev := range events {
		body, err := envelope.Encode(ev)
		if err != nil {
			return nil, fmt.Errorf("golden event %s: %w", key, err)
		}
		typ, variant, _ := strings.Cut(key, ".")
		list = append(list, Golden{"event." + typ, variant, body, &ev}, Golden{"event." + typ + ".data", variant, ev.Data, nil})
		rec, ok := event.Record(ev, uint64(40+len(stored)))
		if !ok {
			return nil, fmt.Errorf("golden event %s cannot be stored", key)
		}
		stored = append(stored, rec)
		switch key {
		case "run_started.min":
			list = append(list, Golden{"stored_event", "min", encoded(fixed(rec)), nil})
		case "task_running.full":
			list = append(list, Golden{"stored_event", "full", encoded(fixed(rec)), nil})
		}
	}
	for _, m := range others() {
		for i, variant := range []string{"min", "full"} {
			var body []byte
			switch v := m.values[i].(type) {
			case contract.TaskRequest:
				if body, err = v.Encode(); err != nil {
					return nil, err
				}
			default:
				body = encoded(v)
			}
			list = append(list, Golden{m.name, variant, body, nil})
		}
	}
	slices.SortFunc(list, func(a, b Golden) int { return strings.Compare(a.Name+"."+a.Variant, b.Name+"."+b.Variant) })
	return list, nil
}

func fixed(rec contract.EventRecord) contract.EventRecord {
	rec.Seq = 42
	return rec
}

func encoded(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own values
	}
	return b
}

type pair struct {
	name   string
	values [2]any
}

// others are the messages that are no events, min and full.
func others() []pair {
	grant := func(full bool) contract.Grant {
		rec := goldenRecord(full, contract.StateGranted)
		if full {
			// What a record has when it is granted again.
			rec.CancelRequested, rec.Started, rec.Executor, rec.StartedAt, rec.Date = false, false, "", nil, ""
			rec.ModelName, rec.Usage, rec.StopReason, rec.Error, rec.ErrorCode, rec.Receipts = "", nil, "", "", "", nil
		}
		return contract.Grant{
			TaskID: rec.TaskID, Attempt: rec.Attempt, Slot: rec.Slot, Epoch: rec.Epoch, Revision: 97, LastEventSeq: 51, LeaseTTLMS: 15000,
			Record: rec, Request: goldenRequest(full),
		}
	}
	submitted := wire.TaskRequest{SubagentType: "searcher", Prompt: "Count the tests."}
	submit := lead.TaskSubmit{TaskRequest: submitted, Tenant: "acme", UserID: "u_1", UserRole: "member", Attributes: map[string]string{"team": "blue"}}
	submit.Description, submit.AcceptanceCriteria, submit.ThreadID, submit.Model = "Count tests", []string{"every folder is covered"}, "th_1", "main"
	submit.TimeoutSeconds = ptr(60)
	task := wire.TaskOf(goldenRecord(true, contract.StateFailed))
	task.QueuePosition, task.Result, task.ReceiptVerdict = ptr(2), ptr("There are"), goldenRecord(true, contract.StateCompleted).ReceiptVerdict
	task.ResultTruncated, task.AdmissionFailure = true, true
	record, _ := event.Record(event.Admitted(goldenRecord(true, contract.StateGranted), "/herdgate/admission/adm-1", at(2)), 42)
	terminal := goldenRecord(true, contract.StateFailed)
	terminal.Result, terminal.ResultRef, terminal.ResultTruncated = "There are", goldenRecord(true, contract.StateCompleted).ResultRef, true
	terminal.ReceiptVerdict, terminal.AdmissionFailure = goldenRecord(true, contract.StateCompleted).ReceiptVerdict, true
	return []pair{
		{"task_request", [2]any{goldenRequest(false), goldenRequest(true)}},
		{"grant", [2]any{grant(false), grant(true)}},
		{"task_record", [2]any{goldenRecord(false, contract.StateGranted), terminal}},
		{"run_record", [2]any{goldenRun(false, contract.RunRunning), goldenRun(true, contract.RunFailed)}},
		{"lease", [2]any{contract.Lease{Executor: "lead-1"}, contract.Lease{Executor: "ex-1", Attempt: 2}}},
		{"leader", [2]any{contract.Leader{}, contract.Leader{Holder: "adm-1/k3", Writer: "adm-1/k3/12"}}},
		{"limits", [2]any{
			contract.AdmissionLimits{MaxRunning: 3, AdmissionPolicy: "queue"},
			contract.AdmissionLimits{MaxRunning: 3, Pools: map[contract.Pool]int{"gpu": 2}, MaxQueued: 64, AdmissionPolicy: "reject", QueueTimeoutSeconds: 300},
		}},
		{"cancel", [2]any{contract.Cancel{RequestedAt: at(5)}, contract.Cancel{Reason: "not needed any more", RequestedAt: at(5)}}},
		{"trial", [2]any{contract.Trial{Attempt: 1, Times: 1}, contract.Trial{Attempt: 2, Times: 2, Executor: "ex-1"}}},
		{"gap", [2]any{wire.Gap{FromSeq: 1, ToSeq: 1}, wire.Gap{FromSeq: 17, ToSeq: 4711}}},
		{"task.submit.request", [2]any{lead.TaskSubmit{TaskRequest: submitted}, submit}},
		{"task.submit.response", [2]any{
			wire.TaskAccepted{TaskID: "t_1", RunID: "r_1", ThreadID: "th_1", Status: contract.TaskQueued},
			wire.TaskAccepted{TaskID: "t_1", RunID: "r_1", ThreadID: "th_1", Status: contract.TaskQueued, QueuePosition: 4},
		}},
		{"task.get.request", [2]any{lead.TaskCall{TaskID: "t_1"}, lead.TaskCall{Tenant: "acme", TaskID: "t_1", Reason: "only for cancellations"}}},
		{"task.get.response", [2]any{wire.TaskWaiting(goldenRequest(false), ""), task}},
		{"task.cancel.request", [2]any{lead.TaskCall{TaskID: "t_1"}, lead.TaskCall{Tenant: "acme", TaskID: "t_1", Reason: "not needed any more"}}},
		{"task.cancel.response", [2]any{wire.Cancelling{Status: wire.StatusCancelling}, wire.Cancelling{TaskID: "t_1", RunID: "r_1", Status: wire.StatusCancelling}}},
		{"events.list.request", [2]any{eventapi.ListRequest{}, eventapi.ListRequest{
			Tenant: "acme", ThreadID: "th_1", RunID: "r_1", TaskID: "t_1", Types: []string{contract.RecordEnd}, AfterSeq: 40, Limit: 10, BarrierSeq: 42, WaitMS: 500,
		}}},
		{"events.list.response", [2]any{eventapi.ListResponse{Events: []contract.EventRecord{}}, eventapi.ListResponse{
			Events: []contract.EventRecord{record}, NextAfterSeq: 42, HasMore: true, LastSeq: 50, PrunedSeq: 3,
			Error: &eventapi.Error{Code: eventapi.CodeUnavailable, Message: "the event sink is stopping"},
		}}},
		{"admission.status.request", [2]any{admissionapi.StatusRequest{}, admissionapi.StatusRequest{TaskID: "t_1"}}},
		{"admission.status.response", [2]any{admissionapi.Status{Slots: []admissionapi.Slot{}}, admissionapi.Status{
			Leader: "adm-1/k3", Epoch: 7, MaxRunning: 5, Running: 2, Queued: 4, MaxQueued: 64, OldestQueuedAt: ptr(at(0)),
			Slots:  []admissionapi.Slot{{Slot: 1, TaskID: "t_2"}, {Pool: "gpu", Slot: 1, TaskID: "t_3", Executor: "ex-1", ExpiresAt: ptr(at(20))}},
			Pools:  []admissionapi.Pool{{Pool: contract.DefaultPool, MaxRunning: 3}, {Pool: "gpu", MaxRunning: 2, Running: 1, Queued: 4, OldestQueuedAt: ptr(at(0))}},
			Totals: admissionapi.Totals{Since: at(0), Grants: 12, Expiries: 1, Refusals: map[contract.ErrorCode]int{contract.ErrQueueTimeout: 1}, FenceRejections: 1, Takeovers: 1},

			QueuePosition: ptr(3),
		}}},
		{"agents.list.request", [2]any{agentapi.AgentsRequest{}, agentapi.AgentsRequest{Name: "coder", AfterName: "bash", UnlessRevision: 41}}},
		{"agents.list.response", [2]any{agentapi.AgentsPage{Agents: []agentapi.Agent{}, Revision: 1}, agentapi.AgentsPage{
			Agents: []agentapi.Agent{{Name: "coder", Revision: 42, Definition: goldenAgent()}}, Revision: 43, HasMore: true, Unchanged: true,
			Error: &agentapi.Refusal{Code: agentapi.CodeUnavailable, Message: "the event sink is stopping"},
		}}},
		{"agents.put.request", [2]any{agentapi.AgentPut{Name: "coder", Definition: goldenAgent()}, agentapi.AgentPut{Name: "coder", Definition: goldenAgent(), Expect: 42}}},
		{"agents.put.response", [2]any{agentapi.AgentChanged{Revision: 43}, agentapi.AgentChanged{Error: &agentapi.Refusal{Code: agentapi.CodeConflict, Message: "it has changed"}}}},
		{"agents.delete.request", [2]any{agentapi.AgentDelete{Name: "coder", Expect: 42}, agentapi.AgentDelete{Name: "coder", Expect: 43}}},
		{"agents.delete.response", [2]any{agentapi.AgentChanged{Revision: 44}, agentapi.AgentChanged{Error: &agentapi.Refusal{Code: agentapi.CodeInvalid, Message: "expect is missing"}}}},
		{"problem", [2]any{wire.Problem{Title: "Not Found", Status: 404, Code: wire.CodeNotFound}, wire.Problem{
			Type: "about:blank", Title: "Conflict", Status: 409, Code: wire.CodeAlreadyFinished, Detail: "task t_1 has ended", FinishedStatus: "completed",
			Errors: []wire.ProblemFault{{Message: "too late"}, {Location: "body.task_id", Message: "has ended"}},
		}}},
	}
}

func goldenAgent() json.RawMessage {
	m, err := subagent.Managed{Name: "coder", Description: "Writes code.", SystemPrompt: "You write code.", Tools: []string{"read_file"}, Pool: "gpu", Enabled: true}.Normalize()
	if err != nil {
		panic(err)
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

// File is the golden as it is kept: easy to read, and the same message.
func (g Golden) File() ([]byte, error) {
	var b bytes.Buffer
	err := json.Indent(&b, g.Body, "", "  ")
	b.WriteByte('\n')
	return b.Bytes(), err
}

// Kept reports whether the golden is kept as a file. The data of an event stands
// in its event.
func (g Golden) Kept() bool { return len(g.Body) <= MaxGolden && !strings.HasSuffix(g.Name, ".data") }
