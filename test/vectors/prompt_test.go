package vectors

import (
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/receipt"
)

// runAcceptanceCriteria: REPORT-06 to REPORT-10. A case whose expected value is a
// list is about the criteria themselves, the others about where they may appear.
func runAcceptanceCriteria(t *testing.T, c vectorCase) {
	in := into[struct {
		Criteria []any `json:"criteria"`
		Receipts bool  `json:"receipts_enabled"`
	}](t, c.inputs)
	usable := prompt.Criteria(in.Criteria)
	if want, ok := c.expected.([]any); ok {
		equal(t, "criteria", append([]string{}, usable...), want)
		return
	}
	child := prompt.Child{Prompt: "p", Task: "t", Criteria: usable}
	if in.Receipts {
		child.Citation = receipt.Example()
	}
	m := prompt.First(child)
	system, task := m[0].Text, m[1].Text
	var evidence any
	if strings.Contains(system, "citations or handles") {
		evidence = "citations or handles"
	} else if strings.Contains(system, prompt.CriteriaNote("")) {
		evidence = "handles only"
	}
	// The texts of these cases are short; a line of their own is what they would be.
	inSystem := false
	for _, s := range usable {
		inSystem = inSystem || strings.Contains(system, "\n- "+s)
	}
	equal(t, "channel", map[string]any{
		"system_message_has_note":     strings.Contains(system, prompt.CriteriaNote(child.Citation)),
		"system_message_has_text":     inSystem,
		"task_message_ends_with_list": len(usable) > 0 && strings.HasSuffix(task, prompt.CriteriaHeading+"\n- "+strings.Join(usable, "\n- ")),
		"evidence":                    evidence,
	}, c.expected)
}
