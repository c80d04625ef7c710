package executor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/external"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
)

// job is a task that has begun.
type job struct {
	a     *attempt
	ctx   context.Context // ends with the task's time limit
	stop  context.CancelFunc
	model model.Model
	tools []tool.Tool
	// skills are those that the task is shown.
	skills *skill.Session
	// external is what it has of MCP servers.
	external *external.Offer
	files    *workspace.Copy // nil when they need no keeping
	done     func()
}

// begin does what comes before the first model call, up to the started event.
// Without a job the task has ended already, as the End or the error says.
func (a *attempt) begin(ctx context.Context) (*job, outcome.End, error) {
	req := a.grant.Request
	// The look comes after the claim and before the first effect: a cancellation
	// that was written before the claim is seen here, a later one is heard.
	cancelled, err := a.cancelSet(ctx)
	switch {
	case ctx.Err() != nil:
		return nil, outcome.End{}, context.Cause(ctx)
	case err != nil:
		return nil, outcome.End{}, err
	case cancelled:
		return nil, outcome.End{}, errCancelled
	}
	// The gate has refused such a request already; a grant could come from elsewhere.
	if err := req.CheckPolicy(); err != nil {
		return nil, outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error(), Code: contract.ErrPolicyDenied}), nil
	}
	if err := req.RequireIdentity(); err != nil {
		return nil, outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error(), Code: contract.ErrPolicyDenied}), nil
	}
	m, err := a.s.deps.Models.Get(a.modelName())
	if err != nil {
		return nil, outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error(), Code: contract.ErrInvalidRequest}), nil
	}
	skills, err := a.openSkills()
	if err != nil {
		return nil, outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error(), Code: contract.ErrInternal}), nil
	}
	tools, files, done, err := a.openTools(ctx)
	if errors.Is(err, errNoShell) {
		return nil, outcome.Map(outcome.Outcome{Kind: outcome.Exception, Message: err.Error(), Code: contract.ErrPolicyDenied}), nil
	}
	if err != nil {
		return nil, outcome.End{}, fmt.Errorf("tools: %w", err)
	}
	j := &job{a: a, model: m, skills: skills, files: files, done: done, stop: func() {}}
	begun := false
	defer func() {
		if !begun {
			j.close()
		}
	}()
	if err := j.openExternal(ctx, tools); err != nil {
		return nil, outcome.End{}, err
	}
	// The run clock starts with the slot, not with the request (ADM-17).
	j.ctx, j.stop = context.WithTimeoutCause(ctx, time.Duration(req.Subagent.TimeoutSeconds)*time.Second, errTimeout)
	a.turn.await(j.ctx)
	if j.ctx.Err() != nil { // it was stopped before its turn came
		return nil, outcome.End{}, context.Cause(j.ctx)
	}
	err = a.publish(j.ctx, event.Started(a.rec, contract.TaskStartedData{
		Description: req.Description, SubagentType: req.Subagent.Name, ModelName: m.ModelName(),
		MaxTurns: req.Subagent.MaxTurns, TimeoutSeconds: req.Subagent.TimeoutSeconds, Executor: a.s.cfg.Name,
	}, a.s.source(), a.s.now()))
	if err != nil {
		return nil, outcome.End{}, err
	}
	begun = true
	return j, outcome.End{}, nil
}

func (j *job) close() { j.stop(); j.done() }

// run runs the agent loop. The End it returns beside an error holds what was
// used so far.
func (j *job) run() (outcome.End, error) {
	defer j.close()
	a, req := j.a, j.a.grant.Request
	a.begun.Store(true)
	awake := sync.OnceFunc(a.watchProgress())
	defer awake() // whatever else ends the work
	chain, err := j.newChain()
	if err != nil {
		return outcome.End{}, err
	}
	ctx := sandbox.WithLease(tool.WithProgress(j.ctx, a.progressed), &a.lease)
	cfg := j.loop(chain)
	cfg.OnMessage = func(ctx context.Context, msg model.Message, usage *contract.Usage, modelName string) error {
		a.progressed()
		defer a.progressed() // what the bus takes is none of the work's silence
		steps, _ := a.steps.Snapshot(msg)
		for _, step := range steps {
			ev := event.Running(a.rec, step.Index, event.BuildStep(step.Message), modelName, usage, a.s.source(), a.s.now())
			if err := a.publish(ctx, ev); err != nil {
				return err
			}
		}
		return nil
	}
	res, err := agent.Run(ctx, cfg, j.firstMessages())
	awake()
	end := chain.spent(res, j.model)
	if ctx.Err() != nil {
		return end, context.Cause(ctx)
	}
	if err != nil {
		return end, err
	}
	o := outcome.Outcome{Kind: outcome.Kind(res.End), MaxTurns: req.Subagent.MaxTurns}
	if last := res.LastAssistant(); last != nil {
		o.LastAnswer = answer(*last)
	}
	if n := len(res.Messages); n > 0 {
		o.LastOther = event.Sanitize(res.Messages[n-1].Text)
	}
	for _, finish := range chain.finish {
		finish(&o, res)
	}
	return j.keepFiles(ctx, chain.harvest(outcome.Map(o), res).With(end))
}

// loop is how the task's conversation is driven, with its chain around it.
func (j *job) loop(chain *chain) agent.Config {
	a, def := j.a, j.a.grant.Request.Subagent
	return agent.Config{
		Agent: def.Name, Model: chain.model(j.model), Tools: j.tools, MaxTurns: def.MaxTurns,
		Gate: a.gate, Log: a.log, Tracer: a.s.tracer,
		Chain:          chain.pieces,
		OnDelta:        func(model.Delta) { a.progressed() },
		ToolMiddleware: []agent.ToolMiddleware{a.tellToolProgress},
	}
}

// modelName is the definition's model, or the parent's when it inherits (REG-12).
func (a *attempt) modelName() string {
	if name := a.grant.Request.Subagent.Model; name != "" && name != "inherit" {
		return name
	}
	return a.grant.Request.ParentModel
}

// allowed narrows the offered tools to what parent and definition leave; it
// never has the task tool (TOOL-01, TOOL-02, ISO-09).
func (a *attempt) allowed(tools []tool.Tool) []tool.Tool {
	req := a.grant.Request
	offered := make([]string, 0, len(tools))
	byName := make(map[string]tool.Tool, len(tools))
	for _, t := range tools {
		name := t.Spec().Name
		offered = append(offered, name)
		byName[name] = t
	}
	if req.OfferedTools != nil {
		offered = subagent.FilterTools(offered, req.OfferedTools, nil)
	}
	names := subagent.Chain(subagent.Stages{ParentScope: offered, Allow: req.Subagent.Tools, Deny: req.Subagent.DisallowedTools})
	out := make([]tool.Tool, 0, len(names))
	for _, n := range names {
		if t, ok := byName[n]; ok {
			out = append(out, t)
		}
	}
	return out
}
