// Package contract knows every message that travels over NATS: it makes the
// published schemas, the AsyncAPI document, the vocabulary and the golden messages
// out of the Go types and the builders that the services use, and tells whether a
// schema breaks a promise that a released one has made.
package contract

//go:generate go run ./gen

import (
	"reflect"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
	"github.com/herdgate/herdgate/services/lead"
)

// Direction says which promise a schema makes, and so what counts as breaking it.
type Direction int

const (
	// Written messages are read by others: what they may hold never grows beyond
	// what was promised, apart from new fields.
	Written Direction = 1 << iota
	// Taken messages are written by others: what was good stays good.
	Taken
	// Both: written and taken by processes of different versions, which run side by
	// side during an update.
	Both = Written | Taken
)

// Message is one kind of message.
type Message struct {
	// Name is the name of its schema.
	Name      string
	Title     string
	Direction Direction
	// Type is its Go type; for an event, that of its data.
	Type reflect.Type
	// Event is set for events: the schema is that of the whole CloudEvent.
	Event contract.EventType
	// DataOnly: the schema is that of an event's data alone.
	DataOnly bool
}

func of[T any]() reflect.Type { return reflect.TypeFor[T]() }

// eventData are the types of the events' data.
func eventData(t contract.EventType) reflect.Type {
	switch {
	case t.TaskTerminal():
		return of[contract.TaskEndData]()
	case t.RunTerminal():
		return of[contract.RunEndData]()
	}
	switch t {
	case contract.EventTaskQueued:
		return of[contract.TaskQueuedData]()
	case contract.EventTaskAdmitted:
		return of[contract.TaskAdmittedData]()
	case contract.EventTaskStarted:
		return of[contract.TaskStartedData]()
	case contract.EventTaskRunning:
		return of[contract.TaskRunningData]()
	case contract.EventRunStarted:
		return of[contract.RunStartedData]()
	case contract.EventRunMessage:
		return of[contract.RunMessageData]()
	}
	return nil // the tests find an event type without data
}

// Messages lists every kind of message.
func Messages() []Message {
	list := []Message{
		{Name: "task_request", Title: "Task request", Direction: Both, Type: of[contract.TaskRequest]()},
		{Name: "grant", Title: "Grant of one attempt", Direction: Both, Type: of[contract.Grant]()},
		{Name: "task_record", Title: "Record of a task", Direction: Both, Type: of[contract.TaskRecord]()},
		{Name: "run_record", Title: "Record of a run", Direction: Both, Type: of[contract.RunRecord]()},
		{Name: "lease", Title: "Heartbeat of an attempt or of a run", Direction: Both, Type: of[contract.Lease]()},
		{Name: "leader", Title: "Leader of the gate", Direction: Both, Type: of[contract.Leader]()},
		{Name: "limits", Title: "Limits of the gate", Direction: Both, Type: of[contract.AdmissionLimits]()},
		{Name: "cancel", Title: "Cancellation of a task or of a run", Direction: Both, Type: of[contract.Cancel]()},
		{Name: "trial", Title: "Grants that nobody lived to claim", Direction: Both, Type: of[contract.Trial]()},
		{Name: "stored_event", Title: "Stored event", Direction: Written, Type: of[contract.EventRecord]()},
		{Name: "gap", Title: "Gap: events that cannot be had any more", Direction: Written, Type: of[wire.Gap]()},
		{Name: "task.submit.request", Title: "Request of task.submit", Direction: Taken, Type: of[lead.TaskSubmit]()},
		{Name: "task.submit.response", Title: "Answer of task.submit", Direction: Written, Type: of[wire.TaskAccepted]()},
		{Name: "task.get.request", Title: "Request of task.get", Direction: Taken, Type: of[lead.TaskCall]()},
		{Name: "task.get.response", Title: "Answer of task.get", Direction: Written, Type: of[wire.Task]()},
		{Name: "task.cancel.request", Title: "Request of task.cancel", Direction: Taken, Type: of[lead.TaskCall]()},
		{Name: "task.cancel.response", Title: "Answer of task.cancel", Direction: Written, Type: of[wire.Cancelling]()},
		{Name: "events.list.request", Title: "Request of events.list", Direction: Taken, Type: of[eventapi.ListRequest]()},
		{Name: "events.list.response", Title: "Answer of events.list", Direction: Written, Type: of[eventapi.ListResponse]()},
		{Name: "admission.status.request", Title: "Request of admission.status", Direction: Taken, Type: of[admissionapi.StatusRequest]()},
		{Name: "admission.status.response", Title: "Answer of admission.status", Direction: Written, Type: of[admissionapi.Status]()},
		{Name: "agents.list.request", Title: "Request of agents.list", Direction: Taken, Type: of[agentapi.AgentsRequest]()},
		{Name: "agents.list.response", Title: "Answer of agents.list", Direction: Written, Type: of[agentapi.AgentsPage]()},
		{Name: "agents.put.request", Title: "Request of agents.put", Direction: Taken, Type: of[agentapi.AgentPut]()},
		{Name: "agents.put.response", Title: "Answer of agents.put", Direction: Written, Type: of[agentapi.AgentChanged]()},
		{Name: "agents.delete.request", Title: "Request of agents.delete", Direction: Taken, Type: of[agentapi.AgentDelete]()},
		{Name: "agents.delete.response", Title: "Answer of agents.delete", Direction: Written, Type: of[agentapi.AgentChanged]()},
		{Name: "problem", Title: "Refusal of task.submit, task.get and task.cancel", Direction: Written, Type: of[wire.Problem]()},
	}
	for _, t := range contract.EventTypes() {
		list = append(list,
			Message{Name: "event." + string(t), Title: "Event " + string(t), Direction: Written, Type: eventData(t), Event: t},
			Message{Name: "event." + string(t) + ".data", Title: "Data of the event " + string(t), Direction: Written, Type: eventData(t), Event: t, DataOnly: true},
		)
	}
	return list
}

