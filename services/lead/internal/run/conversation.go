package run

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/compact"
	"github.com/herdgate/herdgate/internal/deferral"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/skill"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds of what a run keeps.
const (
	// maxRecordBytes bounds an encoded run record, so that with its headers it
	// stays below the payload limit of a NATS server.
	maxRecordBytes = 900 << 10
	// maxHistoryBytes bounds what a run takes over from its thread.
	maxHistoryBytes = 200 << 10
	// maxOutputBytes bounds the output in a record.
	maxOutputBytes = contract.MaxInlineResultBytes
	// ledgerDescriptionChars bounds a description in the ledger, in code points.
	ledgerDescriptionChars = 200
)

// taskTool is the name of the tool that delegates.
const taskTool = delegation.ToolName

// interrupted answers a call whose outcome died with the process that ran it.
const interrupted = "No result: the lead was interrupted while this call ran, and it is not known whether it had an effect. Check before you repeat it."

// conversation is what a run keeps beside the public fields of its record: the
// lead's messages without the system prompt, and what a process that takes the
// run over must know. It lives in the record's field messages.
type conversation struct {
	Messages []model.Message `json:"messages"`
	// History counts the messages that came from earlier runs of the thread.
	History int `json:"history"`
	// Turns counts the model calls so far.
	Turns int `json:"turns"`
	// Usage is what the lead itself spent; the record's is the sum with its tasks'.
	Usage *contract.Usage `json:"usage,omitempty"`
	// ModelName is the model as its provider named it last.
	ModelName string `json:"model_name,omitempty"`
	// Crashes counts the take-overs from a driver that had not handed over.
	Crashes int `json:"crashes,omitempty"`
	// Reminders counts how often the lead was asked for an answer because it
	// went on delegating with nothing left of its allowance.
	Reminders int `json:"reminders,omitempty"`
	// Kept is what is known of the messages that were taken out, Gone and GoneSteps
	// how many those were; steps are those of the run itself.
	compact.Kept
	Gone      agent.Gone `json:"gone,omitzero"`
	GoneSteps int        `json:"gone_steps,omitempty"`
	// Earlier are the delegations of the thread's earlier runs, with short results: for
	// the model to see, not to count (CAP-10).
	Earlier []contract.Delegation `json:"earlier_delegations,omitempty"`
	// UserID and UserRole are on whose behalf the run works.
	UserID   string `json:"user_id,omitempty"`
	UserRole string `json:"user_role,omitempty"`
	// Attributes are the user's, for rules of authorisation.
	Attributes map[string]string `json:"authz_attributes,omitempty"`
	// Skills says which skills are active: a fold over the run's messages, those that
	// were taken out as well.
	Skills skill.State `json:"skills,omitzero"`
	// Promoted says which tools on demand were found, by the same kind of fold.
	Promoted deferral.State `json:"promoted_tools,omitzero"`
}

func decodeConversation(raw json.RawMessage) (conversation, error) {
	var c conversation
	if len(raw) == 0 {
		return c, nil
	}
	if err := contract.CheckDepth(raw, contract.MaxDepth); err != nil {
		return c, fmt.Errorf("conversation: %w", err)
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return c, fmt.Errorf("conversation: %w", err)
	}
	if c.History < 0 || c.History > len(c.Messages) {
		return c, fmt.Errorf("conversation: history is %d; want 0 to %d", c.History, len(c.Messages))
	}
	if c.Gone.Messages < 0 || c.Gone.Assistants < 0 || c.GoneSteps < 0 {
		return c, fmt.Errorf("conversation: gone is %+v with %d steps; want no negative number", c.Gone, c.GoneSteps)
	}
	return c, nil
}

// clone copies what a failed write must not have changed.
func (c conversation) clone() conversation {
	c.Messages = append([]model.Message(nil), c.Messages...)
	return c
}

// steps returns the indices of the run's own assistant and tool messages: the
// n-th of them is the run's message number GoneSteps+n+1 in its events.
func (c conversation) steps() []int {
	var out []int
	for i := c.History; i < len(c.Messages); i++ {
		if r := c.Messages[i].Role; r == model.RoleAssistant || r == model.RoleTool {
			out = append(out, i)
		}
	}
	return out
}

// assistants counts the assistant messages: the number that the next one gets.
func (c conversation) assistants() int {
	n := c.Gone.Assistants
	for _, m := range c.Messages {
		if m.Role == model.RoleAssistant {
			n++
		}
	}
	return n
}

