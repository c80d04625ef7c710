// Package receipt makes evidence of what tools really did. Every tool result is
// stamped with a receipt that no tool and no model can make; a list of them, the
// ledger, is shown to the model, which cites them in its report; the citations
// are judged against exactly the list that the report's author was shown.
//
// A receipt says that a call ran and how it ended. It never says that a claim is
// right, and the verdict is advice: nothing is refused because of it.
//
// What always holds: ids count for the ledger of one model call alone. What was
// shown is noted on the answer; a completed task without that note, or with a
// broken one, has no receipts at all. Whatever goes wrong in here is logged and
// changes no outcome.
package receipt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"
	"unicode"

	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Keys in the metadata of messages. They are ours alone: values that arrive under
// them from anywhere else are replaced or taken out.
const (
	// Key holds the receipt of a tool result.
	Key = "herdgate_receipt"
	// ShownKey holds, on an answer, the receipts that its author was shown.
	ShownKey = "herdgate_receipts_shown"
)

// Strip takes our keys out of what came from outside (RECEIPT-16). It returns m
// itself where there is nothing to take out.
func Strip[V any](m map[string]V) map[string]V {
	var clean map[string]V
	for _, key := range []string{Key, ShownKey, delegation.ReceiptVerdictKey} {
		if _, ok := m[key]; !ok {
			continue
		}
		if clean == nil {
			clean = maps.Clone(m)
		}
		delete(clean, key)
	}
	if clean == nil {
		return m
	}
	return clean
}

// The states of receipts.
const (
	success        = "success"
	failure        = "error"
	partialSuccess = "partial_success"
)

// Bounds. A receipt has at most 1 KiB of JSON, so those of a record have at most
// 100 KiB, usually 30.
const (
	// MaxReceipts is how many a record keeps, the newest.
	MaxReceipts  = 100
	maxCallChars = 128
	maxToolChars = 64
	digestDigits = 16
)

// stamp makes the receipt of a result. It has no id: that depends on the list in
// which it is shown.
func stamp(call model.ToolCall, res tool.Result, at time.Time) contract.Receipt {
	at = at.UTC()
	return contract.Receipt{
		ToolCallID: plain(call.ID, maxCallChars), ToolName: plain(call.Name, maxToolChars), Status: statusOf(res),
		ArgsSHA256: digest(canonical(call.Args)), OutputSHA256: digest([]byte(res.Text)), OutputBytes: int64(len(res.Text)), CreatedAt: &at,
	}
}

// statusOf: a delegation that was stopped early has done a part.
func statusOf(res tool.Result) string {
	switch {
	case res.IsError:
		return failure
	case res.Metadata[delegation.StatusKey] != nil && res.Metadata[delegation.StopReasonKey] != nil:
		return partialSuccess
	}
	return success
}

// canonical writes arguments that mean the same alike.
func canonical(args string) []byte {
	if strings.TrimSpace(args) == "" {
		return []byte("{}")
	}
	if contract.CheckDepth([]byte(args), contract.MaxDepth) != nil {
		return []byte(args)
	}
	d := json.NewDecoder(strings.NewReader(args))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil || d.More() {
		return []byte(args)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return []byte(args)
	}
	return b
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:digestDigits]
}

// plain bounds a name and leaves nothing in it that JSON or a list would have to
// escape.
func plain(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || strings.ContainsRune("\"\\<>&[]\u2028\u2029\uFFFD", r) {
			return '_'
		}
		return r
	}, strings.ToValidUTF8(s, "_"))
	if r := []rune(s); len(r) > limit {
		s = string(r[:limit])
	}
	return s
}

// valid reports whether r is a receipt as stamp makes them.
func valid(r contract.Receipt) bool {
	return r.ToolName != "" && (r.Status == success || r.Status == failure || r.Status == partialSuccess) &&
		isDigest(r.ArgsSHA256) && isDigest(r.OutputSHA256) && r.OutputBytes >= 0 && r.CreatedAt != nil &&
		r.ToolName == plain(r.ToolName, maxToolChars) && r.ToolCallID == plain(r.ToolCallID, maxCallChars)
}

