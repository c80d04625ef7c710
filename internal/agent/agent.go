// Package agent is the loop that leads and sub-agents share: ask the model, run
// the tools it calls, show it the results, until it answers without a call.
//
// The loop knows nothing of NATS, tasks or runs. Behaviour is added around it:
// middleware wraps the model and the tools, hooks change an answer before any
// tool runs, and the gate is asked before every effect, so that work whose lease
// is gone stops at the next boundary at the latest.
//
// What always holds: a conversation that goes to a provider has exactly one
// result for each call; a call that cannot be run is answered with an error that
// the model can read, and its siblings run all the same; a provider's failure
// becomes a marked last message, never a lost conversation.
package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Generate is a model call as middleware sees it.
type Generate func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error)

// ModelMiddleware wraps model calls. The first of a list is the outermost.
type ModelMiddleware func(Generate) Generate

// Invoke is a tool call as middleware sees it.
type Invoke func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error)

// ToolMiddleware wraps tool calls. The first of a list is the outermost.
type ToolMiddleware func(Invoke) Invoke

// Hook changes an assistant message after the model has spoken and before it is
// recorded or any tool runs. It may be given any message and must keep its id.
type Hook func(ctx context.Context, msg model.Message) model.Message

// ResultHook changes the result of a call. It is called from several goroutines
// at once.
type ResultHook func(call model.ToolCall, res tool.Result) tool.Result

// Config says how a conversation is driven.
type Config struct {
	// Agent is the type of the agent: "lead" or a sub-agent's name.
	Agent string
	Model model.Model
	Tools []tool.Tool
	// MaxTurns bounds the model calls (GUARD-11); at least 1.
	MaxTurns int
	// MaxParallel bounds the tools that run at once; 0 means 64.
	MaxParallel int

	// Chain stands around the model and the tools, as [Chain] orders it. What is in
	// the lists below is outside of it; their hooks run after its own.
	Chain           []Piece
	ModelMiddleware []ModelMiddleware
	ToolMiddleware  []ToolMiddleware
	BeforeModel     []Before
	Spent           []func(*contract.Usage)
	AfterModel      []Hook
	AfterTool       []ResultHook

	// Gate is asked before every model call and every tool start, from several
	// goroutines at once; an error stops the tools that run and ends the loop with
	// it. Nil always allows.
	Gate func() error
	// OnMessage is told of every answer and every result that the loop appends, in
	// order, with the usage so far. An error ends the loop with it. Nil ignores them.
	OnMessage func(ctx context.Context, msg model.Message, usage *contract.Usage, modelName string) error
	// Gone is what earlier shortenings took out of the messages that the loop begins with.
	Gone Gone
	// OnShorten is told when a piece has put a shorter conversation in the place of
	// the one so far, which the result holds from then on. An error ends the loop
	// with it. Nil ignores it.
	OnShorten func(ctx context.Context, now Result) error
	// OnDelta is told of what streams in. Nil ignores it.
	OnDelta func(model.Delta)

	Log    zerolog.Logger
	Tracer trace.Tracer
}

// End is why the loop ended by itself.
type End string

// The ends of a loop.
const (
	// EndAnswered: the model answered without a call, or its provider failed and
	// the last message is marked so.
	EndAnswered End = "stream_finished"
	// EndTurns: the model calls were used up.
	EndTurns End = "turn_budget_exhausted"
)

// Result is a finished conversation.
type Result struct {
	End      End
	Messages []model.Message
	// Usage is the sum of what the provider reported, or nil.
	Usage *contract.Usage
	// ModelName is the model as the provider named it last.
	ModelName string
	Turns     int
	// Gone is what was taken out of Messages.
	Gone Gone
}

// LastAssistant returns the newest assistant message, or nil.
func (r Result) LastAssistant() *model.Message {
	for i := len(r.Messages) - 1; i >= 0; i-- {
		if r.Messages[i].Role == model.RoleAssistant {
			return &r.Messages[i]
		}
	}
	return nil
}

