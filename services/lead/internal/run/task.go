package run

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/leaderr"
)

// task is the tool by which the lead delegates: to the model one blocking call
// that returns the result.
type task struct {
	d     *drive
	types []subagent.Definition
	// allowed is the run's own copy of the caller's policy (REG-14).
	allowed []string
	spec    model.ToolSpec
}

func newTaskTool(d *drive, types []subagent.Definition) *task {
	return &task{d: d, types: types, allowed: d.rec.Options.AllowedSubagents, spec: model.ToolSpec{
		Name: taskTool, Description: prompt.TaskTool(d.delegation(types)), Parameters: prompt.TaskParameters(types),
	}}
}

// Spec implements [tool.Tool].
func (t *task) Spec() model.ToolSpec { return t.spec }

// Sequenced implements [tool.Sequenced].
func (t *task) Sequenced() {}

// taskArgs are the arguments of a call.
type taskArgs struct {
	Description  string
	Prompt       string
	SubagentType string
	Criteria     []string
}

// describe is the description, or the beginning of the prompt without one.
func (a taskArgs) describe() string {
	if a.Description != "" {
		return a.Description
	}
	return strings.Join(strings.Fields(bound(a.Prompt, 4*ledgerDescriptionChars)), " ")
}

// taskShape shows a model what a call looks like.
const taskShape = `{"description": "a few words", "prompt": "the whole assignment", "subagent_type": "NAME", "acceptance_criteria": ["optional", "list"]}`

// decodeTaskArgs reads what a model wrote as the arguments of a call. Harmless
// slips are put right: a list of criteria may come as a text that holds one, or
// as a single text (F-022). Errors are words for the model.
func decodeTaskArgs(b []byte) (taskArgs, error) {
	var raw struct {
		Description  any             `json:"description"`
		Prompt       any             `json:"prompt"`
		SubagentType any             `json:"subagent_type"`
		Criteria     json.RawMessage `json:"acceptance_criteria"`
	}
	if err := contract.CheckDepth(b, contract.MaxDepth); err != nil {
		return taskArgs{}, err
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return taskArgs{}, fmt.Errorf("the arguments could not be read: %w; want %s", err, taskShape)
	}
	var a taskArgs
	for _, f := range []struct {
		name string
		from any
		to   *string
	}{{"description", raw.Description, &a.Description}, {"prompt", raw.Prompt, &a.Prompt}, {"subagent_type", raw.SubagentType, &a.SubagentType}} {
		switch v := f.from.(type) {
		case nil:
		case string:
			*f.to = strings.ToValidUTF8(strings.TrimSpace(v), "\uFFFD")
		default:
			return taskArgs{}, fmt.Errorf("%s must be a text; want %s", f.name, taskShape)
		}
	}
	var err error
	if a.Criteria, err = decodeCriteria(raw.Criteria); err != nil {
		return taskArgs{}, err
	}
	a.Description = bound(a.Description, contract.MaxDescriptionChars)
	return a, nil
}

func decodeCriteria(raw json.RawMessage) ([]string, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		text = strings.TrimSpace(text)
		if !strings.HasPrefix(text, "[") {
			return prompt.Criteria([]any{text}), nil
		}
		raw = json.RawMessage(text)
		if err := contract.CheckDepth(raw, contract.MaxDepth); err != nil {
			return nil, fmt.Errorf("acceptance_criteria: %w", err)
		}
	}
	var list []any
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("acceptance_criteria must be a list of texts, as in [\"…\", \"…\"]: %w", err)
	}
	return prompt.Criteria(list), nil
}