func isDigest(s string) bool {
	return len(s) == digestDigits && strings.Trim(s, "0123456789abcdef") == ""
}

// decode reads a stored receipt: as it was stamped, or as JSON made it.
func decode(v any) (contract.Receipt, error) {
	r, ok := v.(contract.Receipt)
	if !ok {
		if _, ok := v.(map[string]any); !ok {
			return r, fmt.Errorf("receipt: want an object, got %T", v)
		}
		b, err := json.Marshal(v)
		if err != nil {
			return r, fmt.Errorf("receipt: %w", err)
		}
		d := json.NewDecoder(bytes.NewReader(b))
		if err := d.Decode(&r); err != nil {
			return r, fmt.Errorf("receipt: %w", err)
		}
	}
	if !valid(r) {
		return r, fmt.Errorf("receipt of %q is not one of ours", plain(r.ToolName, maxToolChars))
	}
	return r, nil
}

// item is a receipt in a list, and what a delegation's result says of citations.
type item struct {
	contract.Receipt
	verdict *contract.ReceiptVerdict
}

// scan numbers the receipts of the tool results among messages. Broken ones are
// skipped (RECEIPT-02).
func scan(messages []model.Message) []item {
	out := make([]item, 0, len(messages)/2)
	for _, m := range messages {
		if m.Role != model.RoleTool || m.Metadata[Key] == nil {
			continue
		}
		r, err := decode(m.Metadata[Key])
		if err != nil {
			continue
		}
		r.ID = id(len(out) + 1)
		it := item{Receipt: r}
		if m.ToolName == delegation.ToolName {
			it.verdict = delegation.ReadVerdict(m.Metadata)
		}
		out = append(out, it)
	}
	return out
}

// shown reads what the author of an answer was shown; false if there is no such
// note, or none that can be relied on (RECEIPT-09).
func shown(m model.Message) ([]contract.Receipt, bool) {
	var list []any
	switch v := m.Metadata[ShownKey].(type) {
	case []contract.Receipt:
		for _, r := range v {
			list = append(list, r)
		}
	case []any:
		list = v
	default:
		return nil, false
	}
	out := make([]contract.Receipt, 0, len(list))
	before := 0
	for _, e := range list {
		r, err := decode(e)
		if err != nil {
			return nil, false
		}
		n := number(r.ID)
		if n < 1 || before > 0 && n != before+1 {
			return nil, false
		}
		before = n
		out = append(out, r)
	}
	return out, true
}

// Source says where receipts come from.
type Source string

// The sources.
const (
	// FromAnswer: what the author of the answer was shown.
	FromAnswer Source = "citing_turn"
	// FromResults: the tool results that are there now.
	FromResults Source = "tool_scan"
	// FromNowhere: there is nothing to rely on.
	FromNowhere Source = "none"
)

// Select picks the receipts of a conversation that has ended. A completed one is
// told by its last answer, whose author cited what it was shown, or not at all
// (RECEIPT-08, RECEIPT-09); any other by the tool results that are there if it
// ends on one (RECEIPT-10), or else by what its last answer was shown.
func Select(messages []model.Message, completed bool) ([]contract.Receipt, Source) {
	if n := len(messages); !completed && n > 0 && messages[n-1].Role == model.RoleTool {
		return receipts(scan(messages)), FromResults
	}
	for i := len(messages) - 1; i >= 0; i-- {
		if messages[i].Role != model.RoleAssistant {
			continue
		}
		if got, ok := shown(messages[i]); ok && (completed || len(messages[i].ToolCalls) == 0) {
			return got, FromAnswer
		}
		break
	}
	if completed {
		return nil, FromNowhere
	}
	return receipts(scan(messages)), FromResults
}

func receipts(items []item) []contract.Receipt {
	out := make([]contract.Receipt, len(items))
	for i, it := range items {
		out[i] = it.Receipt
	}
	return out
}

// newest keeps what a record has room for.
func newest(rs []contract.Receipt) []contract.Receipt {
	return rs[max(0, len(rs)-MaxReceipts):]
}