// maxShortenings is how often in one turn a conversation that a provider refuses as
// too long is shortened and sent again.
const maxShortenings = 3

// maxNudges is how often an empty answer is asked for again before it stands.
const maxNudges = 2

// Run drives the conversation to its end. It returns an error when ctx is done
// (ctx's cause), when the gate or OnMessage refuses, or for a fault of ours; the
// Result then holds what there was. A panic is such a fault: the process has
// other conversations. All tools have returned when Run does.
func Run(ctx context.Context, cfg Config, messages []model.Message) (res Result, err error) {
	l := &loop{result: Result{Messages: messages, Gone: cfg.Gone}}
	defer func() {
		if f := fault.Of(recover()); f != nil {
			f.Log(cfg.Log.Error()).Msg("the agent loop panicked")
			res, err = l.result, f
		}
	}()
	l = newLoop(cfg, messages) // it asks tools and pieces already
	err = l.run(ctx)
	return l.result, err
}

type loop struct {
	cfg      Config
	generate Generate
	invoke   Invoke
	tools    map[string]tool.Tool
	specs    []model.ToolSpec
	result   Result
	nudges   int
	// calls are the ids of all calls so far, also of those that are gone.
	calls map[string]bool
	// repaired is the conversation as it goes into requests.
	repaired repairer
}

func newLoop(cfg Config, messages []model.Message) *loop {
	if cfg.MaxParallel <= 0 {
		cfg.MaxParallel = 64
	}
	if cfg.MaxTurns <= 0 {
		cfg.MaxTurns = 1
	}
	if cfg.Gate == nil {
		cfg.Gate = func() error { return nil }
	}
	if cfg.Tracer == nil {
		cfg.Tracer = noop.NewTracerProvider().Tracer("")
	}
	cfg = cfg.flat()
	l := &loop{cfg: cfg, tools: make(map[string]tool.Tool, len(cfg.Tools))}
	for _, t := range cfg.Tools {
		spec := t.Spec()
		l.tools[spec.Name] = t
		l.specs = append(l.specs, spec)
	}
	l.generate = l.callModel
	for i := len(cfg.ModelMiddleware) - 1; i >= 0; i-- {
		l.generate = cfg.ModelMiddleware[i](l.generate)
	}
	l.invoke = l.wrapToolErrors(func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		return t.Call(ctx, call)
	})
	for i := len(cfg.ToolMiddleware) - 1; i >= 0; i-- {
		l.invoke = cfg.ToolMiddleware[i](l.invoke)
	}
	// What middleware itself does wrong is no reason to lose the run either.
	l.invoke = l.wrapToolErrors(l.invoke)
	l.result.Messages, l.result.Gone = append([]model.Message(nil), messages...), cfg.Gone
	l.calls = map[string]bool{}
	for _, m := range messages {
		for _, c := range m.ToolCalls {
			l.calls[c.ID] = true
		}
	}
	return l
}

// flat writes the chain out into the lists.
func (c Config) flat() Config {
	var hooks []Hook
	var results []ResultHook
	c.ModelMiddleware, c.ToolMiddleware = slices.Clone(c.ModelMiddleware), slices.Clone(c.ToolMiddleware)
	c.BeforeModel, c.Spent = slices.Clone(c.BeforeModel), slices.Clone(c.Spent)
	for _, p := range c.Chain {
		if p.Model != nil {
			c.ModelMiddleware = append(c.ModelMiddleware, p.Model)
		}
		if p.Tool != nil {
			c.ToolMiddleware = append(c.ToolMiddleware, p.Tool)
		}
		if p.BeforeModel != nil {
			c.BeforeModel = append(c.BeforeModel, p.BeforeModel)
		}
		if p.Spent != nil {
			c.Spent = append(c.Spent, p.Spent)
		}
		if p.AfterModel != nil {
			hooks = append([]Hook{p.AfterModel}, hooks...)
		}
		if p.AfterTool != nil {
			results = append([]ResultHook{p.AfterTool}, results...)
		}
	}
	c.AfterModel = append(hooks, c.AfterModel...)
	c.AfterTool = append(results, c.AfterTool...)
	return c
}