// rule refines what the Go type of a field tells. Its key is "Type.field", with
// the Go name of the type and the JSON name of the field.
type rule struct {
	maxLength, minLength int
	pattern, format      string
	maxItems             int
	minimum, maximum     int64 // 0 is none; whole numbers are never negative
	words                []string
	open                 bool // the list of words may grow
	constant             string
	required, optional   bool // not as the Go tags say
	nullable, never      bool // may be null; is never null although Go's type could be
	object               bool // raw JSON, and always an object
	items                *rule
}

const (
	sha256Pattern = "^[0-9a-f]{64}$"
	shortDigest   = "^[0-9a-f]{16}$"
	tracePattern  = "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
	citation      = "^r[0-9]{1,10}$"
	maxName       = 128 // of a model, a tool, a process, in an event
)

// rules hold what constants and validation in the code say of a field.
func rules() map[string]rule {
	name := rule{maxLength: maxName}
	description := rule{maxLength: contract.MaxDescriptionChars}
	step := rule{maxLength: contract.MaxStepChars}
	agent := rule{pattern: agentapi.NamePattern}
	citations := rule{never: true, maxItems: contract.MaxVerdictEntries, items: &rule{pattern: citation}}
	return map[string]rule{
		// Who writes a request may leave out what has a meaning when it is not there.
		"TaskRequest.contract_version":     {constant: contract.Version},
		"TaskRequest.description":          description,
		"TaskRequest.prompt":               {minLength: 1, maxLength: contract.MaxPromptBytes},
		"TaskRequest.acceptance_criteria":  {maxItems: contract.MaxCriteria},
		"TaskRequest.offered_tools":        {optional: true},
		"TaskRequest.identity":             {optional: true},
		"TaskRequest.created_at":           {optional: true},
		"Subagent.name":                    {minLength: 1},
		"Subagent.tools":                   {optional: true},
		"Subagent.disallowed_tools":        {optional: true},
		"Subagent.max_turns":               {minimum: 1},
		"Subagent.timeout_seconds":         {minimum: 1},
		"Identity.is_subagent":             {optional: true},
		"Identity.is_internal":             {optional: true},
		"Grant.attempt":                    {minimum: 1},
		"Grant.revision":                   {minimum: 1},
		"Grant.lease_ttl_ms":               {minimum: 1000},
		"TaskRecord.traceparent":           {pattern: tracePattern},
		"TaskRecord.tracestate":            {maxLength: envelope.MaxTraceState},
		"TaskRecord.result":                {maxLength: contract.MaxInlineResultBytes},
		"TaskRecord.error":                 {maxLength: contract.MaxErrorChars},
		"TaskRecord.date":                  {format: "date"},
		"Receipt.id":                       {pattern: citation},
		"Receipt.args_sha256":              {pattern: shortDigest},
		"Receipt.output_sha256":            {pattern: shortDigest},
		"Receipt.status":                   {words: []string{"success", "error", "partial_success"}, open: true},
		"ReceiptVerdict.resolved":          citations,
		"ReceiptVerdict.unknown":           citations,
		"ReceiptVerdict.failed":            {never: true, maxItems: contract.MaxVerdictEntries},
		"FailedCitation.id":                {pattern: citation},
		"FailedCitation.reason":            {words: []string{contract.CitationStatus, contract.CitationAnchor}},
		"BlobRef.sha256":                   {pattern: sha256Pattern},
		"AdmissionLimits.max_running":      {minimum: 1},
		"AdmissionLimits.admission_policy": {words: []string{"queue", "reject"}},
		"Step.kind":                        {words: []string{contract.StepAI, contract.StepTool}},
		"Step.text":                        step,
		"Step.tool_calls":                  {never: true, optional: true},
		"Step.tool_name":                   {maxLength: maxName, optional: true},
		"StepCall.name":                    name,
		"TaskQueuedData.subagent_type":     name,
		"TaskQueuedData.description":       description,
		"TaskStartedData.description":      description,
		"TaskStartedData.subagent_type":    name,
		"TaskStartedData.model_name":       name,
		"TaskStartedData.executor":         name,
		"TaskRunningData.model_name":       name,
		"TaskEndData.result":               step,
		"TaskEndData.error":                step,
		"TaskEndData.model_name":           name,
		"RunStartedData.input":             step,
		"RunStartedData.model_name":        name,
		"RunStartedData.lead":              name,
		"RunMessageData.model_name":        name,
		"RunEndData.output":                {maxLength: event.MaxRunOutputChars},
		"RunEndData.error":                 step,
		"RunEndData.model_name":            name,
		"EventRecord.seq":                  {minimum: 1},
		"EventRecord.event_id":             {minLength: 1, maxLength: 256},
		"EventRecord.task_id":              {nullable: true},
		"EventRecord.event_type":           {words: recordTypes(), open: true, maxLength: 32},
		"EventRecord.category":             {words: []string{contract.CategorySubagent, contract.CategoryRun}, open: true, maxLength: 16},
		"EventRecord.content":              {object: true},
		"EventRecord.metadata":             {object: true},
		"Delegation.status":                {words: append([]string{contract.DelegationInProgress}, words(contract.ToolStatuses())...)},
		"RunRecord.traceparent":            {pattern: tracePattern},
		"RunRecord.trace_id":               {pattern: "^[0-9a-f]{32}$"},
		"ListRequest.types":                {maxItems: eventapi.MaxTypes},
		"ListRequest.limit":                {maximum: eventapi.MaxLimit},
		"ListRequest.wait_ms":              {maximum: eventapi.MaxWait.Milliseconds()},
		"ListResponse.events":              {never: true, maxItems: eventapi.MaxLimit},
		"Error.code":                       {words: []string{eventapi.CodeInvalid, eventapi.CodeUnavailable}, open: true},
		"AgentsRequest.name":               agent,
		"AgentsRequest.after_name":         agent,
		"AgentsPage.agents":                {never: true, maxItems: agentapi.MaxPage},
		"Agent.name":                       agent,
		"Agent.revision":                   {minimum: 1},
		"Agent.definition":                 {object: true},
		"AgentPut.name":                    agent,
		"AgentPut.definition":              {object: true},
		"AgentDelete.name":                 agent,
		"AgentDelete.expect":               {minimum: 1},
		"Refusal.code":                     {words: []string{agentapi.CodeInvalid, agentapi.CodeConflict, agentapi.CodeUnavailable}, open: true},
		"Status.slots":                     {never: true, maxItems: admissionapi.MaxSlots},
		"TaskSubmit.subagent_type":         {minLength: 1, maxLength: maxName},
		"TaskSubmit.prompt":                {minLength: 1, maxLength: contract.MaxPromptBytes},
		"TaskSubmit.description":           description,
		"TaskSubmit.acceptance_criteria":   {maxItems: contract.MaxCriteria, items: &rule{maxLength: contract.MaxCriterionChars}},
		"TaskSubmit.thread_id":             {maxLength: contract.MaxThreadID},
		"TaskSubmit.timeout_seconds":       {minimum: 1, maximum: 86400},
		"TaskAccepted.status":              {words: []string{string(contract.TaskQueued)}},
		"Cancelling.status":                {words: []string{wire.StatusCancelling}},
		"Problem.code":                     {words: problemCodes(), open: true},
		"Problem.status":                   {minimum: 400, maximum: 599},
	}
}

func recordTypes() []string {
	var list []string
	seen := map[string]bool{}
	for _, t := range contract.EventTypes() {
		if r := t.Record(); !seen[r] {
			seen[r] = true
			list = append(list, r)
		}
	}
	return list
}

func problemCodes() []string {
	return []string{
		wire.CodeInvalidRequest, wire.CodeUnauthorized, wire.CodeForbidden, wire.CodeNotFound, wire.CodeMethodNotAllowed,
		wire.CodeAlreadyFinished, wire.CodeQueueFull, wire.CodePayloadTooLarge, wire.CodeUnavailable, wire.CodeInternal,
	}
}

func words[T ~string](list []T) []string {
	out := make([]string, len(list))
	for i, w := range list {
		out[i] = string(w)
	}
	return out
}
