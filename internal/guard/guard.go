// Package guard holds what ends an agent that goes nowhere: a guard against
// repetition, one for the tokens that are spent, and one that keeps the calls of
// an answer from running when the provider's own safety system cut it.
//
// A guard looks at each answer after the model has spoken and before anything of
// it is recorded or run. It warns once, at the end of the next request, where a
// warning can stand between no call and its result; and it stops by taking all
// calls out of an answer, so that the loop ends by itself with that answer. Why
// it stopped is kept until somebody takes it.
//
// A [Set] belongs to one execution, is made anew for each and is never shared:
// siblings of one run know nothing of each other (EXEC-09, GUARD-19), and what a
// set remembers ends with it (GUARD-22). All it holds is bounded by windows.
package guard

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Config is what the guards of one execution enforce.
type Config struct {
	Loop   config.LoopDetection
	Budget config.TokenBudget
}

// Stop is why a guard ended an execution.
type Stop struct {
	Reason contract.StopReason
	// NoText: the answer that it stopped had no text of the model's own, so that
	// nothing usable is left (GUARD-12).
	NoText bool
}

// Guard is one of a set.
type Guard interface {
	// Piece is the guard's part of the chain.
	Piece() agent.Piece
	// Take returns why the guard stopped, once; the zero Stop if it did not
	// (GUARD-18).
	Take() Stop
	// Replay goes on from a conversation that another process began.
	Replay(messages []model.Message, spent *contract.Usage)
}

// Set is the guards of one execution, in the order of the chain.
type Set []Guard

// New returns the guards that cfg switches on. The one for the provider's safety
// is always on.
func New(cfg Config) Set {
	var s Set
	if cfg.Loop.Enabled {
		s = append(s, NewLoop(cfg.Loop))
	}
	if cfg.Budget.Enabled {
		s = append(s, NewTokens(cfg.Budget))
	}
	return append(s, &Safety{})
}

// Pieces returns what belongs into the chain.
func (s Set) Pieces() []agent.Piece {
	out := make([]agent.Piece, len(s))
	for i, g := range s {
		out[i] = g.Piece()
	}
	return out
}

// Take asks every guard why it stopped, in the order of the chain, and returns
// the answers of those that did (GUARD-13, GUARD-18).
func (s Set) Take() []Stop {
	var out []Stop
	for _, g := range s {
		if stop := g.Take(); stop.Reason != "" {
			out = append(out, stop)
		}
	}
	return out
}

// Replay makes the guards go on from what an earlier process of the same
// execution has seen: its own messages, and what they cost.
func (s Set) Replay(messages []model.Message, spent *contract.Usage) {
	for _, g := range s {
		g.Replay(messages, spent)
	}
}

// reason keeps why a guard stopped until it is taken.
type reason struct{ stop Stop }

func (r *reason) Take() Stop {
	s := r.stop
	r.stop = Stop{}
	return s
}

// strip takes all calls out of m, with what mirrors them for the provider, and
// appends the notice. The message keeps its id.
func strip(m model.Message, notice string) model.Message {
	m.ToolCalls = nil
	if m.Metadata != nil {
		m.Metadata = maps.Clone(m.Metadata)
		delete(m.Metadata, delegation.RawToolCallsKey)
		delete(m.Metadata, delegation.FunctionCallKey)
	}
	if m.FinishReason == "tool_calls" {
		m.FinishReason = "stop"
	}
	if blank(m.Text) {
		m.Text = notice
	} else {
		m.Text += "\n\n" + notice
	}
	return m
}

func blank(s string) bool { return strings.TrimSpace(s) == "" }

// maxQueued bounds the warnings that wait for the next request (GUARD-06).
const maxQueued = 4

// warnings wait for the next request.
type warnings []string

func (w *warnings) add(text string) {
	if len(*w) < maxQueued && !slices.Contains(*w, text) {
		*w = append(*w, text)
	}
}

// MetadataKey marks a warning in a request.
const MetadataKey = "guard_warning"

// deliver is middleware that puts what waits behind everything else of the next
// request, as one message. It is shown once and never recorded; if the request
// fails, what follows it shows it again.
func (w *warnings) deliver(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		if len(*w) > 0 {
			req.Messages = append(slices.Clip(req.Messages), model.Message{
				Role: model.RoleUser, Text: strings.Join(*w, "\n\n"), Metadata: map[string]any{MetadataKey: true, model.MetaHidden: true},
			})
		}
		resp, err := next(ctx, req, onDelta)
		if err == nil {
			*w = nil
		}
		return resp, err
	}
}
