package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	// maxCrashes is how often a run is taken over from drivers that died; a run
	// that kills whoever drives it must come to an end.
	maxCrashes = 5
	// maxReminders is how often a lead that has nothing left to delegate, and
	// tries to, is asked to answer.
	maxReminders = 2
)

// resume drives a run on that was taken over.
func (e *Engine) resume(d *drive) {
	d.resumed = true
	ctx := telemetry.ContextWith(d.ctx, d.rec.TraceParent, "")
	_, span := e.tracer.Start(ctx, "invoke_agent lead", trace.WithAttributes(
		telemetry.AttrRunID.String(string(d.id)), telemetry.AttrTenant.String(string(d.rec.Tenant)),
		telemetry.AttrGenAIOperation.String("invoke_agent"), telemetry.AttrGenAIAgentName.String("lead"), telemetry.AttrGenAIConversationID.String(string(d.rec.ThreadID)),
		telemetry.AttrTakeover.Bool(true),
	))
	e.launch(d, span)
}

// drive takes the run to its end, or to where another lead goes on. It joins
// what it starts. ctx is the run's context with its span.
func (d *drive) drive(ctx context.Context) {
	keeper := make(chan struct{})
	go func() {
		defer close(keeper)
		d.keepLease()
	}()
	d.ends = newEnds(d)
	defer func() {
		d.end()
		<-keeper
		d.ends.join()
	}()

	end, err := d.work(ctx)
	span := trace.SpanFromContext(ctx)
	if err == nil {
		err = d.finish(end)
	}
	switch {
	case err == nil:
		span.SetAttributes(telemetry.AttrStatus.String(string(end.status)), telemetry.AttrStopReason.String(string(end.stop)))
		if u := d.snapshot().Usage; u != nil {
			span.SetAttributes(telemetry.AttrGenAIInputTokens.Int64(u.InputTokens), telemetry.AttrGenAIOutputTokens.Int64(u.OutputTokens))
		}
		if end.status == contract.RunCancelled {
			span.AddEvent(telemetry.EventCancelled)
		}
		if end.status == contract.RunFailed {
			telemetry.Fail(span, string(end.code), "the run failed")
		}
		d.e.metrics.ended.WithLabelValues(string(end.status)).Inc()
		d.log.Info().Str("status", string(end.status)).Str("stop_reason", string(end.stop)).Msg("run ended")
	case errors.Is(err, errDraining):
		d.handOver()
	default:
		// The lease runs out by itself; whoever hears of it goes on.
		telemetry.Fail(span, "driven_elsewhere", "driven on elsewhere")
		d.log.Warn().Err(err).Msg("stopped driving a run that has not ended")
	}
}

// handOver closes the lease of a run that has not ended.
func (d *drive) handOver() {
	ctx, cancel := context.WithTimeout(d.life, bus.WriteTimeout)
	defer cancel()
	if err := d.giveUp(ctx); err != nil {
		d.log.Warn().Err(err).Msg("a run could not be handed over; it goes on when its lease has run out")
		return
	}
	d.log.Info().Msg("handed over a run")
}

// ending is how a run ends.
type ending struct {
	status contract.RunStatus
	output string
	err    string
	code   contract.ErrorCode
	stop   contract.StopReason
}

func failed(code contract.ErrorCode, text string) ending {
	return ending{status: contract.RunFailed, code: code, err: text}
}

// work does the run's work. An error means that the run has not ended and is
// not ours any more.
func (d *drive) work(ctx context.Context) (ending, error) {
	if err := d.prepare(ctx); err != nil {
		return d.judge(ctx, err)
	}
	if d.unreadable != nil {
		return failed(contract.ErrInternal, "The run's state could not be read: "+d.unreadable.Error()), nil
	}
	if d.conv.Crashes > maxCrashes {
		return failed(contract.ErrInternal, fmt.Sprintf("The run was given up: %d leads in a row stopped while they drove it.", d.conv.Crashes)), nil
	}
	cfg, messages, release, err := d.setUp()
	if err != nil {
		return d.judge(ctx, err)
	}
	defer release()
	end, err := d.converse(ctx, cfg, messages)
	if err != nil {
		return d.judge(ctx, err)
	}
	return end, nil
}

