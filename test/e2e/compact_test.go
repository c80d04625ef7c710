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

// COMPACT-01, COMPACT-03, COMPACT-05, COMPACT-09: over real processes and a strict
// provider, the section summarization compacts a sub-agent's conversation, and the
// steps of its task are told without a gap.
func TestCompaction(t *testing.T) {
	t.Parallel()
	ls := func(n int) modeltest.Reply {
		return modeltest.Calls(modeltest.Call{ID: fmt.Sprint("ls", n), Name: "ls", Args: `{"path":"."}`})
	}
	srv := modeltest.New(t,
		modeltest.Calls(modeltest.Call{ID: "t", Name: "task", Args: `{"description":"look","prompt":"look around","subagent_type":"general-purpose"}`}),
		ls(1), ls(2), ls(3), modeltest.Text("THE SUMMARY"), ls(4), modeltest.Text("the child is done"), modeltest.Text("the run is done"))
	f := NewFleet(t, "", `models: [{ name: main, provider: openai, model: fake-1, base_url: "`+srv.URL()+`", api_key_env: HERDGATE_TEST_KEY }]`,
		"summarization: { enabled: true, trigger: { type: messages, value: 7 }, keep: { type: messages, value: 2 } }")
	f.All()
	acc, err := f.API.StartRun(deadline(t), wire.RunRequest{Input: "please delegate"})
	if err != nil {
		t.Fatal(err)
	}
	last, steps := contract.EventRecord{}, 0
	if err := f.API.Stream(deadline(t), client.EventQuery{RunID: acc.RunID}, 0, func(e contract.EventRecord) error {
		if last = e; e.EventType == contract.RecordStep {
			steps++
			if want := fmt.Sprintf(`"message_index":%d`, steps); !strings.Contains(string(e.Content), want) {
				t.Errorf("step %d: %s", steps, e.Content)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if last.EventType != contract.RecordRunCompleted || steps != 9 {
		t.Errorf("the feed ends with %s after %d steps of the task, want 9", last.EventType, steps)
	}
	reqs := srv.Requests()
	if len(reqs) != 8 {
		t.Fatalf("%d requests, want 8", len(reqs))
	}
	if !strings.Contains(reqs[4].Messages[0].Text(), "<old_messages>") || len(reqs[4].Messages) != 1 {
		t.Errorf("the request for the summary is %s", reqs[4].Body)
	}
	if body := string(reqs[5].Body); !strings.Contains(body, "THE SUMMARY") || strings.Contains(body, `"ls1"`) || !strings.Contains(body, `"ls3"`) {
		t.Errorf("the request after it is %s", body)
	}
}
