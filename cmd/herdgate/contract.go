package main

import (
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

func (a *app) contractCommand() *cobra.Command {
	return &cobra.Command{
		Use: "contract", Short: "print subjects, streams, event types and codes as JSON", Args: cobra.NoArgs,
		Long: `Prints as JSON what programs in other languages need to know: the names of this
deployment (they derive from nats.prefix) and the lists of event types, statuses and
codes. JSON Schemas of the messages are not part of it in this version; the Go types
are in pkg/contract.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			env, err := a.open(cmd.Context())
			if err != nil {
				return err
			}
			names, err := contract.NewNames(env.Config.NATS.Prefix)
			if err != nil {
				return err
			}
			return printJSON(cmd.OutOrStdout(), describeContract(names))
		},
	}
}

// description is the JSON of herdgate contract. Its lists only ever grow.
type description struct {
	ContractVersion string            `json:"contract_version"`
	Prefix          string            `json:"prefix"`
	Subjects        map[string]string `json:"subjects"`
	Streams         map[string]string `json:"streams"`
	Buckets         map[string]string `json:"buckets"`
	Keys            map[string]string `json:"keys"`
	Consumers       map[string]string `json:"consumers"`
	EventTypes      []eventType       `json:"event_types"`
	TaskStatuses    []string          `json:"task_statuses"`
	RunStatuses     []string          `json:"run_statuses"`
	StopReasons     []string          `json:"stop_reasons"`
	ErrorCodes      []string          `json:"error_codes"`
	ProblemCodes    []string          `json:"problem_codes"`
}

type eventType struct {
	Type string `json:"type"`
	// Stored is the event_type of the record that the event store keeps.
	Stored     string `json:"stored"`
	DataSchema string `json:"dataschema"`
	Terminal   bool   `json:"terminal,omitempty"`
}

// stored maps event types to the types of their records.
var stored = map[contract.EventType]string{
	contract.EventTaskQueued: contract.RecordQueued, contract.EventTaskAdmitted: contract.RecordAdmitted,
	contract.EventTaskStarted: contract.RecordStart, contract.EventTaskRunning: contract.RecordStep,
	contract.EventTaskCompleted: contract.RecordEnd, contract.EventTaskFailed: contract.RecordEnd,
	contract.EventTaskTimedOut: contract.RecordEnd, contract.EventTaskCancelled: contract.RecordEnd,
	contract.EventRunStarted: contract.RecordRunStarted, contract.EventRunMessage: contract.RecordRunMessage,
	contract.EventRunCompleted: contract.RecordRunCompleted, contract.EventRunFailed: contract.RecordRunFailed,
	contract.EventRunCancelled: contract.RecordRunCancelled,
}

func describeContract(n contract.Names) description {
	const task, run = contract.TaskID("<task_id>"), contract.RunID("<run_id>")
	d := description{
		ContractVersion: contract.Version, Prefix: n.Prefix(),
		Subjects: map[string]string{
			"task_request":     n.TaskRequest("<tenant>", task),
			"task_grant":       n.TaskGrant("<pool>", task),
			"event":            n.Event(contract.EventSubject{Tenant: "<tenant>", Thread: "<thread>", Run: run, Task: "<task_id or _>", Type: "<type>"}),
			"dead":             n.Dead("<origin>"),
			"task_submit":      n.Service("task", "submit"),
			"task_get":         n.Service("task", "get"),
			"task_cancel":      n.Service("task", "cancel"),
			"events_list":      n.Service("events", "list"),
			"admission_status": n.Service("admission", "status"),
		},
		Streams: map[string]string{
			"work": n.WorkStream(), "grants": n.GrantStream(), "events": n.EventStream(), "dead": n.DeadStream(), "advisories": n.AdvisoryStream(),
		},
		Buckets: map[string]string{"tasks": n.TaskBucket(), "runs": n.RunBucket(), "blobs": n.BlobStore()},
		Keys: map[string]string{
			"task": contract.TaskKey(task), "lease": contract.LeaseKey(task), "cancel": contract.CancelKey(task), "trial": contract.TrialKey(task),
			"leader": contract.LeaderKey, "limits": contract.LimitsKey, "run": contract.RunKey(run),
		},
		Consumers: map[string]string{"executors": n.GrantConsumer("<pool>"), "eventsink": n.SinkConsumer()},
		TaskStatuses: texts(contract.TaskQueued, contract.TaskRunning, contract.TaskCompleted, contract.TaskFailed, contract.TaskCancelled,
			contract.TaskTimedOut),
		RunStatuses: texts(contract.RunRunning, contract.RunCompleted, contract.RunFailed, contract.RunCancelled),
		StopReasons: texts(contract.StopTokenCapped, contract.StopTurnCapped, contract.StopLoopCapped, contract.StopSafetyCapped,
			contract.StopSubagentCapped, contract.StopLengthCapped),
		ErrorCodes: texts(contract.ErrQueueFull, contract.ErrQueueTimeout, contract.ErrExecutorLost, contract.ErrExecutorStalled, contract.ErrLLM,
			contract.ErrTool, contract.ErrPolicyDenied, contract.ErrInvalidRequest, contract.ErrInternal),
		ProblemCodes: []string{
			wire.CodeInvalidRequest, wire.CodeUnauthorized, wire.CodeForbidden, wire.CodeNotFound, wire.CodeMethodNotAllowed,
			wire.CodeAlreadyFinished, wire.CodeQueueFull, wire.CodePayloadTooLarge, wire.CodeUnavailable, wire.CodeInternal,
		},
	}
	for _, t := range contract.EventTypes() {
		d.EventTypes = append(d.EventTypes, eventType{Type: string(t), Stored: stored[t], DataSchema: "urn:herdgate:event:" + string(t) + ":1", Terminal: t.Terminal()})
	}
	return d
}

func texts[T ~string](list ...T) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}