// judge tells an end of the run from an end of our driving it.
func (d *drive) judge(ctx context.Context, err error) (ending, error) {
	cause := context.Cause(ctx)
	switch {
	case errors.Is(cause, errCancelled):
		d.abandonInherited(ctx)
		return ending{status: contract.RunCancelled, err: "The run was cancelled."}, nil
	case cause != nil:
		return ending{}, cause
	case errors.Is(err, errLost):
		return ending{}, err
	case errors.Is(err, errTooLarge):
		return failed(contract.ErrInternal, "The run's state became too large to be kept: "+err.Error()), nil
	case errors.Is(err, bus.ErrDoubt), errors.Is(err, bus.ErrFull):
		return ending{}, err
	}
	d.log.Error().Err(err).Msg("a run failed for a fault of ours")
	return failed(contract.ErrInternal, err.Error()), nil
}

// abandonInherited cancels the tasks of a cancelled run that an earlier driver
// submitted and this one has not come to wait for, and waits for their ends like
// for any (CANCEL-08).
func (d *drive) abandonInherited(ctx context.Context) {
	if !d.resumed {
		return // each task has its call, which has cancelled it
	}
	t := &task{d: d}
	var wg sync.WaitGroup
	for _, e := range d.snapshot().Delegations {
		if e.Status != contract.DelegationInProgress {
			continue
		}
		wg.Go(func() {
			// It returns the cause, or what kept an end from being written down.
			if _, err := t.abandon(ctx, e.TaskID, d.ends.of(e.TaskID)); !errors.Is(err, errCancelled) {
				d.log.Warn().Err(err).Str("task", string(e.TaskID)).Msg("the end of a cancelled task could not be taken into the run")
			}
		})
	}
	wg.Wait()
}

// prepare does what every driver does first: see whether the run was cancelled,
// and tell that it has started, once.
func (d *drive) prepare(ctx context.Context) error {
	cancelled, err := retryDoubt(ctx, func() (bool, error) {
		m, err := d.e.c.Last(ctx, d.e.c.RunStream(), d.e.c.RunKV(contract.RunCancelKey(d.id)))
		if errors.Is(err, bus.ErrNotFound) {
			return false, nil
		}
		return err == nil && !m.Deleted(), err
	})
	if err != nil {
		return fmt.Errorf("read the cancellation: %w", err)
	}
	life, stop := d.untilDrain()
	defer stop()
	if err := d.announce(life); err != nil {
		return err
	}
	if cancelled {
		d.stop(errCancelled)
		return errCancelled
	}
	d.limits, err = retryDoubt(ctx, func() (contract.AdmissionLimits, error) { return d.e.deps.Dispatch.Limits(ctx) })
	return err
}

// setUp makes the agent's configuration and its messages.
func (d *drive) setUp() (agent.Config, []model.Message, func(), error) {
	release := func() {}
	m, err := d.e.deps.Models.Get(d.rec.Model)
	if err != nil {
		return agent.Config{}, nil, release, err
	}
	var tools []tool.Tool
	if d.e.deps.Tools != nil {
		if tools, release, err = d.e.deps.Tools(d.rec.Tenant, d.rec.ThreadID); err != nil {
			return agent.Config{}, nil, func() {}, fmt.Errorf("workspace of the thread: %w", err)
		}
		if release == nil {
			release = func() {}
		}
	}
	if tools, err = d.openExternal(d.ctx, tools); err != nil {
		release()
		return agent.Config{}, nil, func() {}, err
	}
	var types []subagent.Definition
	if d.rec.Options.SubagentEnabled {
		types = d.e.deps.Catalogue.Visible(d.rec.Options.AllowedSubagents, d.e.cfg.ShellAllowed)
	}
	d.guards = guard.New(d.e.cfg.Guards)
	compactor, compaction, err := d.compaction(m)
	if err != nil {
		release()
		return agent.Config{}, nil, func() {}, err
	}
	if err := d.openSkills(); err != nil { // SKILL-09
		release()
		return agent.Config{}, nil, func() {}, err
	}
	// Its sub-agents write into the same workspace.
	pieces, err := agent.Chain(slices.Concat(d.guards.Pieces(), []agent.Piece{guard.ReadBeforeWrite()}, compaction, d.skills.Pieces(), d.externalPieces())...)
	if err != nil {
		release()
		return agent.Config{}, nil, func() {}, err
	}
	cfg := agent.Config{
		Agent: "lead", Model: m, Tools: tools, Gate: d.gate, Chain: pieces,
		Log: d.log, Tracer: d.e.tracer,
	}
	if cfg, err = withReceipts(cfg, d.receipts()); err != nil {
		release()
		return agent.Config{}, nil, func() {}, err
	}
	if err := d.deferredAsMeant(cfg); err != nil {
		release()
		return agent.Config{}, nil, func() {}, err
	}
	cfg.OnShorten = func(_ context.Context, now agent.Result) error {
		return d.shortened(compactor, now, d.spent.Add(now.Usage))
	}
	if d.delegates = len(types) > 0; d.delegates {
		cfg.AfterModel = []agent.Hook{d.trim}
		if d.conv.Reminders == 0 {
			cfg.Tools = append(cfg.Tools, newTaskTool(d, types))
		}
	}

	// What an earlier driver left open and cannot be asked any more is answered
	// before the loop sees it.
	d.mu.Lock()
	d.conv.answerInterrupted()
	number(d.conv.Messages, d.conv.Gone.Messages)
	cfg.Gone = d.conv.Gone
	d.guards.Replay(d.conv.Messages[d.conv.History:], d.conv.Usage)
	d.skills.Replay(d.conv.Skills, d.conv.Messages[d.conv.History:])
	d.conv.Skills = d.skills.State()
	for _, m := range d.conv.Messages[d.conv.History:] {
		d.conv.Promoted = d.conv.Promoted.With(m)
	}
	d.external.Replay(d.conv.Promoted, nil, d.rec.Input)
	messages := append([]model.Message{{ID: "m0", Role: model.RoleSystem, Text: d.systemPrompt(types)}}, d.conv.Messages...)
	d.mu.Unlock()
	return cfg, messages, release, nil
}