// Call implements [tool.Tool]: it hands the task to the gate and waits for its
// end. The same call again, after a take-over, awaits the same task.
func (t *task) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	d := t.d
	id := contract.NewTaskID(d.id, call.Message, call.Position)
	args, err := decodeTaskArgs(call.Args)
	if err != nil {
		return t.refuse(id, contract.ErrInvalidRequest, err.Error())
	}
	def, err := subagent.Choose(t.types, t.allowed, args.SubagentType)
	if err != nil {
		return t.refuse(id, contract.ErrPolicyDenied, err.Error())
	}
	switch {
	case args.Prompt == "":
		return t.refuse(id, contract.ErrInvalidRequest, "prompt is empty; want "+taskShape)
	case len(args.Prompt) > contract.MaxPromptBytes:
		return t.refuse(id, contract.ErrInvalidRequest, fmt.Sprintf("prompt has %d bytes; want at most %d. Put long material into a file of the workspace and name it.", len(args.Prompt), contract.MaxPromptBytes))
	}
	req := t.request(id, call, args, def)

	ctx, span := d.e.tracer.Start(ctx, "task", trace.WithAttributes(
		telemetry.AttrTaskID.String(string(id)), telemetry.AttrRunID.String(string(d.id)), telemetry.AttrSubagentType.String(def.Name),
	))
	defer span.End()
	o, err := t.run(ctx, req)
	if err != nil {
		telemetry.Fail(span, "not_awaited", "not awaited to its end")
		return tool.Result{}, err
	}
	span.SetAttributes(telemetry.AttrStatus.String(string(o.facts.Status)))
	if o.facts.StopReason != "" {
		span.SetAttributes(telemetry.AttrStopReason.String(string(o.facts.StopReason)))
	}
	if o.facts.Status != contract.ToolCompleted {
		class := string(o.code)
		if class == "" {
			class = string(o.facts.Status)
		}
		telemetry.Fail(span, class, "the task did not complete")
	}
	return t.result(id, o)
}

func (t *task) request(id contract.TaskID, call tool.Call, args taskArgs, def subagent.Definition) contract.TaskRequest {
	rec := t.d.snapshot()
	t.d.mu.Lock()
	identity := contract.Identity{UserID: t.d.conv.UserID, UserRole: t.d.conv.UserRole, Attributes: t.d.conv.Attributes, IsSubagent: true}
	t.d.mu.Unlock()
	def.Skills = skill.Merge(rec.Options.AvailableSkills, def.Skills) // SKILL-01
	return contract.TaskRequest{
		ContractVersion: contract.Version,
		TaskID:          id, RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant,
		ToolCallID: bound(call.ID, 256),
		Subagent:   def.Resolve(), Description: bound(args.describe(), ledgerDescriptionChars), Prompt: args.Prompt, AcceptanceCriteria: args.Criteria,
		ParentModel: rec.Model, AllowedSubagents: t.allowed,
		Identity:  identity,
		CreatedAt: t.d.e.deps.Now().UTC(),
	}
}

// ended is how a delegation came back.
type ended struct {
	facts delegation.Facts
	code  contract.ErrorCode
}

func mapped(o outcome.Outcome) ended {
	e := outcome.Map(o)
	return ended{facts: delegation.Facts{Status: e.ToolStatus, Error: e.Error, StopReason: e.StopReason}, code: e.ErrorCode}
}

// run submits the request and waits for the task's end. An error means that the
// run itself is over, or driven elsewhere.
func (t *task) run(ctx context.Context, req contract.TaskRequest) (ended, error) {
	d := t.d
	limits := d.limits
	seen := d.ends.of(req.TaskID)
	// The queue is first come, first served: the calls of one answer come in the
	// order in which the model wrote them.
	if err := tool.AwaitTurn(ctx); err != nil {
		return t.abandon(ctx, req.TaskID, seen)
	}
	acc, err := d.e.deps.Dispatch.Submit(ctx, req)
	tool.EndTurn(ctx)
	switch {
	case ctx.Err() != nil:
		return t.abandon(ctx, req.TaskID, seen)
	case errors.Is(err, leaderr.ErrQueueFull):
		return mapped(outcome.Outcome{Kind: outcome.AdmissionRejected}), nil
	case errors.Is(err, contract.ErrInvalidMessage), errors.Is(err, leaderr.ErrInvalid):
		return mapped(outcome.Outcome{Kind: outcome.ToolWrapperException, Code: contract.ErrInvalidRequest, Message: err.Error()}), nil
	case err != nil:
		// It may be stored all the same. It is not waited for, so it must not run.
		t.askToStop(ctx, req.TaskID, "the lead could not hand it over in time")
		return mapped(outcome.Outcome{Kind: outcome.ToolWrapperException, Code: contract.ErrInternal, Message: "The task could not be handed over: " + err.Error()}), nil
	}
	if acc.Duplicate {
		// An earlier driver made this call; the task may have ended long ago, its
		// event gone.
		if rec, err := t.record(ctx, req.TaskID); err == nil && rec.State.Terminal() {
			return t.fromRecord(ctx, rec), nil
		}
	}
	queue := limits.QueueTimeoutSeconds
	patience := time.Duration(queue+req.Subagent.TimeoutSeconds)*time.Second + d.e.cfg.WaitGrace
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	select {
	case <-seen:
		if ctx.Err() != nil {
			return t.abandon(ctx, req.TaskID, seen)
		}
		return t.collect(ctx, req.TaskID)
	case <-ctx.Done():
		return t.abandon(ctx, req.TaskID, seen)
	case <-deadline.C:
	}
	o := outcome.Outcome{Kind: outcome.ObserverGaveUp, TimeoutSeconds: int(patience / time.Second)}
	if rec, err := t.record(ctx, req.TaskID); err == nil {
		if rec.State.Terminal() {
			return t.fromRecord(ctx, rec), nil // its event alone is missing
		}
		o.Observed = rec.State
	}
	t.askToStop(ctx, req.TaskID, "the lead has waited for its whole time limit")
	return mapped(o), nil
}

