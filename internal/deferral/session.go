package deferral

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
)

// The pieces of the chain, and the one that must stand outside of both: what skills
// allow is decided before anything is promoted (DEFER-09).
const (
	PiecePolicy    = "skill_policy"
	PiecePromotion = "routing_promotion"
	PieceFilter    = "deferred_filter"
)

// Session is the tools on demand of one execution.
type Session struct {
	catalogue *Catalogue
	topK      int

	mu        sync.Mutex
	state     State
	found     []string // since the last model call; it counts from the next answer on
	preferred []string // by the text of the task; see Replay
}

// New begins an execution over a catalogue. topK is how many tools a text brings in by
// itself at most.
func New(c *Catalogue, topK int) *Session { return &Session{catalogue: c, topK: topK} }

// Replay takes up the state of a conversation: what was kept of it, and then its
// messages. text is what its user, or whoever gave the task, wrote last; frames and
// skills that are shown with it are no part of it (DEFER-07).
func (s *Session) Replay(kept State, messages []model.Message, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = kept
	for _, m := range messages {
		s.state = s.state.With(m)
	}
	s.preferred = s.catalogue.Preferred(text)
}

// State is the state so far.
func (s *Session) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// Section is what the agent is told of the tools: their names (DEFER-03).
func (s *Session) Section() string { return prompt.Deferred(s.catalogue.Names()) }

// Tool is the tool that searches. No list of a type applies to it (TOOL-05).
func (s *Session) Tool() tool.Tool { return searchTool{s} }

// Pieces are the parts of the chain that promote and that take out what is not
// promoted.
func (s *Session) Pieces() []agent.Piece {
	return []agent.Piece{
		{Name: PiecePromotion, Model: s.promote},
		{Name: PieceFilter, Model: s.offer, Tool: s.enforce},
	}
}

// CheckOrder refuses an order of pieces in which promotion comes too late, or comes
// before what skills allow is known (DEFER-07, DEFER-09).
func CheckOrder(names []string) error {
	policy, promotion, filter := slices.Index(names, PiecePolicy), slices.Index(names, PiecePromotion), slices.Index(names, PieceFilter)
	switch {
	case promotion < 0 && filter < 0:
		return nil
	case promotion < 0 || filter < 0:
		return fmt.Errorf("deferred tools: the chain has only one of %s and %s", PiecePromotion, PieceFilter)
	case promotion > filter:
		return fmt.Errorf("deferred tools: %s stands behind %s; it must stand before it, or nothing is ever promoted in time", PiecePromotion, PieceFilter)
	case policy > promotion:
		return fmt.Errorf("deferred tools: %s stands behind %s; it must stand before it, or promotion would override what skills allow", PiecePolicy, PiecePromotion)
	}
	return nil
}

// ErrNotDeferred refuses an execution that would bind external tools although they are
// to be deferred (DEFER-08).
var ErrNotDeferred = errors.New("deferred tools: tool_search.enabled is set and there are external tools, but nothing defers them")

// Check looks at an execution as it is to run: with deferral on and external tools
// there must be what defers them, in the right order.
func Check(enabled bool, tools []tool.Tool, external func(name string) bool, chain []agent.Piece) error {
	names := make([]string, len(chain))
	for i, p := range chain {
		names[i] = p.Name
	}
	if err := CheckOrder(names); err != nil {
		return err
	}
	if !enabled || slices.Contains(names, PieceFilter) {
		return nil
	}
	for _, t := range tools {
		if external(t.Spec().Name) {
			return ErrNotDeferred
		}
	}
	return nil
}

// promote brings in what was found, and the tools that fit the task's text, as far as
// skills allow now.
func (s *Session) promote(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		s.mu.Lock()
		fit := subagent.ToolLimitOf(ctx).Filter(s.preferred)
		s.state = s.state.Promote(s.catalogue.Hash(), append(fit[:min(len(fit), s.topK)], s.found...))
		s.found = nil
		s.mu.Unlock()
		return next(ctx, req, onDelta)
	}
}

// open reports whether a tool may be offered and called: it is not deferred, or it is
// promoted.
func (s *Session) open() func(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	promoted := s.state.Promoted(s.catalogue)
	return func(name string) bool { return !s.catalogue.Has(name) || slices.Contains(promoted, name) }
}

// offer takes out what is not promoted (DEFER-04). What skills leave out is out
// already, and stays so.
func (s *Session) offer(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		open := s.open()
		tools := make([]model.ToolSpec, 0, len(req.Tools))
		for _, t := range req.Tools {
			if open(t.Name) {
				tools = append(tools, t)
			}
		}
		req.Tools = tools
		return next(ctx, req, onDelta)
	}
}

// enforce refuses calls of what is not promoted: a model can name what it was not
// offered.
func (s *Session) enforce(next agent.Invoke) agent.Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		name := t.Spec().Name
		if !s.open()(name) {
			return tool.Failure(fmt.Sprintf("Tool %s was not run: it has to be found first. Call %s with {\"query\":\"select:%s\"}, and then call it in your next step.", name, ToolName, name)), nil
		}
		return next(ctx, t, call)
	}
}

// searchTool is the tool that searches.
type searchTool struct{ s *Session }

// Spec implements tool.Tool.
func (searchTool) Spec() model.ToolSpec {
	return model.ToolSpec{
		Name: ToolName,
		Description: "Find tools of other servers, so that you can call them from your next step on. The query is one of: " +
			"`select:NAME,NAME` for exactly these; `+word more words` for tools with word in their name, the best fit first; " +
			"or a pattern (a regular expression) over names and descriptions. At most " + fmt.Sprint(MaxHits) + " are found, except with select.",
		Parameters: json.RawMessage(`{"type":"object","properties":{"query":{"type":"string","description":"what to look for"}},"required":["query"]}`),
	}
}

// Call implements tool.Tool. The result holds names alone: what else there is to know
// of a tool is bound to the next request (TOOL-06).
func (t searchTool) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	var args struct {
		Query string `json:"query"`
	}
	if err := json.Unmarshal(call.Args, &args); err != nil {
		return tool.Failure("The arguments of tool_search could not be read: want {\"query\":\"…\"}."), nil
	}
	found := t.s.catalogue.Search(args.Query, subagent.ToolLimitOf(ctx).Allows)
	t.s.mu.Lock()
	t.s.found = append(t.s.found, found...)
	t.s.mu.Unlock()
	if found == nil {
		found = []string{}
	}
	text := "No tool was found. The list of tools on demand is in your instructions; try other words, or a name from it with select:."
	if len(found) > 0 {
		text = "Found, and to be called from your next step on:\n- " + strings.Join(found, "\n- ")
	}
	return tool.Result{Text: text, Metadata: map[string]any{subagent.MetaMatches: found, MetaHash: t.s.catalogue.Hash()}}, nil
}
