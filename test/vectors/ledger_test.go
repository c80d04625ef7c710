package vectors

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ledgerLine is an entry as the file writes it: its times are names.
type ledgerLine struct {
	ID           string              `json:"id,omitempty"`
	RunID        string              `json:"run_id,omitempty"`
	Description  string              `json:"description,omitempty"`
	SubagentType string              `json:"subagent_type,omitempty"`
	Status       string              `json:"status,omitempty"`
	StopReason   contract.StopReason `json:"stop_reason,omitempty"`
	ResultBrief  string              `json:"result_brief,omitempty"`
	CreatedAt    string              `json:"created_at,omitempty"`
}

// moments gives the names of times a time each.
type moments []string

func (m *moments) at(name string) time.Time {
	if name == "" {
		return time.Time{}
	}
	i := slices.Index(*m, name)
	if i < 0 {
		i = len(*m)
		*m = append(*m, name)
	}
	return time.Unix(int64(i+1), 0)
}

func (m *moments) name(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return (*m)[t.Unix()-1]
}

func (m *moments) entries(lines []ledgerLine) []contract.Delegation {
	var out []contract.Delegation
	for _, l := range lines {
		out = append(out, contract.Delegation{
			TaskID: contract.TaskID(l.ID), RunID: contract.RunID(l.RunID), Description: l.Description, SubagentType: l.SubagentType,
			Status: l.Status, StopReason: l.StopReason, ResultBrief: l.ResultBrief, CreatedAt: m.at(l.CreatedAt),
		})
	}
	return out
}

func (m *moments) lines(entries []contract.Delegation) []ledgerLine {
	out := []ledgerLine{}
	for _, e := range entries {
		out = append(out, ledgerLine{
			ID: string(e.TaskID), RunID: string(e.RunID), Description: e.Description, SubagentType: e.SubagentType,
			Status: e.Status, StopReason: e.StopReason, ResultBrief: e.ResultBrief, CreatedAt: m.name(e.CreatedAt),
		})
	}
	return out
}

// LEDGER-05, LEDGER-06, LEDGER-07, LEDGER-08
func runLedgerMerge(t *testing.T, c vectorCase) {
	in := into[struct {
		Existing []ledgerLine `json:"existing"`
		New      []ledgerLine `json:"new"`
		// A long ledger is given by its length and its ids, dFIRST..dLAST.
		Count *int   `json:"existing_count"`
		IDs   string `json:"existing_ids"`
	}](t, c.inputs)
	if in.Count != nil {
		var first, last int
		if _, err := fmt.Sscanf(in.IDs, "d%d..d%d", &first, &last); err != nil || last-first+1 != *in.Count {
			t.Fatalf("existing_ids is %q; want dFIRST..dLAST with %d ids: %v", in.IDs, *in.Count, err)
		}
		for i := first; i <= last; i++ {
			in.Existing = append(in.Existing, ledgerLine{ID: fmt.Sprint("d", i), Status: contract.DelegationInProgress, CreatedAt: "t0"})
		}
	}
	var m moments
	existing := m.entries(in.Existing)
	before := slices.Clone(existing)
	got := delegation.Merge(existing, m.entries(in.New))
	if !slices.Equal(existing, before) {
		t.Error("the ledger that was given was changed")
	}
	want := c.object(t, "ledger", "count", "first_id", "last_id")
	if hasKey(want, "ledger") {
		equal(t, "ledger", m.lines(got), want["ledger"])
	}
	if hasKey(want, "count") {
		equal(t, "count", len(got), want["count"])
	}
	if hasKey(want, "first_id") {
		equal(t, "first_id", got[0].TaskID, want["first_id"])
	}
	if hasKey(want, "last_id") {
		equal(t, "last_id", got[len(got)-1].TaskID, want["last_id"])
	}
}