// collect reads the end of a task whose terminal event was seen.
func (t *task) collect(ctx context.Context, id contract.TaskID) (ended, error) {
	rec, err := retryDoubt(ctx, func() (contract.TaskRecord, error) { return t.record(ctx, id) })
	switch {
	case err == nil && rec.State.Terminal():
		return t.fromRecord(ctx, rec), nil
	case ctx.Err() != nil:
		return ended{}, context.Cause(ctx)
	case errors.Is(err, bus.ErrNotFound):
		return mapped(outcome.Outcome{Kind: outcome.RecordVanished}), nil
	case err != nil:
		return mapped(outcome.Outcome{Kind: outcome.ToolWrapperException, Code: contract.ErrInternal, Message: "The task's end could not be read: " + err.Error()}), nil
	}
	// Nothing can be heard any more although the task has not ended.
	err = t.d.ends.failed()
	t.askToStop(ctx, id, "the lead cannot follow it")
	return mapped(outcome.Outcome{Kind: outcome.ToolWrapperException, Code: contract.ErrInternal, Message: fmt.Sprintf("The task's end could not be awaited: %v", err)}), nil
}

// abandon ends a wait because the run's work is over. If the run was cancelled,
// the task is cancelled and its end awaited for a while, so that what it spent
// counts (CANCEL-08); if another lead goes on with the run, the task does as
// well.
func (t *task) abandon(ctx context.Context, id contract.TaskID, seen <-chan struct{}) (ended, error) {
	cause := context.Cause(ctx)
	if !errors.Is(cause, errCancelled) {
		return ended{}, cause
	}
	d := t.d
	wait, cancel := context.WithTimeout(trace.ContextWithSpan(d.life, trace.SpanFromContext(ctx)), d.e.cfg.CancelGrace)
	defer cancel()
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for missing := 0; ; {
		err := d.e.deps.Dispatch.Cancel(wait, d.snapshot().Tenant, id, "the run was cancelled")
		var finished *leaderr.FinishedError
		switch {
		case errors.As(err, &finished):
			return t.cancelled(wait, id, cause)
		case errors.Is(err, leaderr.ErrNotFound):
			// Never stored; but a request in doubt may still land.
			if missing++; missing >= 2 {
				return ended{}, cause
			}
		case err != nil && wait.Err() == nil:
			d.log.Warn().Err(err).Str("task", string(id)).Msg("a task could not be cancelled; trying again")
		}
		select {
		case <-seen:
			return t.cancelled(wait, id, cause)
		case <-wait.Done():
			d.log.Warn().Str("task", string(id)).Msg("a cancelled task did not end in time; its usage is not counted")
			return ended{}, cause
		case <-again.C:
		}
	}
}

// cancelled takes the end of a task of a cancelled run into the ledger. There
// is no tool result: nobody reads it.
func (t *task) cancelled(ctx context.Context, id contract.TaskID, cause error) (ended, error) {
	if rec, err := t.record(ctx, id); err == nil && rec.State.Terminal() {
		o := t.fromRecord(ctx, rec)
		_, meta, err := o.told()
		if err == nil {
			err = t.settle(id, o, meta)
		}
		if err != nil {
			return ended{}, err
		}
	}
	return ended{}, cause
}