func (l *loop) run(ctx context.Context) error {
	if err := l.finishOpenCalls(ctx); err != nil {
		return err
	}
	for {
		if l.result.Turns >= l.cfg.MaxTurns {
			l.result.End = EndTurns
			return nil
		}
		msg, err := l.ask(ctx)
		if err != nil {
			return err
		}
		if len(msg.ToolCalls) > 0 {
			if err := l.runTools(ctx, msg); err != nil {
				return err
			}
			continue
		}
		if strings.TrimSpace(msg.Text) == "" && !msg.ErrorFallback && l.nudges < maxNudges {
			l.nudges++
			l.result.Messages = append(l.result.Messages, model.Message{ID: l.messageID(), Role: model.RoleUser, Text: prompt.Nudge, Metadata: map[string]any{model.MetaHidden: true}})
			continue
		}
		l.result.End = EndAnswered
		return nil
	}
}

// finishOpenCalls answers calls that an earlier life of this conversation left
// open at its end: a loop that is taken over goes on where it was.
func (l *loop) finishOpenCalls(ctx context.Context) error {
	n := len(l.result.Messages)
	answered := map[string]bool{}
	i := n - 1
	for ; i >= 0 && l.result.Messages[i].Role == model.RoleTool; i-- {
		answered[l.result.Messages[i].ToolCallID] = true
	}
	if i < 0 || l.result.Messages[i].Role != model.RoleAssistant {
		return nil
	}
	last := l.result.Messages[i]
	for _, c := range last.ToolCalls {
		if !answered[c.ID] {
			return l.runSome(ctx, i, last, answered)
		}
	}
	return nil
}

// ask makes one turn: a model call and the hooks.
func (l *loop) ask(ctx context.Context) (model.Message, error) {
	if err := l.stopped(ctx); err != nil {
		return model.Message{}, err
	}
	if _, err := l.before(ctx, false); err != nil {
		return model.Message{}, err
	}
	l.result.Turns++
	resp, err := l.request(ctx)
	// What a piece takes out may not be enough at once: it keeps what it can.
	for range maxShortenings {
		if err == nil || ctx.Err() != nil || !model.TooLong(err) {
			break
		}
		shorter, serr := l.before(ctx, true)
		if serr != nil {
			return model.Message{}, serr
		}
		if !shorter {
			break
		}
		resp, err = l.request(ctx)
	}
	if ctx.Err() != nil {
		return model.Message{}, context.Cause(ctx)
	}
	msg := resp.Message
	if err != nil {
		var failed *model.Error
		if !errors.As(err, &failed) {
			return model.Message{}, fmt.Errorf("model %s: %w", l.cfg.Model.Name(), err)
		}
		// The failure becomes the last message, marked, so that whoever maps the
		// outcome need not guess from text (STATUS-05).
		msg = model.Message{Text: "The model provider failed: " + failed.Message, ErrorFallback: true, ErrorDetail: failed.Error()}
	}
	msg.Role = model.RoleAssistant
	msg.ID = l.messageID()
	msg.ToolCalls = l.uniqueCalls(msg.ToolCalls)
	for _, hook := range l.cfg.AfterModel {
		msg = hook(ctx, msg)
	}
	return msg, l.append(ctx, msg)
}

// request asks the model and counts what it cost, however it ends.
func (l *loop) request(ctx context.Context) (model.Response, error) {
	resp, err := l.generate(ctx, model.Request{Messages: l.repaired.repair(l.result.Messages), Tools: l.specs, Agent: l.cfg.Agent}, l.cfg.OnDelta)
	l.result.Usage = l.result.Usage.Add(normalUsage(resp.Usage))
	if resp.Model != "" {
		l.result.ModelName = resp.Model
	} else if l.result.ModelName == "" {
		l.result.ModelName = l.cfg.Model.ModelName()
	}
	return resp, err
}

