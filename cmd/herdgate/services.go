package main

import (
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/stack"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/services/admission"
	"github.com/herdgate/herdgate/services/eventsink/serve"
	"github.com/herdgate/herdgate/services/executor"
	"github.com/herdgate/herdgate/services/lead"
)

// serves are the services by name.
func serves() map[string]process.Serve {
	return map[string]process.Serve{
		stack.Lead:      lead.Serve,
		stack.Admission: admission.Serve,
		stack.Executor:  executor.Serve,
		stack.Eventsink: serve.Serve,
	}
}

// serviceCommands are the verbs that run one service each.
func (a *app) serviceCommands() []*cobra.Command {
	contexts := func(o *process.Options) { o.Contexts = findContext }
	all := serves()
	gate := process.Command(stack.Admission, "run an admission process: the gate (admission status asks a running one)", all[stack.Admission], contexts)
	gate.AddCommand(a.admissionStatus())
	return []*cobra.Command{
		process.Command(stack.Lead, "run a lead: the HTTP API and the lead agent", all[stack.Lead], contexts),
		gate,
		process.Command(stack.Executor, "run an executor: models and tools of sub-agents", all[stack.Executor], contexts),
		process.Command(stack.Eventsink, "run an event sink: the event store", all[stack.Eventsink], contexts),
	}
}
