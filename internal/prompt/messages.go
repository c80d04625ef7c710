package prompt

import (
	"maps"
	"slices"
	"time"

	"github.com/herdgate/herdgate/internal/model"
)

// MetaDate is the metadata key of the date that a reminder tells.
const MetaDate = "reminder_date"

// genuine reports whether a user, or whoever gave the task, wrote the message.
func genuine(m model.Message) bool { return m.Role == model.RoleUser && !m.Marked(model.MetaHidden) }

// Day writes the date of t as an agent is told it.
func Day(t time.Time) string { return t.Format("2006-01-02, Monday") }

// Date is the reminder that holds the date, and nothing else (DATE-01, DATE-05).
func Date(t time.Time) model.Message {
	return model.Message{ID: DateID, Role: model.RoleSystem, Text: dateHead + Day(t), Metadata: map[string]any{
		model.MetaHidden: true, model.MetaReminder: true, MetaDate: t.Format(time.DateOnly),
	}}
}

// WithReminder puts the reminder after the system messages at the beginning. It is
// there once, however often it is asked for.
func WithReminder(messages []model.Message, reminder model.Message) []model.Message {
	at := 0
	for ; at < len(messages) && messages[at].Role == model.RoleSystem; at++ {
		if messages[at].ID == reminder.ID && messages[at].Marked(model.MetaReminder) && messages[at].Text == reminder.Text {
			return messages
		}
	}
	out := make([]model.Message, 0, len(messages)+2) // room for one more piece of the chain
	out = append(append(out, messages[:at]...), reminder)
	return append(out, messages[at:]...)
}

// Coalesce merges all system messages into one at the beginning: some providers
// refuse more, or one elsewhere. Their texts are joined by blank lines, the id is
// that of the first, metadata is merged, and of several reminders only the last is
// kept (PROMPT-05). Where nothing is to be merged, messages is returned as it is.
func Coalesce(messages []model.Message) []model.Message {
	count, lastReminder, misplaced := 0, -1, false
	for i, m := range messages {
		if m.Role != model.RoleSystem {
			continue
		}
		count++
		misplaced = misplaced || i > 0
		if m.Marked(model.MetaReminder) {
			lastReminder = i
		}
	}
	if count == 0 || !misplaced {
		return messages
	}
	rest := make([]model.Message, 1, len(messages)-count+1)
	merged := model.Message{Role: model.RoleSystem}
	first := true
	var texts []string
	for i, m := range messages {
		switch {
		case m.Role != model.RoleSystem:
			rest = append(rest, m)
		case m.Marked(model.MetaReminder) && i != lastReminder:
			// out of date
		default:
			if first {
				merged.ID, first = m.ID, false
			}
			texts = append(texts, m.Text)
			if len(m.Metadata) > 0 {
				if merged.Metadata == nil {
					merged.Metadata = map[string]any{}
				}
				maps.Copy(merged.Metadata, m.Metadata)
			}
		}
	}
	if merged.Text = joined(texts...); merged.Text == "" {
		return rest[1:]
	}
	rest[0] = merged
	return rest
}

// Framer frames the last genuine user message of each request (PROMPT-06). It
// remembers the last one, which is mostly the same for a whole conversation; it is
// for one conversation and no concurrent use.
type Framer struct{ text, framed string }

// Frame returns the messages with the last genuine user message framed. What it
// was given stays as it is.
func (f *Framer) Frame(messages []model.Message) []model.Message {
	for i := len(messages) - 1; i >= 0; i-- {
		if !genuine(messages[i]) {
			continue
		}
		if f.framed == "" || f.text != messages[i].Text {
			f.text, f.framed = messages[i].Text, Frame(messages[i].Text)
		}
		if f.framed == f.text {
			return messages
		}
		out := slices.Clone(messages)
		out[i].Text = f.framed
		return out
	}
	return messages
}
