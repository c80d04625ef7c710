package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// RECEIPT-12: a task shows its receipts and the verdict on its citations; a verdict of
// a wrong shape is not shown. Names that others chose cannot write to the terminal.
func TestTaskShowsReceipts(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	rec := contract.TaskRecord{
		TaskID: "t_1", State: contract.StateCompleted, Result: "Did it [r7 bash].",
		Receipts:       []contract.Receipt{{ID: "r7", ToolName: "bash\x1b[2J", Status: "success", OutputSHA256: "0123456789abcdef", OutputBytes: 42, CreatedAt: &at}},
		ReceiptVerdict: &contract.ReceiptVerdict{Resolved: []string{"r7"}, CitationResolved: true},
	}
	show := func(rec contract.TaskRecord) string {
		var b strings.Builder
		if err := printTask(&b, io.Discard, wire.TaskOf(rec)); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	got := show(rec)
	contains(t, "task", got, "RECEIPT", "r7", "bash", "success", "42", "0123456789abcdef", "1 resolved, 0 failed, 0 unknown", "not whether claims are right")
	if strings.Contains(got, "\x1b") {
		t.Errorf("a name writes to the terminal: %q", got)
	}
	rec.ReceiptVerdict = &contract.ReceiptVerdict{CitationResolved: true}
	if got := show(rec); !strings.Contains(got, "citations    none") || strings.Contains(got, "not whether claims") {
		t.Errorf("a report without citations:\n%s", got)
	}
	rec.ReceiptVerdict = &contract.ReceiptVerdict{Resolved: []string{"r7"}, CitationResolved: true, Unknown: []string{"r9"}}
	if got := show(rec); strings.Contains(got, "resolved") {
		t.Errorf("a verdict that contradicts itself is shown:\n%s", got)
	}
	rec.Receipts, rec.ReceiptVerdict = nil, nil
	if got := show(rec); strings.Contains(got, "RECEIPT") || strings.Contains(got, "citations") {
		t.Errorf("a task without receipts:\n%s", got)
	}
}
