package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/model/modeltest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// RECEIPT-03, RECEIPT-08, RECEIPT-13, RECEIPT-15, RESULT-07: over real processes and a
// strict provider, a sub-agent is shown its receipts and cites them, the task shows
// them with the verdict, and the lead's model reads the verdict; switched off, nobody
// hears of any receipt.
func TestReceipts(t *testing.T) {
	t.Parallel()
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprintf("enabled=%v", on), func(t *testing.T) {
			t.Parallel()
			srv := modeltest.New(t,
				modeltest.Calls(modeltest.Call{ID: "t", Name: "task", Args: `{"description":"look","prompt":"look around","subagent_type":"general-purpose"}`}),
				modeltest.Calls(modeltest.Call{ID: "ls1", Name: "ls", Args: `{"path":"."}`}),
				modeltest.Text("Looked [r1 ls], tested [r2]."), modeltest.Text("the run is done"))
			f := NewFleet(t, "", `models: [{ name: main, provider: openai, model: fake-1, base_url: "`+srv.URL()+`", api_key_env: HERDGATE_TEST_KEY }]`,
				fmt.Sprintf("verification: { receipts_enabled: %v }", on))
			f.All()
			acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
			if err != nil {
				t.Fatal(err)
			}
			last := contract.EventRecord{}
			if err := f.API.Stream(deadline(t), client.EventQuery{RunID: acc.RunID}, 0, func(e contract.EventRecord) error { last = e; return nil }); err != nil {
				t.Fatal(err)
			}
			reqs := srv.Requests()
			if last.EventType != contract.RecordRunCompleted || len(reqs) != 4 {
				t.Fatalf("the feed ends with %s after %d requests, want 4", last.EventType, len(reqs))
			}
			page, err := f.API.ListTasks(deadline(t), client.TaskQuery{RunID: acc.RunID})
			if err != nil || len(page.Tasks) != 1 {
				t.Fatalf("tasks = %+v, %v", page.Tasks, err)
			}
			task, err := f.API.GetTask(deadline(t), page.Tasks[0].TaskID)
			if err != nil {
				t.Fatal(err)
			}
			if !on {
				for i, r := range reqs {
					if strings.Contains(strings.ToLower(string(r.Body)), "receipt") {
						t.Errorf("request %d tells of receipts: %s", i, r.Body)
					}
				}
				if task.Receipts != nil || task.ReceiptVerdict != nil {
					t.Errorf("task = %+v", task)
				}
				return
			}
			if body := string(reqs[2].Body); !strings.Contains(body, "[r1 ls] success") {
				t.Errorf("the sub-agent was shown %s", body)
			}
			if body := string(reqs[3].Body); !strings.Contains(body, "[r1 task] success") || !strings.Contains(body, "1 resolved, 0 failed, 1 unknown (whether calls happened, not whether claims are right)") {
				t.Errorf("the lead was shown %s", body)
			}
			if len(task.Receipts) != 1 || task.Receipts[0].ToolName != "ls" || task.Receipts[0].Status != "success" {
				t.Errorf("receipts = %+v", task.Receipts)
			}
			if v := task.ReceiptVerdict; v == nil || v.CitationResolved || len(v.Resolved) != 1 || len(v.Unknown) != 1 || v.Unknown[0] != "r2" {
				t.Errorf("verdict = %+v", v)
			}
		})
	}
}
