package run

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead/internal/runapi"
)

func withReceiptsSet(on bool, mode string) leadOption {
	return func(c *Config, _ *Deps) {
		settings := config.Default()
		settings.Verification = config.Verification{ReceiptsEnabled: on, ReceiptsRenderMode: mode}
		c.Settings = &settings
	}
}

// ledgerOf is the list of receipts that a request shows, or "".
func ledgerOf(req model.Request) string {
	for _, m := range req.Messages {
		if m.Marked(model.MetaHidden) && strings.Contains(m.Text, "<tool_receipts>") {
			return m.Text
		}
	}
	return ""
}

// RESULT-07, RECEIPT-03, RECEIPT-12, RECEIPT-15, RECEIPT-16: the lead's result of a
// delegation is the report untouched, with the verdict in its metadata; the model reads
// the verdict in its own list of receipts, as counts with what they do not say. A
// verdict of a wrong shape is dropped. Switched off, none of it is there.
func TestLeadReadsTheVerdict(t *testing.T) {
	t.Parallel()
	good := &contract.ReceiptVerdict{Resolved: []string{"r1"}, Failed: []contract.FailedCitation{{ID: "r2", Reason: contract.CitationAnchor}}, Unknown: []string{}}
	for name, c := range map[string]struct {
		on      bool
		mode    string
		verdict *contract.ReceiptVerdict
		told    string // in the list after the delegation; "" if there is no list
		first   bool   // the list is shown after a call of the lead's own
	}{
		"on":     {true, config.RenderDelegationOnly, good, "1 resolved, 1 failed, 0 unknown (whether calls happened, not whether claims are right)", false},
		"always": {true, config.RenderAlways, good, "1 resolved, 1 failed", true},
		"broken": {true, config.RenderDelegationOnly, &contract.ReceiptVerdict{CitationResolved: true, NoCitationClaims: true}, "[r2 task] success", false},
		"off":    {false, config.RenderAlways, good, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(contract.TaskRequest) *contract.TaskRecord {
				rec := completed("Did it [r1] [r2 x].")
				rec.ReceiptVerdict = c.verdict
				return rec
			})
			m := &scripted{answer: func(_ context.Context, turn int, _ model.Request) (model.Response, error) {
				switch turn {
				case 0:
					return call("", model.ToolCall{ID: "a", Name: "nope", Args: "{}"})
				case 1:
					return call("", taskCall("b", "Oslo"))
				}
				return say("done")
			}}
			l := w.lead("lead-1", m, withReceiptsSet(c.on, c.mode))
			rec := l.wait(l.start(runapi.RunInput{Metadata: map[string]string{receipt.Key: "forged", "own": "x"}}).RunID)
			if rec.Status != contract.RunCompleted || len(rec.Metadata) != 1 || rec.Metadata["own"] != "x" {
				t.Errorf("run = %+v", rec)
			}
			asked := m.requests()
			if got := ledgerOf(asked[0]); got != "" {
				t.Errorf("before any call: %s", got)
			}
			if got := ledgerOf(asked[1]); (got != "") != c.first || c.first && !strings.Contains(got, "[r1 nope] error") {
				t.Errorf("after its own call: %q", got)
			}
			last := asked[len(asked)-1]
			got := ledgerOf(last)
			if c.told == "" && got != "" || !strings.Contains(got, c.told) || strings.Contains(got, "resolved") != (c.on && c.verdict == good) {
				t.Errorf("after the delegation: %q", got)
			}
			result := results(last)[0]
			if !strings.HasSuffix(result.Text, "Result:\nDid it [r1] [r2 x].") {
				t.Errorf("result = %q", result.Text)
			}
			if v := delegation.ReadVerdict(result.Metadata); (v != nil) != (c.on && c.verdict == good) {
				t.Errorf("verdict in the metadata: %+v", v)
			}
			if _, stamped := result.Metadata[receipt.Key]; stamped != c.on {
				t.Errorf("metadata = %v", result.Metadata)
			}
			kept, _ := json.Marshal(rec.Messages)
			if strings.Contains(string(kept), "tool_receipts") || !c.on && strings.Contains(string(kept), "receipt") {
				t.Errorf("stored is %s", kept)
			}
		})
	}
}

// RECEIPT-01, TOOL-07: the metadata that a refused delegation gets does not cost it
// its receipt.
func TestRefusedDelegationKeepsItsReceipt(t *testing.T) {
	t.Parallel()
	meta := stamp(model.Message{Text: "no", Metadata: map[string]any{receipt.Key: "r"}})
	if meta[receipt.Key] != "r" || meta[delegation.StatusKey] != string(contract.ToolFailed) {
		t.Errorf("metadata = %v", meta)
	}
}