// systemPrompt is what the lead's model is told first.
func (d *drive) systemPrompt(types []subagent.Definition) string {
	text := prompt.Lead(d.e.cfg.RoleText, d.delegation(types))
	for _, s := range []string{d.skills.Section(), d.external.Section(), d.external.Routing()} {
		if s != "" {
			text += "\n" + s + "\n"
		}
	}
	return text
}

// delegation is what the model is told about its sub-agents.
func (d *drive) delegation(types []subagent.Definition) prompt.Delegation {
	told := prompt.Delegation{Options: d.rec.Options, Types: types}
	if s := d.e.cfg.Settings; s != nil && s.Verification.ReceiptsEnabled {
		told.Citation = receipt.Example() // ROUTE-13
	}
	return told
}

// converse runs the loop until there is an answer.
func (d *drive) converse(ctx context.Context, cfg agent.Config, messages []model.Message) (ending, error) {
	for {
		turns, spent := d.budget()
		if turns < 1 {
			return d.conclusion(outcome.TurnBudgetExhausted, agent.Result{Messages: messages}.LastAssistant()), nil
		}
		cfg.MaxTurns, d.spent = turns, spent
		cfg.OnMessage = func(ctx context.Context, msg model.Message, usage *contract.Usage, name string) error {
			return d.record(ctx, msg, spent.Add(usage), name)
		}
		res, err := agent.Run(ctx, cfg, messages)
		if err != nil {
			return ending{}, err
		}
		kind := outcome.StreamFinished
		if res.End == agent.EndTurns {
			kind = outcome.TurnBudgetExhausted
		}
		last := res.LastAssistant()
		if last == nil || !d.capped(*last) || kind != outcome.StreamFinished {
			return d.conclusion(kind, last), nil
		}
		note, err := d.remind(ctx)
		if err != nil {
			return ending{}, err
		}
		if note == nil {
			return d.conclusion(kind, &model.Message{Text: d.ledgerAnswer(last.Text)}), nil
		}
		// The tool is taken away as well: what is not offered is asked for less.
		messages, cfg.Gone, cfg.Tools = append(res.Messages, *note), res.Gone, withoutTask(cfg.Tools)
	}
}

// budget returns the model calls that are left, and what the lead has spent.
func (d *drive) budget() (turns int, spent *contract.Usage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.e.cfg.MaxTurns - d.conv.Turns, d.conv.Usage
}

// capped reports whether the message is what was left of an answer that only
// wanted to delegate, with nothing left of the allowance.
func (d *drive) capped(m model.Message) bool {
	return len(m.ToolCalls) == 0 && strings.HasSuffix(m.Text, delegation.LimitNotice)
}

