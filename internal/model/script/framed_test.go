package script

import (
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
)

// PROMPT-06: rules and templates see a task as it was before it was framed.
func TestFramedTask(t *testing.T) {
	t.Parallel()
	s := parse(t, `
rules:
  - agent: "*"
    match_regex: "^look at (it|this)$"
    turns: [{text: "asked to {{ .Input }}"}]
`)
	task := user(prompt.Frame("look at it"))
	hidden := user("receipts")
	hidden.Metadata = map[string]any{model.MetaHidden: true}
	msg, _ := talk(t, s, "helper", []model.Message{hidden, task})
	if msg.Text != "asked to look at it" {
		t.Errorf("answer %q", msg.Text)
	}
	msg, _ = talk(t, s, "helper", []model.Message{user(prompt.Frame("read it"))})
	if want := `The script has no rule for agent "helper" and this message: "read it". Add a rule, or a default.`; msg.Text != want {
		t.Errorf("answer %q, want %q", msg.Text, want)
	}
}
