package compact

import (
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
)

// defaultKeep is how many messages stay where the configured measure cannot be
// used: a fraction of a model whose limit nobody has configured.
const defaultKeep = 20

// measure is how large a conversation is.
type measure struct {
	messages int // without the system messages at its start
	tokens   func() int
	window   int // tokens that the model reads at most; 0: not known
}

// due reports whether one of the triggers is reached.
func due(triggers []config.Threshold, m measure) bool {
	for _, t := range triggers {
		if t.Type == config.ThresholdMessages {
			if float64(m.messages) >= t.Value {
				return true
			}
		} else if limit := tokenLimit(t, m.window); limit > 0 && m.tokens() >= limit {
			return true
		}
	}
	return false
}

// tokenLimit is a threshold in tokens; 0: it cannot be told.
func tokenLimit(t config.Threshold, window int) int {
	switch t.Type {
	case config.ThresholdTokens:
		return int(t.Value)
	case config.ThresholdFraction:
		return int(t.Value * float64(window))
	}
	return 0
}

// smallest is the lowest trigger in tokens; 0: there is none.
func smallest(triggers []config.Threshold, window int) int {
	least := 0
	for _, t := range triggers {
		if n := tokenLimit(t, window); n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// leading counts the system messages at the start.
func leading(messages []model.Message) int {
	n := 0
	for n < len(messages) && messages[n].Role == model.RoleSystem {
		n++
	}
	return n
}

// genuine reports whether a person wrote the message, or the agent that delegated.
func genuine(m model.Message) bool {
	return m.Role == model.RoleUser && !m.Marked(model.MetaHidden) && !m.Marked(model.MetaReminder)
}

// tail returns where the part begins that the keep policy leaves as it is. A call
// and its results stay together, and the newest of them always stay.
func tail(messages []model.Message, keep config.Threshold, window int, size func(i int) int) int {
	first := leading(messages)
	limit := tokenLimit(keep, window)
	if keep.Type != config.ThresholdMessages && limit == 0 {
		keep = config.Threshold{Type: config.ThresholdMessages, Value: defaultKeep}
	}
	start, sum := len(messages), 0
	for start > first {
		begin := group(messages, start, first)
		if start < len(messages) && keep.Type == config.ThresholdMessages && float64(len(messages)-start) >= keep.Value {
			break
		}
		if keep.Type != config.ThresholdMessages {
			for i := begin; i < start; i++ {
				sum += size(i)
			}
			if start < len(messages) && sum > limit {
				break
			}
		}
		start = begin
	}
	return start
}

// group returns where the messages begin that end before end and belong together:
// an answer with the results of its calls.
func group(messages []model.Message, end, first int) int {
	i := end - 1
	for i > first && messages[i].Role == model.RoleTool {
		i--
	}
	return i
}

// split tells the indices of what stays from those of what goes, when everything
// before start may go. The leading system messages, the reminders and the newest
// message of a person stay wherever they are.
func split(messages []model.Message, start int) (stays, goes []int) {
	first, asked := leading(messages), -1
	for i := len(messages) - 1; i >= 0 && asked < 0; i-- {
		if genuine(messages[i]) {
			asked = i
		}
	}
	for i, m := range messages {
		if i < first || i >= start || i == asked || m.Marked(model.MetaReminder) && m.Role != model.RoleTool && len(m.ToolCalls) == 0 {
			stays = append(stays, i)
		} else {
			goes = append(goes, i)
		}
	}
	return stays, goes
}
