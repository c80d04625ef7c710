package compact

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	// maxCompactions is how often one conversation is compacted at most, maxFutile
	// how often in a row it may still be too large afterwards (F-072). What is too
	// large then is for the provider to refuse.
	maxCompactions = 100
	maxFutile      = 3
	// minCutTokens is the least that is left of a result that alone is too large.
	minCutTokens = 200
	// maxSkills bounds the references to skill files that are kept.
	maxSkills = 50
)

// Kept is what is known of the part of a conversation that is not there any more.
type Kept struct {
	// Summary has at most 6000 characters.
	Summary string `json:"summary_text,omitempty"`
	// Skills are the skill files that were read, the newest last.
	Skills []string `json:"skill_references,omitempty"`
}

// Options say how one conversation is compacted.
type Options struct {
	Settings config.Summarization
	// SkillPaths are the folders with skills.
	SkillPaths []string
	// Model is the conversation's own model, Summariser the one that summarises;
	// nil: Model does.
	Model, Summariser model.Model
	// Window is how many tokens Model reads at most; 0: not known.
	Window int
	// Kept is what an earlier process kept of the same conversation.
	Kept Kept
	// More returns further blocks that are shown with the summary, whole and
	// escaped. Nil: there are none.
	More func() string
	// Hooks are called with what is about to go, once there is a summary of it. A
	// sub-agent has none: it shares the thread of its parent, and what it did is not
	// for the parent's memory.
	Hooks []func(ctx context.Context, gone []model.Message)
	Log   zerolog.Logger
}

// Compactor compacts one conversation. It is used by one loop.
type Compactor struct {
	o    Options
	kept Kept
	// sizes are the counted sizes of the first messages of the conversation.
	sizes []int
	// known is what the provider counted for the first upTo messages, with all else
	// that a request has; upTo is 0 if it has not counted yet.
	known, upTo int
	// asked is how many messages the conversation had when the model was asked.
	asked int
	tools int // size of the tools; -1: not counted yet

	// shown is the data whose size was counted last.
	shown     string
	shownSize int

	done, futile int
}

// For makes the compactor of a conversation with m as the settings say, or nil if
// they switch compaction off.
func For(cfg *config.Config, models *model.Registry, m model.Model, o Options) (*Compactor, error) {
	if !cfg.Summarization.Enabled {
		return nil, nil
	}
	o.Settings, o.SkillPaths, o.Model = cfg.Summarization, cfg.Skills.Paths, m
	if name := cfg.Summarization.ModelName; name != nil {
		s, err := models.Get(*name)
		if err != nil {
			return nil, fmt.Errorf("summarization.model_name: %w", err)
		}
		o.Summariser = s
	}
	for _, c := range cfg.Models {
		if c.Name == m.Name() {
			o.Window = c.MaxInputTokens
		}
	}
	return New(o), nil
}

// New makes a compactor.
func New(o Options) *Compactor {
	return &Compactor{o: o, kept: o.Kept, tools: -1}
}

// Kept is what there is to keep with the conversation. A nil compactor keeps
// nothing.
func (c *Compactor) Kept() Kept {
	if c == nil {
		return Kept{}
	}
	return Kept{Summary: c.kept.Summary, Skills: slices.Clone(c.kept.Skills)}
}

// Pieces are the parts of the agent's chain; none of a nil compactor.
func (c *Compactor) Pieces() []agent.Piece {
	if c == nil {
		return nil
	}
	return []agent.Piece{
		{Name: "durable_context", Model: c.show},
		{Name: "summarisation", BeforeModel: c.before, Model: c.learn},
	}
}

// show adds what was kept to each request.
func (c *Compactor) show(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		req.Messages = shown(req.Messages, c.data())
		return next(ctx, req, onDelta)
	}
}

func (c *Compactor) data() string {
	more := ""
	if c.o.More != nil {
		more = c.o.More()
	}
	return data(c.kept, more)
}

// learn takes over what the provider has counted.
func (c *Compactor) learn(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		resp, err := next(ctx, req, onDelta)
		if u := resp.Usage; err == nil && u != nil && u.InputTokens > 0 {
			c.known, c.upTo = int(u.InputTokens+max(u.OutputTokens, 0)), c.asked+1
		}
		return resp, err
	}
}

