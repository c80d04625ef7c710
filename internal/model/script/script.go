package script

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// maxArmed bounds the conversations whose faults are being counted.
const maxArmed = 1024

// Model answers out of a script.
type Model struct {
	name   string
	script *Script

	mu    sync.Mutex
	tries map[[32]byte]int // failed calls of a conversation
	order [][32]byte       // oldest first
}

var _ model.Model = (*Model)(nil)

// New returns a model called name that answers out of s.
func New(name string, s *Script) *Model {
	return &Model{name: name, script: s, tries: map[[32]byte]int{}}
}

// Name implements model.Model.
func (m *Model) Name() string { return m.name }

// ModelName implements model.Model: the script's own name for it, or "script".
func (m *Model) ModelName() string {
	if m.script.model != "" {
		return m.script.model
	}
	return "script"
}

// AnySubagent is the agent of a request of which no more is known. It fits the
// rules of all agents but the lead.
const AnySubagent = "(sub-agent)"

const lead = "lead"

// Step is what a script says to one request.
type Step struct {
	// Message is the answer, or what there would have been of it.
	Message model.Message
	// Reasoning is what the model shows of its thoughts.
	Reasoning string
	Usage     *contract.Usage
	Fault     Fault
	// RetryAfter is what a refusal asks for, as it is written.
	RetryAfter string
}

// Next gives the script's step for a request, after the step's delay.
func (m *Model) Next(ctx context.Context, req model.Request) (Step, error) {
	if ctx.Err() != nil {
		return Step{}, context.Cause(ctx)
	}
	pos := m.script.replay(req.Agent, req.Messages)
	turns := pos.turns()
	if len(turns) == 0 {
		return Step{Message: noRule(req)}, nil
	}
	key := digest(req)
	t := turns[pick(turns, m.failures(key))]
	if err := pause.For(ctx, t.delay); err != nil {
		return Step{}, err
	}
	step := Step{Reasoning: t.reasoning, Fault: t.fault, RetryAfter: t.retryAfter}
	if t.usage != nil && t.fault != FaultNullUsage {
		u := *t.usage
		step.Usage = &u
	}
	var err error
	step.Message, err = answer(t, req)
	if t.fault.Fails() {
		m.failed(key)
		return step, nil // a template that fails as well is no news
	}
	if err != nil {
		return Step{}, &model.Error{Kind: model.KindPermanent, Code: "script", Message: "a template of the script failed: " + clip(err.Error(), 500), Err: err}
	}
	m.succeeded(key)
	return step, nil
}

// Generate implements model.Model.
func (m *Model) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	if onDelta == nil {
		onDelta = func(model.Delta) {}
	}
	step, err := m.Next(ctx, req)
	if err != nil {
		return model.Response{}, err
	}
	if step.Fault.Fails() {
		return model.Response{}, fail(step, onDelta)
	}
	stream(step.Message, onDelta)
	return model.Response{Message: step.Message, Model: m.ModelName(), Usage: step.Usage}, nil
}

// position is a place in the script: the rule at work and its next turn.
type position struct {
	rule *rule
	next int
}

func (p position) turns() []turn {
	if p.rule == nil || p.next >= len(p.rule.turns) {
		return nil
	}
	return p.rule.turns[p.next:]
}

// replay follows the conversation to the point where the model is asked now.
func (s *Script) replay(agent string, msgs []model.Message) position {
	var pos position
	start := 0 // first message of the step
	for i, msg := range msgs {
		if msg.Role != model.RoleAssistant {
			continue
		}
		pos = s.advance(pos, agent, msgs[start:i])
		// The failed turns before this answer were used up by retries.
		for pos.rule != nil && pos.next < len(pos.rule.turns) && pos.rule.turns[pos.next].fault.Fails() {
			pos.next++
		}
		if !msg.ErrorFallback {
			pos.next++
		}
		start = i + 1
	}
	return s.advance(pos, agent, msgs[start:])
}

// advance says where the script stands after the messages of one step. System
// messages do not count: they are instructions, not turns of a conversation.
func (s *Script) advance(pos position, agent string, step []model.Message) position {
	newest, results := "", []string(nil)
	goOn := true
	for _, m := range step {
		switch m.Role {
		case model.RoleTool:
			results = append(results, m.Text)
			newest, goOn = strings.Join(results, "\n"), true
		case model.RoleUser:
			if len(results) > 0 {
				continue // a note of the program's beside the results; nobody else speaks in between
			}
			newest, goOn = prompt.Unframe(m.Text), false
		}
	}
	if goOn && pos.turns() != nil {
		return pos
	}
	for i := range s.rules {
		if r := &s.rules[i]; r.fits(agent, newest) {
			return position{rule: r}
		}
	}
	return position{rule: s.fallback}
}

func (r *rule) fits(agent, text string) bool {
	return (r.agent == "*" || r.agent == agent || agent == AnySubagent && r.agent != lead) &&
		strings.Contains(text, r.substring) &&
		(r.regex == nil || r.regex.MatchString(text))
}

// pick chooses the turn after so many failures: faults come off the front one
// by one, and the last turn stays.
func pick(turns []turn, failures int) int {
	i := 0
	for i < failures && i+1 < len(turns) && turns[i].fault.Fails() {
		i++
	}
	return i
}

