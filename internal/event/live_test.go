package event

import (
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// EVT-09, USAGE-02: the usage so far is told to those who follow, and is not
// stored with the step.
func TestUsageOfStepsIsLiveOnly(t *testing.T) {
	rec := contract.TaskRecord{TaskID: "t1", RunID: "r1", ThreadID: "th", Tenant: "default", Attempt: 1}
	ev := Running(rec, 1, contract.Step{Kind: contract.StepAI, Text: "x"}, "m", &contract.Usage{InputTokens: 1, OutputTokens: 2, TotalTokens: 3}, "/herdgate/executor/x", time.Now())
	stored, ok := Record(ev, 7)
	if !ok || strings.Contains(string(stored.Metadata)+string(stored.Content), "usage") {
		t.Errorf("stored = %s %s", stored.Content, stored.Metadata)
	}
	live, ok := Live(ev, 7)
	if !ok || !strings.Contains(string(live.Metadata), `"total_tokens":3`) || strings.Contains(string(live.Content), "usage") {
		t.Errorf("live = %s %s", live.Content, live.Metadata)
	}
}
