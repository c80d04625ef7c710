package vectors

import (
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// runReceiptCitations drives both the verdict on a report and the choice of the
// receipts by which it is judged (RECEIPT-04 to RECEIPT-12).
func runReceiptCitations(t *testing.T, c vectorCase) {
	if _, ok := c.inputs.(map[string]any)["messages"]; ok {
		runReceiptSelection(t, c)
		return
	}
	in := into[struct {
		Report   string             `json:"report"`
		Receipts []contract.Receipt `json:"receipts"`
	}](t, c.inputs)
	want := c.object(t, "cited", "resolved", "failed", "unknown", "no_citation_claims", "citation_resolved")
	verdict := receipt.Judge(in.Report, in.Receipts)
	if err := verdict.Validate(); err != nil {
		t.Error(err)
	}
	got := plain(t, verdict).(map[string]any)
	cited := []string{}
	for _, c := range receipt.Parse(in.Report) {
		cited = append(cited, c.ID)
	}
	got["cited"] = cited
	for key, v := range want {
		equal(t, key, got[key], v)
	}
}

func runReceiptSelection(t *testing.T, c vectorCase) {
	in := into[struct {
		Messages []struct {
			Type    string    `json:"type"`
			Ledger  *[]string `json:"ledger"`
			Receipt bool      `json:"receipt"`
		} `json:"messages"`
		Terminal contract.State `json:"terminal"`
	}](t, c.inputs)
	want := c.object(t, "source", "ids")
	now := time.Now().UTC()
	made := func(id string) contract.Receipt {
		digest := strings.Repeat("a", 16)
		return contract.Receipt{ID: id, ToolName: "bash", Status: "success", ArgsSHA256: digest, OutputSHA256: digest, CreatedAt: &now}
	}
	var messages []model.Message
	for _, m := range in.Messages {
		msg := model.Message{Role: model.RoleTool}
		if m.Type == "ai" {
			msg.Role = model.RoleAssistant
		}
		if m.Ledger != nil {
			ledger := []contract.Receipt{}
			for _, id := range *m.Ledger {
				ledger = append(ledger, made(id))
			}
			msg.Metadata = map[string]any{receipt.ShownKey: ledger}
		}
		if m.Receipt {
			msg.Metadata = map[string]any{receipt.Key: made("")}
		}
		messages = append(messages, msg)
	}
	receipts, source := receipt.Select(messages, in.Terminal == contract.StateCompleted)
	var ids []string
	if receipts != nil {
		ids = []string{}
	}
	for _, r := range receipts {
		ids = append(ids, r.ID)
	}
	equal(t, "source", string(source), want["source"])
	equal(t, "ids", ids, want["ids"])
}
