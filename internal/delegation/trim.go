package delegation

import (
	"maps"
	"slices"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ToolName is the name of the tool that delegates.
const ToolName = "task"

// Keys of a message's metadata that mirror its calls, as some providers need
// them when the message is sent back.
const (
	// RawToolCallsKey holds the provider's own calls: a list of objects with "id".
	RawToolCallsKey = "raw_tool_calls"
	// FunctionCallKey holds the single call of the older form.
	FunctionCallKey = "function_call"
)

// LimitNotice is appended to an answer whose delegations were dropped because
// the run has none left.
const LimitNotice = prompt.LimitNotice

// Limits are the numbers that [Trim] enforces.
type Limits struct {
	// MaxConcurrent is the result of [Clamp], MaxTotal that of [MaxTotal]; what
	// is out of range is clamped.
	MaxConcurrent int
	MaxTotal      int
	// Ledger holds the delegations made before this answer.
	Ledger []Entry
	RunID  string
}

// Trimmed says what [Trim] did.
type Trimmed struct {
	// Changed is false if the message was left exactly as it was.
	Changed bool
	// Dropped are the calls that were taken out. They are lost, not queued.
	Dropped []model.ToolCall
	// Capped: nothing was left of the run's allowance and calls were dropped; the
	// notice was appended.
	Capped bool
	// StopReason is what the run's stop reason becomes, or "".
	StopReason contract.StopReason
	// Used counts the delegations before this answer; UnknownRun as in [Used].
	Used       int
	UnknownRun bool
}

// TrimLast applies [Trim] to the last message of a conversation, the only one
// that is ever looked at, and returns the conversation with it. The slice that
// was passed in is not changed.
func TrimLast(messages []model.Message, l Limits) ([]model.Message, Trimmed) {
	if len(messages) == 0 {
		return messages, Trimmed{}
	}
	last, t := Trim(messages[len(messages)-1], l)
	if !t.Changed {
		return messages, t
	}
	out := slices.Clone(messages)
	out[len(out)-1] = last
	return out, t
}

// Trim takes excess delegations out of a fresh answer, after the model has
// spoken and before any tool runs or the ledger is written. The first allowed
// task calls by position stay; calls of other tools are never touched. The
// message keeps its id, so that it replaces the old one.
func Trim(m model.Message, l Limits) (model.Message, Trimmed) {
	var t Trimmed
	if m.Role != model.RoleAssistant {
		return m, t
	}
	total := min(max(l.MaxTotal, MinTotal), MaxTotalLimit)
	t.Used, t.UnknownRun = Used(l.Ledger, l.RunID)
	remaining := max(0, total-t.Used)
	allowed := min(min(max(l.MaxConcurrent, 1), MaxPerResponse), remaining)

	kept := make([]model.ToolCall, 0, len(m.ToolCalls))
	tasks := 0
	for _, c := range m.ToolCalls {
		if c.Name == ToolName {
			if tasks++; tasks > allowed {
				t.Dropped = append(t.Dropped, c)
				continue
			}
		}
		kept = append(kept, c)
	}
	if len(t.Dropped) == 0 {
		return m, t
	}
	t.Changed = true
	m.ToolCalls = kept
	m.Metadata = trimMetadata(m.Metadata, kept)
	if len(kept) == 0 && m.FinishReason == "tool_calls" {
		m.FinishReason = "stop"
	}
	if remaining == 0 {
		t.Capped, t.StopReason = true, contract.StopSubagentCapped
		if m.Text != "" {
			m.Text += "\n\n"
		}
		m.Text += LimitNotice
	}
	return m, t
}

// trimMetadata cuts the provider's raw calls to the kept ones. What has no id
// cannot be matched and goes as well: an orphan would be sent back to the
// provider.
func trimMetadata(meta map[string]any, kept []model.ToolCall) map[string]any {
	if meta == nil {
		return nil
	}
	meta = maps.Clone(meta)
	if raw, ok := meta[RawToolCallsKey].([]any); ok {
		want := map[string]int{} // providers repeat ids; each kept call matches once
		for _, c := range kept {
			want[c.ID]++
		}
		var left []any
		for _, e := range raw {
			entry, _ := e.(map[string]any)
			id, _ := entry["id"].(string)
			if id != "" && want[id] > 0 {
				want[id]--
				left = append(left, e)
			}
		}
		if len(left) == 0 {
			delete(meta, RawToolCallsKey)
		} else {
			meta[RawToolCallsKey] = left
		}
	}
	if len(kept) == 0 {
		delete(meta, RawToolCallsKey)
		delete(meta, FunctionCallKey)
	}
	return meta
}