func (t *task) askToStop(ctx context.Context, id contract.TaskID, reason string) {
	ctx, cancel := context.WithTimeout(trace.ContextWithSpan(t.d.life, trace.SpanFromContext(ctx)), bus.WriteTimeout)
	defer cancel()
	err := t.d.e.deps.Dispatch.Cancel(ctx, t.d.snapshot().Tenant, id, reason)
	var finished *leaderr.FinishedError
	if err != nil && !errors.As(err, &finished) && !errors.Is(err, leaderr.ErrNotFound) {
		t.d.log.Warn().Err(err).Str("task", string(id)).Msg("a task that is not waited for any more could not be asked to stop")
	}
}

// record reads the task's record; bus.ErrNotFound if there is none.
func (t *task) record(ctx context.Context, id contract.TaskID) (contract.TaskRecord, error) {
	c := t.d.e.c
	m, err := c.Last(ctx, c.TaskStream(), c.KV(contract.TaskKey(id)))
	if err != nil {
		return contract.TaskRecord{}, err
	}
	if m.Deleted() {
		return contract.TaskRecord{}, bus.ErrNotFound
	}
	return contract.DecodeTaskRecord(m.Data)
}

// fromRecord makes the delegation's end out of the task's record alone.
func (t *task) fromRecord(ctx context.Context, rec contract.TaskRecord) ended {
	o := ended{code: rec.ErrorCode, facts: delegation.Facts{
		Status: contract.ToolStatus(rec.State), Error: rec.Error, ModelName: rec.ModelName, Usage: rec.Usage,
	}}
	if rec.StopReason.ValidForTask() {
		o.facts.StopReason = rec.StopReason
	}
	if rec.State != contract.StateCompleted {
		return o
	}
	if t.d.e.cfg.receiptsOn() {
		o.facts.Verdict = rec.ReceiptVerdict
	}
	result, err := retryUnavailable(ctx, func() (string, error) { return t.d.e.deps.Dispatch.Result(ctx, rec) })
	if err != nil {
		t.d.log.Warn().Err(err).Str("task", string(rec.TaskID)).Msg("the whole result of a task cannot be read; the lead gets its beginning")
		result = rec.Result + "\n[The rest of this result could not be read.]"
	}
	o.facts.Result = result
	return o
}

// refuse answers a call that was not delegated (STATUS-10: no event).
func (t *task) refuse(id contract.TaskID, code contract.ErrorCode, text string) (tool.Result, error) {
	o := mapped(outcome.Outcome{Kind: outcome.RejectedBeforeStart, Message: text})
	o.code = code
	return t.result(id, o)
}

// result settles the ledger's entry and makes what the model reads.
func (t *task) result(id contract.TaskID, o ended) (tool.Result, error) {
	text, meta, err := o.told()
	if err == nil {
		err = t.settle(id, o, meta)
	}
	if err != nil {
		return tool.Result{}, err
	}
	// A report is material: it is passed on whole, but cannot speak with the
	// framework's voice. What is stored and counted is the report as it came.
	return tool.Result{Text: prompt.Defuse(text), IsError: o.facts.Status != contract.ToolCompleted, Metadata: meta}, nil
}

// told returns what the lead's model and its program are told of the end.
func (o ended) told() (text string, meta map[string]any, err error) {
	text, summary := delegation.ResultMessage(o.facts.Status, o.facts.Result, o.facts.Error, o.facts.StopReason)
	o.facts.Error = summary.MetadataError
	meta, err = delegation.Metadata(o.facts)
	return text, meta, err
}

// settle stores how the delegation ended, and what it spent, in the ledger: what the
// metadata say, and never what a text says (LEDGER-02, LEDGER-03).
func (t *task) settle(id contract.TaskID, o ended, meta map[string]any) error {
	told, _ := delegation.ReadMetadata(meta)
	out := outcomeOf{
		Status: told.Status, StopReason: told.StopReason, ErrorCode: o.code,
		Brief: cmp.Or(told.ResultBrief, told.Error), SHA256: told.ResultSHA256, ModelName: told.ModelName, Usage: o.facts.Usage,
	}
	return t.d.write(t.d.life, func(rec *contract.RunRecord, _ *conversation) { rec.Delegations = settle(rec.Delegations, id, out) })
}

// retryUnavailable repeats a read that cannot be made at the moment, for as
// long as a read of the bucket is.
func retryUnavailable[T any](ctx context.Context, op func() (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*bus.WriteTimeout)
	defer cancel()
	retry := newBackOff()
	for {
		v, err := op()
		if err == nil || !errors.Is(err, leaderr.ErrUnavailable) || pause.For(ctx, retry.NextBackOff()) != nil {
			return v, err
		}
	}
}
