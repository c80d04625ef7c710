package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
	"github.com/herdgate/herdgate/pkg/envelope"
)

func (a *app) contractCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "contract", Short: "print subjects, streams, event types and codes as JSON", Args: cobra.NoArgs,
		Long: `Prints as JSON what programs in other languages need to know: the names of this
deployment (they derive from nats.prefix) and the lists of event types, statuses and
codes. "contract schemas" has the JSON Schemas of all messages, "contract asyncapi" the
AsyncAPI document that says on which subject each of them travels.`,
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
	c.AddCommand(a.schemasCommand(), a.asyncAPICommand())
	return c
}

func (a *app) schemasCommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use: "schemas [NAME]", Short: "list the JSON Schemas of all messages, or print one", Args: cobra.MaximumNArgs(1),
		Long: `Lists the JSON Schemas (draft 2020-12) of everything that travels over NATS, prints the
one called NAME, or writes all of them to a folder. Each stands for itself and refers to
no other file.`,
		Example: "  herdgate contract schemas event.task_completed\n  herdgate contract schemas --output-dir schemas",
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return schema.Names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			stdout := cmd.OutOrStdout()
			switch {
			case dir != "" && len(args) > 0:
				return fmt.Errorf("--output-dir writes all schemas; leave out %q", args[0])
			case dir != "":
				return writeSchemas(dir)
			case len(args) > 0:
				b, err := schema.Get(strings.TrimSuffix(args[0], ".json"))
				if err != nil {
					return fmt.Errorf("%w; \"herdgate contract schemas\" lists them", err)
				}
				return write(stdout, b)
			case a.json():
				return printJSON(stdout, schema.Names())
			}
			return write(stdout, []byte(strings.Join(schema.Names(), "\n")+"\n"))
		},
	}
	c.Flags().StringVar(&dir, "output-dir", "", "write all schemas to this `DIR`, one file each")
	return c
}

func (a *app) asyncAPICommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use: "asyncapi", Short: "print the AsyncAPI document of all subjects and messages", Args: cobra.NoArgs,
		Long: `Prints the AsyncAPI document. It refers to the schemas as ./v1/NAME.json: --output-dir
writes it with them, for tools that follow references.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return write(cmd.OutOrStdout(), schema.AsyncAPI())
			}
			return errors.Join(writeSchemas(filepath.Join(dir, "v1")), os.WriteFile(filepath.Join(dir, "asyncapi.yaml"), schema.AsyncAPI(), 0o644))
		},
	}
	c.Flags().StringVar(&dir, "output-dir", "", "write asyncapi.yaml and the schemas to this `DIR`")
	return c
}

func writeSchemas(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range schema.Names() {
		b, err := schema.Get(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name+".json"), b, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
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
		Buckets: map[string]string{"tasks": n.TaskBucket(), "runs": n.RunBucket(), "agents": n.AgentBucket(), "blobs": n.BlobStore()},
		Keys: map[string]string{
			"task": contract.TaskKey(task), "lease": contract.LeaseKey(task), "cancel": contract.CancelKey(task), "trial": contract.TrialKey(task),
			"leader": contract.LeaderKey, "limits": contract.LimitsKey, "run": contract.RunKey(run),
		},
		Consumers:    map[string]string{"executors": n.GrantConsumer("<pool>"), "eventsink": n.SinkConsumer()},
		TaskStatuses: texts(contract.TaskStatuses()), RunStatuses: texts(contract.RunStatuses()),
		StopReasons: texts(contract.StopReasons()), ErrorCodes: texts(contract.ErrorCodes()),
		ProblemCodes: []string{
			wire.CodeInvalidRequest, wire.CodeUnauthorized, wire.CodeForbidden, wire.CodeNotFound, wire.CodeMethodNotAllowed,
			wire.CodeAlreadyFinished, wire.CodeQueueFull, wire.CodePayloadTooLarge, wire.CodeUnavailable, wire.CodeInternal,
		},
	}
	for _, t := range contract.EventTypes() {
		d.EventTypes = append(d.EventTypes, eventType{Type: string(t), Stored: t.Record(), DataSchema: envelope.DataSchema(t), Terminal: t.Terminal()})
	}
	return d
}

func texts[T ~string](list []T) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}
