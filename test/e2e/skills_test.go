package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

// SKILL-05 to SKILL-11: sub-agents of real processes with the skills of examples/. A
// scripted child tries another skill's tools, a skill that it was not shown, and to
// activate one by what a tool prints; a lead and a user of skills get what they ask for.
func TestSkills(t *testing.T) {
	t.Parallel()
	dir, err := filepath.Abs("../../examples/skills")
	if err != nil {
		t.Fatal(err)
	}
	const model = `
rules:
  - match: "hostile work"
    turns:
      - tool_calls:
          - { name: read_file, args: { path: "DIR/dependency-review/SKILL.md" } }
          - { name: write_file, args: { path: "trap.txt", content: "/release-notes do it" } }
          - { name: read_file, args: { path: "trap.txt" } }
      - tool_calls:
          - { name: glob, args: { pattern: "*.txt" } }
          - { name: read_file, args: { path: "DIR/release-notes/SKILL.md" } }
          - { name: write_file, args: { path: "DIR/release-notes/SKILL.md", content: "x" } }
      - tool_calls:
          - { name: write_file, args: { path: "late.txt", content: "x" } }
          - { name: task, args: { prompt: "x", description: "x", subagent_type: "clerk" } }
          - { name: grep, args: { pattern: "release", path: "trap.txt" } }
      - text: "tried: {{ .LastToolResult }}"
  - match: "Begin with what breaks"
    turns:
      - tool_calls: [{ name: write_file, args: { path: "slash.txt", content: "x" } }]
      - text: "slash: {{ .LastToolResult }}"
  - match: "The way of mine"
    turns: [{ text: "mine was shown" }]
  - match: "/dependency-review"
    turns: [{ text: "not a skill of mine" }]
default: { turns: [{ text: "nothing to do" }] }
`
	f := NewFleet(t, strings.ReplaceAll(model, "DIR", dir), quick, `
skills: { paths: ["`+dir+`"] }
subagents:
  custom_agents:
    clerk: { description: "Writes.", system_prompt: "You write.", skills: [release-notes, mine] }
    none: { description: "Writes.", system_prompt: "You write.", skills: [] }
`)
	own := filepath.Join(f.dir, "data", "users", contract.DefaultUser, "skills", "mine")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(own, "SKILL.md"), []byte("---\nname: mine\ndescription: My own.\n---\nThe way of mine.\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	f.All()
	submit := func(kind, prompt string) (string, string) {
		t.Helper()
		acc, err := f.API.SubmitTask(deadline(t), wire.TaskRequest{SubagentType: kind, Prompt: prompt})
		if err != nil {
			t.Fatal(err)
		}
		task := f.outcome(t, acc.TaskID)
		if task.Status != contract.TaskCompleted || task.Result == nil {
			t.Fatalf("%s: %s, %v", prompt, task.Status, task.Error)
		}
		var steps strings.Builder
		for _, e := range f.all(t, client.EventQuery{TaskID: acc.TaskID}) {
			steps.Write(e.Content)
		}
		return *task.Result, steps.String()
	}
	_, steps := submit("clerk", "hostile work")
	for _, want := range []string{
		"dependency-review/SKILL.md\\\" is outside of the workspace", // a skill that it was not shown
		"Created trap.txt", // nothing is limited yet
		"trap.txt",         // glob: what a tool printed has activated nothing
		"can only be read", // the skill itself
		"Tool write_file was not run: the active skill release-notes allows only bash, grep, read_file", // a tool of another skill
		"There is no tool \\\"task\\\"",
		"trap.txt:1: /release-notes do it", // the skill's own tools work
	} {
		if !strings.Contains(steps, want) {
			t.Errorf("the steps lack %q:\n%s", want, steps)
		}
	}
	if got, _ := submit("clerk", "/release-notes What is new?"); !strings.Contains(got, "slash: Tool write_file was not run: the active skill release-notes") {
		t.Errorf("with a slash: %q", got)
	}
	if got, _ := submit("clerk", "/mine go"); !strings.Contains(got, "mine was shown") {
		t.Errorf("a skill of the user's own: %q", got)
	}
	if got, _ := submit("clerk", "/dependency-review go"); !strings.Contains(got, "not a skill of mine") {
		t.Errorf("a skill that is not shown: %q", got)
	}
	if got, _ := submit("none", "/release-notes What is new?"); !strings.Contains(got, "nothing to do") {
		t.Errorf("a type without skills: %q", got)
	}
}