func noRule(req model.Request) model.Message {
	newest := ""
	if n := len(req.Messages); n > 0 {
		newest = prompt.Unframe(req.Messages[n-1].Text)
	}
	return model.Message{
		Role: model.RoleAssistant, FinishReason: "stop",
		Text: fmt.Sprintf("The script has no rule for agent %q and this message: %q. Add a rule, or a default.", req.Agent, clip(newest, 120)),
	}
}

func answer(t turn, req model.Request) (model.Message, error) {
	v := newView(req.Agent, req.Messages)
	msg := model.Message{Role: model.RoleAssistant, FinishReason: t.finish}
	var err error
	if msg.Text, err = t.text.render(v); err != nil {
		return msg, err
	}
	asked := 0
	for _, m := range req.Messages {
		if m.Role == model.RoleAssistant {
			asked++
		}
	}
	for i, c := range t.calls {
		args, err := c.args.render(v)
		if err != nil {
			return msg, err
		}
		raw, ok := args.(string)
		if !ok {
			b, err := json.Marshal(args)
			if err != nil {
				return msg, err
			}
			raw = string(b)
		}
		// Unique in the conversation, and the same whenever it is replayed.
		id := fmt.Sprintf("call_%d_%d", asked, i)
		switch t.fault {
		case FaultMalformed, FaultCutCall:
			raw = malform(raw)
		case FaultBlankIDs:
			id = ""
		case FaultRepeatedIDs:
			id = "call_0_0"
		}
		msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: id, Name: c.name, Args: raw})
	}
	if t.fault == FaultCutCall {
		msg.FinishReason = "length"
	}
	if msg.FinishReason == "" {
		msg.FinishReason = "stop"
		if len(msg.ToolCalls) > 0 {
			msg.FinishReason = "tool_calls"
		}
	}
	return msg, nil
}

// malform cuts arguments so that they are no JSON any more.
func malform(args string) string {
	if cut := strings.ToValidUTF8(args[:len(args)/2], ""); len(cut) > 1 {
		return cut
	}
	return `{"`
}

// stream shows an answer in pieces, cut after spaces.
func stream(msg model.Message, onDelta func(model.Delta)) {
	for rest := msg.Text; rest != ""; {
		n := len(rest)
		if n > 24 {
			n = 24
			if i := strings.IndexByte(rest[n:], ' '); i >= 0 && i < 200 {
				n += i + 1
			} else {
				n = len(rest)
			}
		}
		onDelta(model.Delta{Text: rest[:n]})
		rest = rest[n:]
	}
	for _, c := range msg.ToolCalls {
		onDelta(model.Delta{ToolCall: c.Name})
	}
}

func fail(step Step, onDelta func(model.Delta)) error {
	e := &model.Error{Kind: model.KindTransient}
	e.RetryAfter = retryAfter(step.RetryAfter)
	half := true
	switch step.Fault {
	case FaultHTTP500:
		e.Code, e.Message, half = "http_500", "the script answers with status 500", false
	case FaultHTTP503:
		e.Code, e.Message, half = "http_503", "the script answers with status 503", false
	case FaultRateLimit:
		e.Code, e.Message, half = "rate_limited", "the script answers with status 429", false
	case FaultOverloaded:
		e.Code, e.Message, half = "overloaded", "the script answers with status 529", false
	case FaultTimeout, FaultComments:
		e.Code, e.Message, half = "timeout", "the script lets the request time out", false
	case FaultReset:
		e.Code, e.Message, half = "disconnected", "the script resets the connection", false
	case FaultSilence:
		e.Code, e.Message = "timeout", "the script falls silent"
	case FaultErrorInStream:
		e.Code, e.Message = "provider_error", "the script reports an error in its answer"
	default:
		e.Code, e.Message = "disconnected", "the script breaks the stream off"
	}
	if s := step.Message.Text; half && s != "" {
		if s = strings.ToValidUTF8(s[:len(s)/2], ""); s != "" {
			onDelta(model.Delta{Text: s})
		}
	}
	return e
}

// retryAfter reads seconds; everything else asks for nothing here.
func retryAfter(s string) time.Duration {
	if n, err := strconv.ParseUint(s, 10, 16); err == nil {
		return time.Duration(n) * time.Second
	}
	return 0
}

// digest names a conversation.
func digest(req model.Request) [32]byte {
	h := sha256.New()
	enc := json.NewEncoder(h)
	_ = enc.Encode(req.Agent)
	for _, m := range req.Messages {
		m.Metadata = nil
		_ = enc.Encode(m) // strings only: cannot fail
	}
	return [32]byte(h.Sum(nil))
}

func (m *Model) failures(key [32]byte) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.tries[key]
}

func (m *Model) failed(key [32]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.tries[key]; !ok {
		if len(m.order) >= maxArmed {
			delete(m.tries, m.order[0])
			m.order = m.order[1:]
		}
		m.order = append(m.order, key)
	}
	m.tries[key]++
}

func (m *Model) succeeded(key [32]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.tries[key]; !ok {
		return
	}
	delete(m.tries, key)
	for i, k := range m.order {
		if k == key {
			m.order = append(m.order[:i], m.order[i+1:]...)
			break
		}
	}
}
