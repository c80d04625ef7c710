package skill

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/internal/tool"
)

// searchTool finds tools that are offered on demand.
const searchTool = "tool_search"

// Session is the skills of one conversation: those that the agent was shown, and
// which of them are active.
type Session struct {
	disclosed []Skill
	dirs      []string

	mu    sync.Mutex
	state State
	// read are skills that were read since the last model call. The calls of one
	// answer run side by side; what one of them reads counts from the next answer on.
	read []string
	// body is what is shown of the skill that the task began with; bodyOf its name.
	body, bodyOf string
	unreadable   bool
}

// NewSession begins a conversation with the skills that are disclosed to it.
func NewSession(disclosed []Skill) *Session {
	s := &Session{disclosed: disclosed}
	for _, d := range disclosed {
		s.dirs = append(s.dirs, d.Dir)
	}
	return s
}

// Known reports whether the agent was shown a skill.
func (s *Session) Known(name string) bool { return s.find(name) != nil }

func (s *Session) find(name string) *Skill {
	for i := range s.disclosed {
		if s.disclosed[i].Name == name {
			return &s.disclosed[i]
		}
	}
	return nil
}

// Replay takes up the state of a conversation: what was kept of it, and then its
// messages.
func (s *Session) Replay(kept State, messages []model.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = kept
	for _, m := range messages {
		s.state = s.state.With(m, s.Known)
	}
}

// State is the state so far, without what the newest answer has read.
func (s *Session) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// Section is what the agent is told about its skills; empty if it has none.
func (s *Session) Section() string {
	list := make([]prompt.Skill, len(s.disclosed))
	for i, d := range s.disclosed {
		list[i] = told(d)
	}
	return prompt.Skills(list)
}

func told(s Skill) prompt.Skill {
	return prompt.Skill{Name: s.Name, Description: s.Description, Path: s.Path}
}

// Pieces are the parts of the chain that activate skills and keep to what they allow.
func (s *Session) Pieces() []agent.Piece {
	return []agent.Piece{
		{Name: "skill_activation", Model: s.activate, Tool: s.openFolders, AfterTool: s.noteRead},
		{Name: "skill_policy", Model: s.offer, Tool: s.enforce},
	}
}

// limit is what counts now.
func (s *Session) limit() subagent.ToolLimit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limitLocked()
}

func (s *Session) limitLocked() subagent.ToolLimit {
	if s.state.Slash != "" && s.unreadable {
		return subagent.LimitOf(nil, true)
	}
	return s.state.Limit(s.disclosed)
}

// activate makes active what was read, and shows the body of the skill that the task
// began with.
func (s *Session) activate(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		s.mu.Lock()
		// In the order of names: that of calls side by side is none.
		slices.Sort(s.read)
		for _, name := range s.read {
			if !slices.Contains(s.state.Read, name) {
				s.state.Read = append(slices.Clone(s.state.Read), name)
			}
		}
		s.read = nil
		body := s.slashBody()
		s.mu.Unlock()
		if body != "" {
			req.Messages = withBody(req.Messages, body)
		}
		return next(ctx, req, onDelta)
	}
}

// slashBody reads the body once.
func (s *Session) slashBody() string {
	name := s.state.Slash
	if name == "" || s.bodyOf == name {
		return s.body
	}
	s.bodyOf, s.unreadable = name, false
	d := s.find(name)
	if d == nil { // it was there when the conversation began, on another machine perhaps
		s.body = prompt.SkillBody(prompt.Skill{Name: name}, "", "it is not among your skills any more")
		return s.body
	}
	body, err := d.Body()
	if err != nil {
		s.unreadable = true
		s.body = prompt.SkillBody(told(*d), "", err.Error())
		return s.body
	}
	s.body = prompt.SkillBody(told(*d), body, "")
	return s.body
}

// withBody appends the body to the newest text of a user or a task, outside of its
// frame: the conversation stays as it was stored.
func withBody(messages []model.Message, body string) []model.Message {
	out := slices.Clone(messages)
	for i := len(out) - 1; i >= 0; i-- {
		if out[i].Role == model.RoleUser && !out[i].Marked(model.MetaHidden) {
			out[i].Text = strings.TrimRight(out[i].Text, "\n") + "\n\n" + body
			return out
		}
	}
	at := 0 // it was taken out to save room
	for at < len(out) && out[at].Role == model.RoleSystem {
		at++
	}
	return slices.Insert(out, at, model.Message{ID: "skill", Role: model.RoleUser, Text: body, Metadata: map[string]any{model.MetaHidden: true}})
}

// openFolders lets tools read the folders of the disclosed skills, and of no others.
func (s *Session) openFolders(next agent.Invoke) agent.Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		return next(tool.WithFolders(ctx, s.dirs), t, call)
	}
}

// noteRead marks the result of a completed read of a skill's file (SKILL-06).
func (s *Session) noteRead(call model.ToolCall, res tool.Result) tool.Result {
	if _, ok := res.Metadata[MetaRead]; ok { // only we say so
		res.Metadata = maps.Clone(res.Metadata)
		delete(res.Metadata, MetaRead)
	}
	file, _ := res.Metadata[tool.MetaFolderFile].(string)
	if call.Name != readTool || res.IsError || file == "" {
		return res
	}
	for _, d := range s.disclosed {
		if d.file != file {
			continue
		}
		res.Metadata = maps.Clone(res.Metadata)
		res.Metadata[MetaRead] = d.Name
		s.mu.Lock()
		s.read = append(s.read, d.Name)
		s.mu.Unlock()
	}
	return res
}

// offer takes the tools out of a request that the active skills do not allow.
func (s *Session) offer(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		if l := s.limit(); l.Limited() {
			ctx = subagent.WithToolLimit(ctx, l)
			tools := make([]model.ToolSpec, 0, len(req.Tools))
			for _, t := range req.Tools {
				if l.Allows(t.Name) {
					tools = append(tools, t)
				}
			}
			req.Tools = tools
		}
		return next(ctx, req, onDelta)
	}
}

// enforce refuses calls that the active skills do not allow: a model can name what
// it was not offered (SKILL-08).
func (s *Session) enforce(next agent.Invoke) agent.Invoke {
	return func(ctx context.Context, t tool.Tool, call tool.Call) (tool.Result, error) {
		l := s.limit()
		if !l.Limited() {
			return next(ctx, t, call)
		}
		name := t.Spec().Name
		if !l.Allows(name) {
			return tool.Failure(s.refusal(name, l)), nil
		}
		res, err := next(subagent.WithToolLimit(ctx, l), t, call)
		if err != nil || name != searchTool || res.IsError {
			return res, err
		}
		matches, ok := res.Metadata[subagent.MetaMatches].([]string)
		if !ok || len(l.Filter(matches)) != len(matches) {
			return tool.Failure("The result of the search cannot be shown: it cannot be told apart which of the tools the active skill allows. " + s.refusalRest(l)), nil
		}
		return res, nil
	}
}

func (s *Session) refusal(name string, l subagent.ToolLimit) string {
	return fmt.Sprintf("Tool %s was not run: %s", name, s.refusalRest(l))
}

func (s *Session) refusalRest(l subagent.ToolLimit) string {
	active := s.State().Active()
	who := "the active skill " + strings.Join(active, ", ") + " allows "
	if len(active) > 1 {
		who = "the active skills " + strings.Join(active, ", ") + " allow "
	}
	what := "no tool"
	if names := l.Names(); len(names) > 0 {
		what = "only " + strings.Join(names, ", ")
	}
	return who + what + ", besides read_file and other helpers. Go on with these, or say what you could not do."
}