// remind asks the lead to answer without delegating, or returns nil when that
// was done often enough.
func (d *drive) remind(ctx context.Context) (*model.Message, error) {
	d.mu.Lock()
	done := d.conv.Reminders >= maxReminders
	d.mu.Unlock()
	if done {
		return nil, nil
	}
	note := model.Message{Role: model.RoleUser, Text: prompt.NothingLeft, Metadata: map[string]any{model.MetaHidden: true}}
	err := d.write(d.life, func(_ *contract.RunRecord, conv *conversation) {
		conv.Reminders++
		note.ID = fmt.Sprintf("m%d", conv.Gone.Messages+len(conv.Messages)+1)
		conv.Messages = append(conv.Messages, note)
	})
	if err != nil {
		return nil, err
	}
	return &note, d.gate()
}

// ledgerAnswer is the answer of a lead that would not give one: what its tasks
// found, so that their work is not lost.
func (d *drive) ledgerAnswer(text string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var b strings.Builder
	b.WriteString(text)
	for _, e := range d.rec.Delegations {
		fmt.Fprintf(&b, "\n\n%s (%s):\n%s", e.Description, e.Status, e.ResultBrief)
	}
	return b.String()
}

func (d *drive) hasDelegated() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.rec.Delegations) > 0
}

// conclusion maps the end of the loop to the end of the run.
func (d *drive) conclusion(kind outcome.Kind, last *model.Message) ending {
	d.mu.Lock()
	stop := d.rec.StopReason
	d.mu.Unlock()
	o := outcome.Outcome{Kind: kind, MaxTurns: d.e.cfg.MaxTurns}
	// Why a guard ended the run counts more than what was cut on the way (GUARD-13).
	capped := false
	for _, g := range d.guards.Take() {
		o.Guards, o.NoText = append(o.Guards, g.Reason), o.NoText || g.NoText
		if capped = capped || g.Reason.ValidForTask(); !capped {
			stop = g.Reason
		}
	}
	if last != nil {
		o.LastAnswer = &outcome.Answer{Text: last.Text, ErrorFallback: last.ErrorFallback, ErrorDetail: last.ErrorDetail}
		if last.FinishReason == "length" && stop == "" {
			stop = contract.StopLengthCapped
		}
	}
	if capped && o.NoText && last != nil && d.hasDelegated() {
		// What its tasks found is usable all the same.
		o.LastAnswer.Text, o.NoText = d.ledgerAnswer(last.Text), false
	}
	if kind == outcome.StreamFinished && (last == nil || strings.TrimSpace(last.Text) == "" && !last.ErrorFallback) {
		// An empty answer is never a success (F-012).
		return failed(contract.ErrLLM, "The model gave no answer, although it was asked again.")
	}
	e := outcome.Map(o)
	end := ending{status: contract.RunStatus(e.State), output: e.Result, err: e.Error, code: e.ErrorCode, stop: e.StopReason}
	if end.stop == "" || stop == contract.StopSubagentCapped && !capped {
		end.stop = stop
	}
	return end
}

// trim is the hook that enforces the limits before anything is recorded.
func (d *drive) trim(_ context.Context, msg model.Message) model.Message {
	d.mu.Lock()
	ledger := make([]delegation.Entry, len(d.rec.Delegations))
	for i, e := range d.rec.Delegations {
		ledger[i] = delegation.Entry{ID: string(e.TaskID), RunID: string(e.RunID)}
	}
	opts := d.rec.Options
	d.mu.Unlock()
	out, t := delegation.Trim(msg, delegation.Limits{
		MaxConcurrent: opts.MaxConcurrentSubagents, MaxTotal: opts.MaxTotalSubagents, Ledger: ledger, RunID: string(d.id),
	})
	if t.Changed {
		d.log.Info().Int("dropped", len(t.Dropped)).Int("used", t.Used).Bool("run_limit", t.Capped).Msg("delegations above the limit were dropped")
	}
	return out
}