// open returns the newest assistant message, its number among them, and the
// calls of it that have no result yet.
func (c conversation) open() (msg model.Message, number int, calls []int) {
	answered := map[string]bool{}
	i := len(c.Messages) - 1
	for ; i >= 0 && c.Messages[i].Role == model.RoleTool; i-- {
		answered[c.Messages[i].ToolCallID] = true
	}
	if i < 0 || c.Messages[i].Role != model.RoleAssistant {
		return model.Message{}, 0, nil
	}
	for n, call := range c.Messages[i].ToolCalls {
		if !answered[call.ID] {
			calls = append(calls, n)
		}
	}
	return c.Messages[i], c.assistants() - 1, calls
}

// answerInterrupted answers the open calls of all tools but `task`, whose calls
// are safe to make again. It changes c and reports how many there were.
func (c *conversation) answerInterrupted() int {
	msg, _, open := c.open()
	n := 0
	for _, i := range open {
		call := msg.ToolCalls[i]
		if call.Name == taskTool {
			continue
		}
		c.Messages = append(c.Messages, model.Message{Role: model.RoleTool, ToolCallID: call.ID, ToolName: call.Name, Text: interrupted, IsError: true})
		n++
	}
	return n
}

// number gives messages ids by their place behind those that are gone; the system
// prompt is number 0.
func number(messages []model.Message, gone int) {
	for i := range messages {
		messages[i].ID = fmt.Sprintf("m%d", gone+i+1)
	}
}

// history returns what a new run takes over from an ended one of its thread:
// the newest messages that begin with a user's and stay within limit bytes,
// repaired so that each call has its one result.
func (c conversation) history(limit int) []model.Message {
	var clean []model.Message
	for _, m := range c.Messages {
		if m.Role == model.RoleAssistant && m.Text == "" && len(m.ToolCalls) == 0 {
			continue // an empty reply that the model was asked again for
		}
		m.ErrorFallback, m.ErrorDetail = false, ""
		clean = append(clean, m)
	}
	clean = agent.Repair(clean)
	start, left := len(clean), limit
	for end := len(clean); end > 0; {
		begin := end - 1
		for begin > 0 && clean[begin].Role != model.RoleUser {
			begin--
		}
		if clean[begin].Role != model.RoleUser {
			break // results and answers without the question are of no use
		}
		size := sizeOf(clean[begin:end]) + 16*(end-begin) // with their new ids
		if size > left && end == len(clean) {
			// The newest exchange alone is too large: keep its ends.
			return digestOf(clean[begin:end], limit)
		}
		if size > left {
			break
		}
		left -= size
		start, end = begin, begin
	}
	out := append([]model.Message(nil), clean[start:]...)
	number(out, 0)
	return out
}

// digestOf reduces one exchange to at most limit bytes: results are shortened,
// and if that is not enough the question and the last answer alone are kept.
func digestOf(exchange []model.Message, limit int) []model.Message {
	out := append([]model.Message(nil), exchange...)
	for i := range out {
		if out[i].Role == model.RoleTool {
			out[i].Text = shorten(out[i].Text, 1000)
			out[i].Metadata = nil
		}
	}
	if sizeOf(out) > limit {
		ends := []model.Message{out[0]}
		for i := len(out) - 1; i > 0; i-- {
			if out[i].Role == model.RoleAssistant && len(out[i].ToolCalls) == 0 {
				ends = append(ends, out[i])
				break
			}
		}
		for i := range ends {
			// JSON can make six bytes of one.
			ends[i].Text = shorten(ends[i].Text, limit/(6*len(ends))-1000)
			ends[i].Metadata, ends[i].Native = nil, nil
		}
		out = ends
	}
	number(out, 0)
	return out
}

func sizeOf(messages []model.Message) int {
	b, err := json.Marshal(messages)
	if err != nil {
		return 1 << 30 // cannot be stored, so it is too large
	}
	return len(b)
}

// shorten keeps the beginning of s, and says so, when s has more than n bytes.
func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	n = max(n, 0)
	return strings.ToValidUTF8(s[:n], "") + fmt.Sprintf("\n[cut: the first %d of %d bytes]", n, len(s))
}

// encodeRecord writes the record with its conversation. Above the limit it
// shortens messages, results of tools first and the oldest first, and the
// newest step's last; c is changed accordingly. The ledger is never touched.
func encodeRecord(rec *contract.RunRecord, c *conversation, limit int) ([]byte, error) {
	for level := 0; ; level++ {
		raw, err := json.Marshal(c)
		if err != nil {
			return nil, fmt.Errorf("run %s: conversation: %w", rec.RunID, err)
		}
		rec.Messages = raw
		b, err := json.Marshal(rec)
		if err != nil {
			return nil, fmt.Errorf("run %s: record: %w", rec.RunID, err)
		}
		if len(b) <= limit {
			return b, nil
		}
		if level >= len(shrinkLevels) {
			return nil, fmt.Errorf("%w: run %s: record has %d bytes with everything shortened; want at most %d", errTooLarge, rec.RunID, len(b), limit)
		}
		shrink(c.Messages, len(b)-limit, shrinkLevels[level])
	}
}