// before compacts the conversation if it is time.
func (c *Compactor) before(ctx context.Context, now agent.State) (agent.Change, error) {
	c.asked = len(now.Messages)
	if len(c.sizes) > len(now.Messages) { // somebody else has shortened it
		c.sizes, c.upTo = nil, 0
	}
	if len(c.o.Settings.Trigger) == 0 || c.done >= maxCompactions {
		return agent.Change{}, nil
	}
	size := func() int { return c.size(now) }
	m := measure{messages: len(now.Messages) - leading(now.Messages), tokens: size, window: c.o.Window}
	if !now.Refused && (c.futile >= maxFutile || !due(c.o.Settings.Trigger, m)) {
		return agent.Change{}, nil
	}
	change, err := c.compact(ctx, now)
	if change.Messages == nil {
		return change, err
	}
	c.done++
	c.asked = len(change.Messages)
	after := measure{messages: len(change.Messages) - leading(change.Messages), tokens: func() int { return c.size(agent.State{Messages: change.Messages, Tools: now.Tools}) }, window: c.o.Window}
	if due(c.o.Settings.Trigger, after) {
		c.futile++
	} else {
		c.futile = 0
	}
	c.o.Log.Info().Int("messages", len(now.Messages)).Int("left", len(change.Messages)).Bool("refused", now.Refused).Msg("the conversation was compacted")
	return change, err
}

// size is how many tokens the next request has.
func (c *Compactor) size(now agent.State) int {
	n := c.known
	if c.upTo == 0 || c.upTo > len(now.Messages) {
		if c.tools < 0 {
			c.tools = toolsSize(now.Tools)
		}
		n, c.upTo = c.tools, 0
		if text := c.data(); text != c.shown {
			c.shown, c.shownSize = text, Tokens(note)+Tokens(text)
		}
		n += c.shownSize
	}
	for i := c.upTo; i < len(now.Messages); i++ {
		n += c.sizeOf(now.Messages, i)
	}
	return n
}

// sizeOf is the size of one message. Each is counted once.
func (c *Compactor) sizeOf(messages []model.Message, i int) int {
	for len(c.sizes) <= i {
		c.sizes = append(c.sizes, messageSize(messages[len(c.sizes)]))
	}
	return c.sizes[i]
}

// compact takes the old part out and has it summarised, and shortens results that
// are too large by themselves.
func (c *Compactor) compact(ctx context.Context, now agent.State) (agent.Change, error) {
	size := func(i int) int { return c.sizeOf(now.Messages, i) }
	start := tail(now.Messages, c.o.Settings.Keep, c.o.Window, size)
	stays, goes := split(now.Messages, start)
	if now.Refused && len(goes) == 0 {
		// The policy would keep what the provider does not take.
		start = group(now.Messages, len(now.Messages), leading(now.Messages))
		if stays, goes = split(now.Messages, start); len(goes) == 0 {
			stays, goes = split(now.Messages, len(now.Messages))
		}
	}
	var change agent.Change
	total, saved := c.size(now), 0
	if len(goes) > 0 {
		gone := make([]model.Message, len(goes))
		for i, at := range goes {
			gone[i] = now.Messages[at]
			saved += size(at)
		}
		before := Tokens(c.kept.Summary)
		summary, usage, err := c.summarise(ctx, gone)
		change.Usage = usage
		if err != nil || summary == "" {
			return change, err // as it was; a later turn tries again
		}
		for _, hook := range c.o.Hooks {
			hook(ctx, gone)
		}
		c.kept.Skills = c.skills(gone)
		c.kept.Summary = bound(summary)
		saved += before - Tokens(c.kept.Summary)
	}
	out, sizes := make([]model.Message, len(stays)), make([]int, len(stays))
	left := 0
	for i, at := range stays {
		out[i], sizes[i] = now.Messages[at], size(at)
		left += sizes[i]
	}
	limit := smallest(c.o.Settings.Trigger, c.o.Window)
	if now.Refused {
		if half := total / 2; limit == 0 || half < limit {
			limit = half
		}
	}
	cut := c.cutResults(out, sizes, limit, total-saved)
	if len(goes) == 0 && cut == 0 {
		return change, nil
	}
	// What the provider counted beside the messages is still there.
	c.known, c.upTo, c.sizes = max(total-saved-cut, left-cut), len(out), sizes
	change.Messages = out
	return change, nil
}