// record keeps a message of the loop. What has effects is stored before they
// happen: an answer with calls before any of them runs, the results of a step
// together. An answer without calls is stored with what follows from it, mostly
// the run's end.
func (d *drive) record(ctx context.Context, msg model.Message, usage *contract.Usage, modelName string) error {
	change := func(rec *contract.RunRecord, conv *conversation) {
		if msg.Role == model.RoleAssistant {
			conv.Turns++
			conv.Crashes = 0 // it gets on
			conv.Usage, conv.ModelName = usage, modelName
			if d.delegates {
				rec.Delegations = capture(rec.Delegations, d.id, msg, conv.assistants(), d.e.deps.Now())
				if strings.HasSuffix(msg.Text, delegation.LimitNotice) {
					rec.StopReason = contract.StopSubagentCapped
				}
			}
		}
		if msg.Role == model.RoleTool && msg.ToolName == taskTool && d.delegates {
			msg.Metadata = stamp(msg)
			answer, number, _ := conv.open()
			for i, call := range answer.ToolCalls {
				if call.ID != msg.ToolCallID {
					continue
				}
				id := contract.NewTaskID(d.id, number, i)
				rec.Delegations = settle(rec.Delegations, id, outcomeOf{Status: contract.ToolFailed, ErrorCode: contract.ErrInvalidRequest, Brief: brief(msg.Text)})
				for j := range rec.Delegations {
					if rec.Delegations[j].TaskID == id {
						rec.Delegations[j].MessageID = msg.ID
					}
				}
			}
		}
		conv.Messages = append(conv.Messages, msg)
		conv.Skills = conv.Skills.With(msg, d.skills.Known)
		conv.Promoted = conv.Promoted.With(msg)
	}
	d.mu.Lock()
	done := len(msg.ToolCalls) > 0
	if msg.Role == model.RoleTool {
		_, _, open := d.conv.open()
		done = len(open) <= 1
	}
	if !done {
		rec, conv := d.rec, d.conv.clone()
		rec.Delegations = append([]contract.Delegation(nil), rec.Delegations...)
		change(&rec, &conv)
		d.rec, d.conv = rec, conv
		d.mu.Unlock()
		return d.gate()
	}
	d.mu.Unlock()
	// Not under the run's context: what was done is stored even if the run is
	// being cancelled. The lease's clock bounds it.
	if err := d.write(d.life, change); err != nil {
		return err
	}
	life, stop := d.untilDrain()
	defer stop()
	return d.tell(life)
}

// stamp adds the status to a failed call that never reached the tool, so that
// its metadata says what its text says (TOOL-07).
func stamp(msg model.Message) map[string]any {
	if _, ok := delegation.ReadMetadata(msg.Metadata); ok {
		return msg.Metadata
	}
	meta, err := delegation.Metadata(delegation.Facts{Status: contract.ToolFailed, Error: msg.Text})
	if err != nil {
		return msg.Metadata
	}
	if r, ok := msg.Metadata[receipt.Key]; ok {
		meta[receipt.Key] = r
	}
	return meta
}

// finish writes the run's end: pointer of the thread, terminal record, events,
// and closes the lease.
func (d *drive) finish(end ending) error {
	// A cancelled run's context is over; its end is written all the same.
	ctx, cancel := context.WithTimeout(d.life, 4*bus.WriteTimeout)
	defer cancel()
	d.mu.Lock()
	rec := d.rec
	d.mu.Unlock()
	if err := d.e.point(ctx, rec); err != nil {
		return err
	}
	err := d.write(ctx, func(rec *contract.RunRecord, conv *conversation) {
		now := d.e.deps.Now().UTC()
		rec.Status, rec.Error, rec.ErrorCode, rec.StopReason = end.status, bound(end.err, contract.MaxErrorChars), end.code, end.stop
		rec.Output = shorten(end.output, maxOutputBytes)
		rec.FinishedAt = &now
		for i := range rec.Delegations {
			if e := &rec.Delegations[i]; e.Status == contract.DelegationInProgress {
				// Its end was not seen in time. Nobody will look again, and an
				// ended run has nothing that runs (F-016).
				e.Status, e.ResultBrief = string(contract.ToolCancelled), "The run ended before the task's end was seen."
			}
		}
	})
	if err != nil {
		return err
	}
	if err := d.tell(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	rec, rev := d.rec, d.rev
	d.closed = true
	d.mu.Unlock()
	return d.e.close(ctx, rec, rev)
}

// retryDoubt repeats what is in doubt, or refused because a stream is full at the
// moment, while ctx allows.
func retryDoubt[T any](ctx context.Context, op func() (T, error)) (T, error) {
	retry := newBackOff()
	for {
		v, err := op()
		if err == nil || !errors.Is(err, bus.ErrDoubt) && !errors.Is(err, bus.ErrFull) || pause.For(ctx, retry.NextBackOff()) != nil {
			return v, err
		}
	}
}

func withoutTask(tools []tool.Tool) []tool.Tool {
	var out []tool.Tool
	for _, t := range tools {
		if t.Spec().Name != taskTool {
			out = append(out, t)
		}
	}
	return out
}
