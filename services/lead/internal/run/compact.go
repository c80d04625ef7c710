package run

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/compact"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds of the ledger in view (LEDGER-10), in characters.
const (
	maxLedgerChars       = 6000
	maxLedgerResultChars = 120
)

// compaction makes what keeps the run's conversation within the model's limits, or
// nothing if it is off (COMPACT-01).
func (d *drive) compaction(m model.Model) (*compact.Compactor, []agent.Piece, error) {
	if d.e.cfg.Settings == nil {
		return nil, nil, nil
	}
	d.mu.Lock()
	kept := d.conv.Kept
	d.mu.Unlock()
	c, err := compact.For(d.e.cfg.Settings, d.e.deps.Models, m, compact.Options{Kept: kept, More: d.ledgerInView, Log: d.log})
	if c == nil || err != nil {
		return nil, nil, err
	}
	// The note about the data is a second system message (COMPACT-06).
	coalesce := agent.Piece{Name: "system_coalescing", Model: func(next agent.Generate) agent.Generate {
		return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
			req.Messages = prompt.Coalesce(req.Messages)
			return next(ctx, req, onDelta)
		}
	}}
	return c, append(c.Pieces(), coalesce), nil
}

// shortened stores the conversation that takes the place of the one so far, so that
// whoever takes the run over goes on with it.
func (d *drive) shortened(c *compact.Compactor, now agent.Result, usage *contract.Usage) error {
	// An answer that is not stored yet would be lost without having been told.
	if err := d.write(d.life, func(*contract.RunRecord, *conversation) {}); err != nil {
		return err
	}
	life, stop := d.untilDrain()
	defer stop()
	if err := d.tell(life); err != nil {
		return err
	}
	return d.write(d.life, func(_ *contract.RunRecord, conv *conversation) {
		conv.shorten(now.Messages, now.Gone, c.Kept())
		conv.Usage = usage
	})
}

// shorten puts messages, which begin with the system prompt, in the place of those
// so far.
func (c *conversation) shorten(messages []model.Message, gone agent.Gone, kept compact.Kept) {
	inherited := make(map[string]bool, c.History)
	for _, m := range c.Messages[:c.History] {
		inherited[m.ID] = true
	}
	steps := len(c.steps())
	for len(messages) > 0 && messages[0].Role == model.RoleSystem {
		messages = messages[1:]
	}
	c.Messages = append([]model.Message(nil), messages...)
	for c.History = 0; c.History < len(c.Messages) && inherited[c.Messages[c.History].ID]; {
		c.History++
	}
	c.GoneSteps += steps - len(c.steps())
	c.Gone, c.Kept = gone, kept
}

// earlier is what a new run keeps of the ledger of its thread's last one.
func (c conversation) earlier(own []contract.Delegation) []contract.Delegation {
	out := delegation.Merge(c.Earlier, own)
	for i := range out {
		out[i].ResultBrief = bound(out[i].ResultBrief, maxLedgerResultChars)
	}
	return out
}

// guidance is what to do about a delegation that has ended so (LEDGER-11).
func guidance(e contract.Delegation) string {
	switch e.Status {
	case contract.DelegationInProgress, string(contract.ToolCompleted):
		if e.Status == string(contract.ToolCompleted) && e.StopReason != "" {
			return "partial: use it; delegate the rest more narrowly if you must"
		}
		return "do not delegate it again"
	}
	if e.StopReason != "" {
		return "it ran into a limit: may be tried again, more narrowly"
	}
	return "may be tried again with a changed plan"
}

// ledgerInView is the ledger as the model is shown it once older messages are gone:
// data, the newest first. Those of the thread's earlier runs are among them, because a
// summary may have taken the place of their results.
func (d *drive) ledgerInView() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	ledger := delegation.Merge(d.conv.Earlier, d.rec.Delegations)
	if d.conv.Kept.Summary == "" || len(ledger) == 0 {
		return ""
	}
	oneLine := func(s string, n int) string { return compact.Escape(strings.Join(strings.Fields(bound(s, n)), " ")) }
	var b strings.Builder
	b.WriteString("Delegations, the newest first:")
	left := maxLedgerChars
	for i := len(ledger) - 1; i >= 0; i-- {
		e := ledger[i]
		line := fmt.Sprintf("\n- %s (%s), %s: %s", oneLine(e.Description, ledgerDescriptionChars), oneLine(e.SubagentType, 64), e.Status, guidance(e))
		if e.ResultBrief != "" {
			line += ". Result: " + oneLine(e.ResultBrief, maxLedgerResultChars)
		}
		if n := utf8.RuneCountInString(line); n <= left {
			left -= n
			b.WriteString(line)
			continue
		}
		fmt.Fprintf(&b, "\n%d older ones are left out.", i+1)
		break
	}
	return "<kept_delegations>\n" + b.String() + "\n</kept_delegations>"
}
