package dispatch

import (
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// RECEIPT-12: a task shows the receipts and the verdict of its record; a list shows
// the verdict alone, and neither shows one of a wrong shape.
func TestReceiptsOfATask(t *testing.T) {
	t.Parallel()
	d, c, _ := newDispatcher(t)
	at := time.Now().UTC()
	rec := recordOf(request("t_1"), 1, contract.StateCompleted)
	rec.Receipts = []contract.Receipt{{ID: "r1", ToolName: "bash", Status: "success", OutputSHA256: strings.Repeat("a", 16), CreatedAt: &at}}
	rec.ReceiptVerdict = &contract.ReceiptVerdict{Resolved: []string{"r1"}, Unknown: []string{"r2"}}
	put(t, c, contract.TaskKey("t_1"), rec)
	broken := recordOf(request("t_2"), 2, contract.StateCompleted)
	broken.ReceiptVerdict = &contract.ReceiptVerdict{Resolved: []string{"everything"}}
	put(t, c, contract.TaskKey("t_2"), broken)

	v, err := d.Get(t.Context(), "acme", "t_1")
	if err != nil || len(v.Receipts) != 1 || v.Receipts[0].ToolName != "bash" || v.ReceiptVerdict == nil || len(v.ReceiptVerdict.Unknown) != 1 {
		t.Errorf("task = %+v, %v", v, err)
	}
	if v, err := d.Get(t.Context(), "acme", "t_2"); err != nil || v.ReceiptVerdict != nil {
		t.Errorf("verdict of a wrong shape: %+v, %v", v.ReceiptVerdict, err)
	}
	page, err := d.List(t.Context(), ListQuery{Tenant: "acme"})
	if err != nil || len(page.Tasks) != 2 || page.Tasks[1].Receipts != nil || page.Tasks[1].ReceiptVerdict == nil {
		t.Errorf("list = %+v, %v", page.Tasks, err)
	}

	// RECEIPT-15: switched off, what records hold of another time is not shown.
	d.HideReceipts()
	if v, err = d.Get(t.Context(), "acme", "t_1"); err != nil || v.Receipts != nil || v.ReceiptVerdict != nil {
		t.Errorf("hidden: task = %+v, %v", v, err)
	}
	if page, err = d.List(t.Context(), ListQuery{Tenant: "acme"}); err != nil || len(page.Tasks) != 2 || page.Tasks[1].ReceiptVerdict != nil {
		t.Errorf("hidden: list = %+v, %v", page.Tasks, err)
	}
}