// callModel is the innermost Generate: the model itself, under a span.
func (l *loop) callModel(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	return Chat(ctx, l.cfg.Tracer, l.cfg.Model, req, onDelta)
}

func (l *loop) runTools(ctx context.Context, msg model.Message) error {
	return l.runSome(ctx, len(l.result.Messages)-1, msg, nil)
}

// runSome runs the calls of the assistant message at index that have no answer
// yet, side by side, and appends their results in the order of the calls.
func (l *loop) runSome(ctx context.Context, index int, msg model.Message, answered map[string]bool) error {
	results := make([]tool.Result, len(msg.ToolCalls))
	ordinal := l.assistantOrdinal(index)
	places := make(chan struct{}, l.cfg.MaxParallel)
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	var turns tool.Turns
	var files tool.FileOrder
	for i, call := range msg.ToolCalls {
		if answered[call.ID] {
			continue
		}
		ctx, endTurn := work, func() {}
		if _, ok := l.tools[call.Name].(tool.Sequenced); ok {
			ctx, endTurn = turns.Next(work)
		}
		wait, endFiles := func(context.Context) error { return nil }, func() {}
		if t, ok := l.tools[call.Name].(tool.OnFiles); ok {
			wait, endFiles = files.Next(t.Writes())
		}
		select {
		case places <- struct{}{}:
		case <-work.Done():
			continue
		}
		wg.Go(func() {
			defer func() { <-places }()
			defer endTurn()
			defer endFiles()
			// A panic here is beyond the recover of Run, which is another goroutine's.
			err := fault.Catch(func() error {
				if wait(ctx) != nil {
					return nil // ctx is done, and nothing is appended
				}
				// Asked here and not before the wait, which may have been long.
				if err := l.stopped(ctx); err != nil {
					return err
				}
				res := l.runTool(ctx, msg, call, ordinal, i)
				for _, hook := range l.cfg.AfterTool {
					res = hook(call, res)
				}
				results[i] = res
				return nil
			})
			if err != nil {
				if f := fault.As(err); f != nil {
					f.Log(l.cfg.Log.Error()).Msg("the agent loop panicked")
				}
				stop(err)
			}
		})
	}
	wg.Wait()
	if work.Err() != nil {
		return context.Cause(work)
	}
	for i, call := range msg.ToolCalls {
		if answered[call.ID] {
			continue
		}
		err := l.append(ctx, model.Message{
			ID: l.messageID(), Role: model.RoleTool, Text: results[i].Text, IsError: results[i].IsError,
			ToolCallID: call.ID, ToolName: call.Name, Metadata: results[i].Metadata,
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *loop) runTool(ctx context.Context, msg model.Message, call model.ToolCall, message, position int) tool.Result {
	t, args, failure := l.resolve(msg, call)
	if failure != "" {
		return tool.Failure(failure)
	}
	ctx, span := startTool(ctx, l.cfg.Tracer, call, args)
	defer span.End()
	res, err := l.invoke(ctx, t, tool.Call{ID: call.ID, Args: args, Message: message, Position: position})
	if err != nil { // only a control signal gets past wrapToolErrors
		res = tool.Failure("The tool was stopped: " + err.Error())
	}
	endTool(ctx, span, res, err)
	return res
}

// resolve finds the tool and reads the arguments, or says what is wrong with
// the call in words for the model.
func (l *loop) resolve(msg model.Message, call model.ToolCall) (tool.Tool, []byte, string) {
	if msg.FinishReason == "length" {
		// The arguments may be half of what the model meant, even if they parse.
		return nil, nil, prompt.CutCall
	}
	t, ok := l.tools[call.Name]
	if !ok {
		return nil, nil, fmt.Sprintf("There is no tool %q. Available tools: %s.", call.Name, strings.Join(l.toolNames(), ", "))
	}
	args, err := ParseArgs(call.Args)
	if err != nil {
		return nil, nil, fmt.Sprintf("The arguments of %s could not be read: %v. Send one JSON object.", call.Name, err)
	}
	return t, args, ""
}

func (l *loop) toolNames() []string {
	names := make([]string, len(l.specs))
	for i, s := range l.specs {
		names[i] = s.Name
	}
	return names
}

func (l *loop) append(ctx context.Context, msg model.Message) error {
	l.result.Messages = append(l.result.Messages, msg)
	if l.cfg.OnMessage == nil {
		return nil
	}
	return l.cfg.OnMessage(ctx, msg, l.result.Usage, l.result.ModelName)
}

func (l *loop) stopped(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return l.cfg.Gate()
}

// messageID numbers messages by their place in the whole conversation, so that a
// replayed one gives the same ids, and a shortened one none a second time.
func (l *loop) messageID() string {
	return fmt.Sprintf("m%d", l.result.Gone.Messages+len(l.result.Messages))
}

// assistantOrdinal counts the assistant messages before index.
func (l *loop) assistantOrdinal(index int) int {
	return l.result.Gone.Assistants + assistants(l.result.Messages[:index])
}

// uniqueCalls gives every call an id that no other call of the conversation has,
// and a name that can be replayed: models repeat and omit ids, and write names
// that providers refuse to take back (F-006, F-100).
func (l *loop) uniqueCalls(calls []model.ToolCall) []model.ToolCall {
	if len(calls) == 0 {
		return nil
	}
	out := make([]model.ToolCall, len(calls))
	for i, c := range calls {
		c.Name = l.callName(c.Name)
		c.ID = freeID(c.ID, l.calls, l.result.Gone.Messages+len(l.result.Messages), i)
		out[i] = c
	}
	return out
}

// maxNameChars is the longest name of a tool that providers take.
const maxNameChars = 64

const unnamed = "unnamed_tool"

// callName is the name of the tool that was meant, if there is one, or else a
// name that providers take back.
func (l *loop) callName(name string) string {
	name = strings.TrimSpace(name)
	if _, ok := l.tools[name]; ok {
		return name
	}
	if name == "" {
		return unnamed
	}
	r := []rune(name)
	for i, c := range r[:min(len(r), maxNameChars)] {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-') {
			r[i] = '_'
		}
	}
	return string(r[:min(len(r), maxNameChars)])
}

// wrapToolErrors turns what goes wrong inside a tool into a result that the
// model can read, so that the run continues (TOOL-07). What ends the work as a
// whole passes through.
func (l *loop) wrapToolErrors(next Invoke) Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (res tool.Result, err error) {
		defer func() {
			if f := fault.Of(recover()); f != nil {
				f.Log(l.cfg.Log.Error()).Str("tool", t.Spec().Name).Msg("a tool panicked")
				res, err = toolError(t, f), nil
			}
		}()
		res, err = next(ctx, t, call)
		if err == nil || ctx.Err() != nil {
			return res, err
		}
		return toolError(t, err), nil
	}
}

func toolError(t tool.Tool, err error) tool.Result {
	return tool.Failure(fmt.Sprintf("Tool %s failed (%s): %s\n%s", t.Spec().Name, errorClass(err), clip(err.Error(), 500), prompt.ToolHint))
}

// errorClass names the kind of an error without its text.
func errorClass(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return strings.TrimPrefix(fmt.Sprintf("%T", err), "*")
		}
		err = next
	}
}

// normalUsage makes the total at least the sum of its parts: some providers
// report reasoning tokens in the total alone, some no total at all (USAGE-01, F-112).
func normalUsage(u *contract.Usage) *contract.Usage {
	if u == nil {
		return nil
	}
	v := *u
	v.InputTokens, v.OutputTokens, v.CacheReadTokens = max(v.InputTokens, 0), max(v.OutputTokens, 0), max(v.CacheReadTokens, 0)
	v.TotalTokens = max(v.TotalTokens, v.InputTokens+v.OutputTokens)
	return &v
}

func clip(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n]) + "…"
}