// shrinkLevel says which messages may be cut to how many bytes.
type shrinkLevel struct {
	newest bool // also those of the newest step
	calls  bool // assistant texts and arguments as well as results
	bytes  int
}

var shrinkLevels = []shrinkLevel{
	{bytes: 8 << 10}, {bytes: 1 << 10},
	{calls: true, bytes: 2 << 10},
	{newest: true, bytes: 64 << 10}, {newest: true, bytes: 8 << 10},
	{newest: true, calls: true, bytes: 4 << 10}, {newest: true, calls: true, bytes: 512},
}

// shrink shortens messages, the oldest first, until about excess bytes are saved.
func shrink(messages []model.Message, excess int, level shrinkLevel) {
	last := len(messages)
	if !level.newest {
		for last > 0 && messages[last-1].Role == model.RoleTool {
			last--
		}
	}
	for i := 0; i < last && excess > 0; i++ {
		m := &messages[i]
		before := len(m.Text)
		switch {
		case m.Role == model.RoleTool, level.calls && m.Role == model.RoleAssistant:
			m.Text = shorten(m.Text, level.bytes)
			excess -= before - len(m.Text)
		}
		if !level.calls || m.Role != model.RoleAssistant {
			continue
		}
		calls := append([]model.ToolCall(nil), m.ToolCalls...)
		for j := range calls {
			// An open call must keep its arguments: a process that takes over
			// makes it again.
			if len(calls[j].Args) > level.bytes && i < lastAssistant(messages) {
				excess -= len(calls[j].Args)
				calls[j].Args = `{"note":"arguments were left out to save room"}`
			}
		}
		m.ToolCalls = calls
	}
}

func lastAssistant(messages []model.Message) int {
	for i := len(messages) - 1; i >= 0; i-- {
		if messages[i].Role == model.RoleAssistant {
			return i
		}
	}
	return -1
}

// capture adds the `task` calls of an assistant message to the ledger, as they
// are after trimming (CAP-15). Number is the message's among the assistant's.
func capture(ledger []contract.Delegation, run contract.RunID, msg model.Message, number int, now time.Time) []contract.Delegation {
	var calls []contract.Delegation
	for i, call := range msg.ToolCalls {
		if call.Name != taskTool {
			continue
		}
		id := contract.NewTaskID(run, number, i)
		if slices.ContainsFunc(ledger, func(d contract.Delegation) bool { return d.TaskID == id }) {
			continue // a message that is captured again tells nothing new of it
		}
		d := contract.Delegation{TaskID: id, ToolCallID: bound(call.ID, 256), RunID: run, Status: contract.DelegationInProgress, CreatedAt: now.UTC()}
		if args, err := decodeTaskArgs([]byte(call.Args)); err == nil {
			d.SubagentType = bound(args.SubagentType, 128)
			d.Description = bound(args.describe(), ledgerDescriptionChars)
		}
		calls = append(calls, d)
	}
	return delegation.Merge(ledger, calls)
}

// settle writes how a delegation ended into its entry. An entry that has ended stays
// as it is (LEDGER-06): whoever settles it again has seen less.
func settle(ledger []contract.Delegation, id contract.TaskID, o outcomeOf) []contract.Delegation {
	for _, d := range ledger {
		if d.TaskID != id || d.Status != contract.DelegationInProgress {
			continue
		}
		d.Status, d.StopReason, d.ErrorCode = string(o.Status), o.StopReason, o.ErrorCode
		d.ResultBrief, d.ResultSHA256, d.ModelName, d.Usage = o.Brief, o.SHA256, o.ModelName, o.Usage
		return delegation.Merge(ledger, []contract.Delegation{d})
	}
	return ledger
}

// outcomeOf is how one delegation ended, for the ledger.
type outcomeOf struct {
	Status     contract.ToolStatus
	StopReason contract.StopReason
	ErrorCode  contract.ErrorCode
	Brief      string
	SHA256     string
	ModelName  string
	Usage      *contract.Usage
}

// totalUsage is what the lead and its tasks spent. It is computed from the
// ledger each time, so that no report can count twice (USAGE-04).
func totalUsage(own *contract.Usage, ledger []contract.Delegation) *contract.Usage {
	sum := own.Add(nil)
	for _, d := range ledger {
		sum = sum.Add(d.Usage)
	}
	return sum
}

// brief is the bounded form of a result or an error for the ledger.
func brief(text string) string { return delegation.Bound(text, delegation.MaxMetadataChars) }

// bound cuts s to n code points.
func bound(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n])
}
