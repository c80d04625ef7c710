package executor

import (
	"context"
	"strings"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/receipt"
)

// firstMessages is what the sub-agent begins with.
func (j *job) firstMessages() []model.Message {
	req := j.a.grant.Request
	return prompt.First(prompt.Child{Prompt: req.Subagent.SystemPrompt, Citation: j.a.s.citation(), Skills: j.skills.Section(), Deferred: j.external.Section(), Routing: j.external.Routing(), Task: req.Prompt, Criteria: req.AcceptanceCriteria})
}

// addPrompt adds the pieces that shape what a provider is sent. None changes what
// is stored (PROMPT-05, PROMPT-06).
func (c *chain) addPrompt(j *job) {
	framer := &prompt.Framer{}
	date := prompt.Date(j.a.today)
	c.pieces = append(c.pieces,
		agent.Piece{Name: "input_sanitising", Model: onMessages(framer.Frame)},
		guard.RemoteResults(),
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
