package prompt

import (
	"strings"

	"github.com/herdgate/herdgate/internal/model"
)

// Child is what a sub-agent's first messages are made of.
type Child struct {
	// Prompt is the definition's own. Skills never become part of it (PROMPT-04).
	Prompt string
	// Citation shows how receipts are cited; empty while there are none.
	Citation string
	// Skills, Deferred and Routing are sections that others write, or "".
	Skills, Deferred, Routing string

	// Task is what is to be done, and Criteria what is wanted of the result.
	Task     string
	Criteria []string
}

// The ids of the first messages.
const (
	SystemID = "system"
	TaskID   = "task"
	DateID   = "date"
)

// First returns what a sub-agent begins with: one system message, unless it would
// be empty, and the task (PROMPT-01).
func First(c Child) []model.Message {
	criteria := Criteria(c.Criteria)
	var out []model.Message
	if s := system(c, len(criteria) > 0); s != "" {
		out = append(out, model.Message{ID: SystemID, Role: model.RoleSystem, Text: s})
	}
	return append(out, model.Message{ID: TaskID, Role: model.RoleUser, Text: task(c.Task, criteria)})
}

// system joins the parts of the system message in their order (PROMPT-02).
func system(c Child, criteria bool) string {
	note := ""
	if criteria {
		note = CriteriaNote(c.Citation)
	}
	return joined(c.Prompt, ReportContract(c.Citation), note, c.Skills, c.Deferred, c.Routing)
}

// task appends the criteria to the task (REPORT-07, REPORT-09).
func task(text string, criteria []string) string {
	if len(criteria) == 0 {
		return text
	}
	var b strings.Builder
	b.WriteString(text + "\n\n" + CriteriaHeading)
	for _, c := range criteria {
		b.WriteString("\n- " + strings.ReplaceAll(c, "\n", "\n  "))
	}
	return b.String()
}

// joined joins what is not blank by blank lines.
func joined(parts ...string) string {
	var kept []string
	for _, p := range parts {
		if p = strings.TrimSpace(p); p != "" {
			kept = append(kept, p)
		}
	}
	return strings.Join(kept, "\n\n")
}
