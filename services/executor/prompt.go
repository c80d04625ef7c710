package executor

import (
	"context"
	"strings"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/internal/tool"
)

// firstMessages is what the sub-agent begins with.
func (j *job) firstMessages() []model.Message {
	req := j.a.grant.Request
	return prompt.First(prompt.Child{Prompt: req.Subagent.SystemPrompt, Citation: j.a.s.citation(), Skills: j.skills.Section(), Task: req.Prompt, Criteria: req.AcceptanceCriteria})
}

// addPrompt adds the pieces that shape what a provider is sent. None changes what
// is stored (PROMPT-05, PROMPT-06).
func (c *chain) addPrompt(j *job) {
	framer := &prompt.Framer{}
	date := prompt.Date(j.a.today)
	c.pieces = append(c.pieces,
		agent.Piece{Name: "input_sanitising", Model: onMessages(framer.Frame)},
		agent.Piece{Name: "remote_result_sanitising", AfterTool: defuseRemote},
		agent.Piece{Name: "date_context", Model: onMessages(func(m []model.Message) []model.Message { return prompt.WithReminder(m, date) })},
		agent.Piece{Name: "system_coalescing", Model: onMessages(prompt.Coalesce)},
	)
}

// onMessages changes the messages of each request.
func onMessages(change func([]model.Message) []model.Message) agent.ModelMiddleware {
	return func(next agent.Generate) agent.Generate {
		return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
			req.Messages = change(req.Messages)
			return next(ctx, req, onDelta)
		}
	}
}

// defuseRemote defuses the results of tools whose text comes from outside: strangers
// must not speak with the framework's voice. It comes after all that wraps the tools,
// because a cut may make a tag of what was none. Files of the workspace are shown as
// they are, or no edit of them could be exact.
func defuseRemote(call model.ToolCall, res tool.Result) tool.Result {
	if remote(call.Name) {
		res.Text = prompt.Defuse(res.Text)
	}
	return res
}

// remote reports whether a tool brings text from outside: pages, and whatever the
// tools of other servers (SERVER__TOOL) say.
func remote(name string) bool {
	return strings.HasPrefix(name, "web_") || strings.Contains(name, "__")
}

// answer is the last answer as the task's outcome depends on it. Whoever reads a report
// that the token limit cut is told so: the report cannot say it itself.
func answer(last model.Message) *outcome.Answer {
	text := event.Sanitize(last.Text)
	if last.FinishReason == "length" && len(last.ToolCalls) == 0 && !last.ErrorFallback && strings.TrimSpace(text) != "" {
		text += "\n\n" + prompt.CutAnswer
	}
	return &outcome.Answer{Text: text, ErrorFallback: last.ErrorFallback, ErrorDetail: last.ErrorDetail}
}

// citation shows how receipts are cited; it is empty where there are none, so that
// nobody is asked for them (RECEIPT-15, REPORT-05).
func (s *Service) citation() string {
	if !s.cfg.Settings.Verification.ReceiptsEnabled {
		return ""
	}
	return receipt.Example()
}
