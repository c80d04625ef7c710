package delegation

import (
	"encoding/json"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ReceiptVerdictKey is the key of the verdict on a report's citations in the
// metadata of a tool result (RESULT-07).
const ReceiptVerdictKey = "subagent_receipt_verdict"

// ReadVerdict returns the verdict in the metadata of a tool result, or nil where
// there is none of the right shape (RECEIPT-12).
func ReadVerdict(metadata map[string]any) *contract.ReceiptVerdict {
	var v contract.ReceiptVerdict
	switch m := metadata[ReceiptVerdictKey].(type) {
	case contract.ReceiptVerdict:
		v = m
	case map[string]any:
		b, err := json.Marshal(m)
		if err != nil || json.Unmarshal(b, &v) != nil {
			return nil
		}
	default:
		return nil
	}
	if v.Validate() != nil {
		return nil
	}
	return &v
}
