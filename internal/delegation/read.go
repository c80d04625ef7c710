package delegation

import (
	"encoding/json"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// retiredMaxTurns is a status of an earlier version. It is read, never written
// (GUARD-23).
const retiredMaxTurns = "max_turns_reached"

// Structured is what the metadata on a tool result say. Empty means that they do
// not.
type Structured struct {
	Status       contract.ToolStatus
	ResultBrief  string
	ResultSHA256 string
	Error        string
	StopReason   contract.StopReason
	ModelName    string
	Usage        *contract.Usage
}

// ReadMetadata reads what [Metadata] writes, and what earlier versions wrote. What
// is damaged or not known is left out; without a status that is known there is no
// structured result at all, and it is false: whoever shows the delegation shows it
// as in progress, so that drift is noticed (STATUS-17, STATUS-18).
func ReadMetadata(meta map[string]any) (Structured, bool) {
	text := func(key string) string {
		s, _ := meta[key].(string)
		return Bound(s, MaxMetadataChars)
	}
	s := Structured{ResultBrief: text(ResultBriefKey), Error: text(ErrorKey), ModelName: text(ModelNameKey), Usage: ReadUsage(meta[TokenUsageKey])}
	if r := contract.StopReason(text(StopReasonKey)); r.ValidForTask() {
		s.StopReason = r
	}
	if sum, _ := meta[ResultSHA256Key].(string); isDigest(sum) {
		s.ResultSHA256 = sum
	}
	status, _ := meta[StatusKey].(string)
	switch _, known := stock[contract.ToolStatus(status)]; {
	case known, status == string(contract.ToolCompleted):
		s.Status = contract.ToolStatus(status)
	case status == retiredMaxTurns:
		s.Status = contract.ToolFailed
		if s.ResultBrief != "" {
			s.Status = contract.ToolCompleted
		}
		if s.StopReason == "" {
			s.StopReason = contract.StopTurnCapped
		}
	default:
		return Structured{}, false
	}
	return s, true
}

// ReadUsage reads the three counters of a usage block. One that is missing, no
// integer or negative drops the block: nothing is guessed (STATUS-16).
func ReadUsage(v any) *contract.Usage {
	m, ok := v.(map[string]any)
	if !ok {
		return nil
	}
	var n [3]int64
	for i, key := range []string{"input_tokens", "output_tokens", "total_tokens"} {
		if n[i], ok = counter(m[key]); !ok {
			return nil
		}
	}
	return &contract.Usage{InputTokens: n[0], OutputTokens: n[1], TotalTokens: n[2]}
}

// counter takes what integers become in memory and in JSON.
func counter(v any) (int64, bool) {
	var n int64
	switch v := v.(type) {
	case int64:
		n = v
	case int:
		n = int64(v)
	case float64: // JSON without its form: only whole numbers can have been integers
		if n = int64(v); float64(n) != v {
			return 0, false
		}
	case json.Number:
		var err error
		if n, err = v.Int64(); err != nil {
			return 0, false
		}
	default:
		return 0, false
	}
	return n, n >= 0
}

func isDigest(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}
