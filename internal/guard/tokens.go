package guard

import (
	"context"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/compact"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Tokens is the guard for what an execution spends.
type Tokens struct {
	budget config.TokenBudget

	counted       map[string]Spent // by message id
	before        map[string]bool
	input, output int64
	warned        bool

	last  *contract.Usage // of the turn that is under way
	sizes map[sized]int   // tokens of messages, as we estimate them
	queue warnings
	reason
}

// Spent is what one message cost, as reported so far.
type Spent struct {
	ID            string
	Input, Output int64
}

// NewTokens returns a guard for one execution.
func NewTokens(budget config.TokenBudget) *Tokens {
	return &Tokens{budget: budget, counted: map[string]Spent{}, before: map[string]bool{}, sizes: map[sized]int{}}
}

// Piece implements Guard.
func (t *Tokens) Piece() agent.Piece {
	return agent.Piece{Name: "token_guard", Model: func(next agent.Generate) agent.Generate {
		next = t.queue.deliver(next)
		return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
			resp, err := next(ctx, req, onDelta)
			used := resp.Usage
			if used == nil && err == nil {
				used = t.estimate(req, resp.Message)
			}
			t.last = t.last.Add(used) // a turn may take more than one request
			return resp, err
		}
	}, Spent: func(u *contract.Usage) {
		t.last = t.last.Add(u) // it counts with the answer that it was for
	}, AfterModel: func(_ context.Context, m model.Message) model.Message {
		return t.judge(m)
	}}
}

// sized is what tells one message of an execution from another.
type sized struct {
	role        model.Role
	id          string
	text, calls int
}

// estimate is about what a request and its answer cost, where the provider does not
// say it: a budget holds all the same. It is shown to nobody (USAGE-06).
func (t *Tokens) estimate(req model.Request, answer model.Message) *contract.Usage {
	u := &contract.Usage{OutputTokens: int64(tokens(answer))}
	for _, m := range req.Messages {
		key := sized{m.Role, m.ID, len(m.Text), len(m.ToolCalls)}
		n, ok := t.sizes[key]
		if !ok { // a long history is counted once, not with each turn
			n = tokens(m)
			t.sizes[key] = n
		}
		u.InputTokens += int64(n)
	}
	return u
}

func tokens(m model.Message) int {
	n := compact.Tokens(m.Text)
	for _, c := range m.ToolCalls {
		n += compact.Tokens(c.Name) + compact.Tokens(c.Args)
	}
	return n
}

// produced is what was not input: some providers count reasoning in the total alone.
func produced(u *contract.Usage) int64 { return max(u.OutputTokens, u.TotalTokens-u.InputTokens) }

// judge counts an answer and does what follows from it.
func (t *Tokens) judge(m model.Message) model.Message {
	used := t.last
	t.last = nil
	if m.Role != model.RoleAssistant || used == nil {
		return m
	}
	switch t.Observe([]Spent{{ID: m.ID, Input: used.InputTokens, Output: produced(used)}}) {
	case VerdictWarn:
		t.queue.add(tokenWarning(int(t.share() * 100)))
	case VerdictStop:
		if m.ErrorFallback {
			return m // it ends the run by itself, and as what it is
		}
		t.stop = Stop{Reason: contract.StopTokenCapped, NoText: blank(m.Text)}
		if len(m.ToolCalls) > 0 || blank(m.Text) {
			m = strip(m, tokenNotice)
		}
	}
	return m
}

// Before names messages that were there before the execution. They never count.
func (t *Tokens) Before(messages []Spent) {
	for _, m := range messages {
		t.before[m.ID] = true
	}
}

// Observe counts messages and says what has to follow. A message counts once; what
// is reported for it later counts by its increase (GUARD-02).
func (t *Tokens) Observe(messages []Spent) Verdict {
	for _, m := range messages {
		if m.ID == "" || t.before[m.ID] {
			continue
		}
		c := t.counted[m.ID]
		t.input += max(0, m.Input-c.Input)
		t.output += max(0, m.Output-c.Output)
		t.counted[m.ID] = Spent{Input: max(m.Input, c.Input), Output: max(m.Output, c.Output)}
	}
	share := t.share()
	switch {
	case t.input+t.output <= 0:
		return VerdictNone
	case share >= t.budget.HardStopThreshold:
		return VerdictStop
	case share >= t.budget.WarnThreshold && !t.warned:
		t.warned = true
		return VerdictWarn
	}
	return VerdictNone
}

// share is how much is used of the limit that is used most (GUARD-03).
func (t *Tokens) share() float64 {
	share := of(t.input+t.output, &t.budget.MaxTokens)
	return max(share, of(t.input, t.budget.MaxInputTokens), of(t.output, t.budget.MaxOutputTokens))
}

func of(n int64, limit *int) float64 {
	if limit == nil || *limit <= 0 {
		return 0
	}
	return float64(n) / float64(*limit)
}

// Replay implements Guard. A warning that was due by then is not shown again.
func (t *Tokens) Replay(_ []model.Message, spent *contract.Usage) {
	if spent == nil {
		return
	}
	t.input, t.output = t.input+spent.InputTokens, t.output+produced(spent)
	t.warned = t.warned || t.share() >= t.budget.WarnThreshold
}