// cutResults shortens the results that are large by themselves, the largest first,
// until the whole is below the limit. It returns how many tokens that saved.
func (c *Compactor) cutResults(messages []model.Message, sizes []int, limit, total int) int {
	if limit <= 0 || total < limit {
		return 0
	}
	most := max(limit/4, minCutTokens)
	order := make([]int, 0, len(messages))
	for i, m := range messages {
		if m.Role == model.RoleTool && sizes[i] > most+most/4 {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return sizes[b] - sizes[a] })
	saved := 0
	for _, i := range order {
		if total-saved < limit {
			break
		}
		m := &messages[i]
		before := len(m.Text)
		m.Text = firstTokens(m.Text, most*2/3) + fmt.Sprintf("\n[… %d bytes in all; the middle was left out, because the conversation became too long. Ask for a smaller part if you need it. …]\n", before) + lastTokens(m.Text, most/3)
		now := messageSize(*m)
		saved += sizes[i] - now
		sizes[i] = now
	}
	return saved
}

// summarise asks the models one after the other. "" with a nil error: none of them
// gave a summary. Nothing of what they say is streamed to anybody.
func (c *Compactor) summarise(ctx context.Context, gone []model.Message) (string, *contract.Usage, error) {
	trim, own := 0, ""
	if n := c.o.Settings.TrimTokensToSummarize; n != nil {
		trim = *n
	}
	if p := c.o.Settings.SummaryPrompt; p != nil {
		own = *p
	}
	req := model.Request{Agent: "summarisation", Messages: []model.Message{{ID: "m0", Role: model.RoleUser, Text: request(own, c.kept.Summary, gone, trim)}}}
	models := []model.Model{c.o.Model}
	if s := c.o.Summariser; s != nil && s.Name() != c.o.Model.Name() {
		models = []model.Model{s, c.o.Model}
	}
	var used *contract.Usage
	for _, m := range models {
		resp, err := agent.Chat(ctx, telemetry.TracerOf(ctx, "compact"), m, req, func(model.Delta) { tool.Progress(ctx) })
		used = used.Add(resp.Usage)
		if ctx.Err() != nil {
			return "", used, context.Cause(ctx)
		}
		text := strings.TrimSpace(resp.Message.Text)
		// Half an answer, or the words of a refusal, must not take the place of what
		// happened.
		if err == nil && text != "" && !resp.Message.ErrorFallback && !resp.Message.CutForSafety() {
			return text, used, nil
		}
		c.o.Log.Warn().Err(err).Str("model", m.Name()).Str("finish_reason", resp.Message.FinishReason).Msg("a model gave no summary of the older part of the conversation")
	}
	return "", used, nil
}

// skills returns the skill files read so far, with those of messages that go.
func (c *Compactor) skills(gone []model.Message) []string {
	out := slices.Clone(c.kept.Skills)
	for _, m := range gone {
		for _, call := range m.ToolCalls {
			if !slices.Contains(c.o.Settings.SkillFileReadTools, call.Name) {
				continue
			}
			var args struct {
				Path     string `json:"path"`
				FilePath string `json:"file_path"`
			}
			if json.Unmarshal([]byte(call.Args), &args) != nil {
				continue
			}
			if args.Path == "" {
				args.Path = args.FilePath
			}
			file := path.Clean(args.Path)
			for _, folder := range c.o.SkillPaths {
				if strings.HasPrefix(file, strings.TrimSuffix(path.Clean(folder), "/")+"/") {
					out = append(slices.DeleteFunc(out, func(s string) bool { return s == file }), file)
					break
				}
			}
		}
	}
	return out[max(0, len(out)-maxSkills):]
}
