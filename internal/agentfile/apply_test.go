package agentfile_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/agentfile"
	"github.com/herdgate/herdgate/internal/client/wire"
)

// The examples are what they say they are.
func TestExamples(t *testing.T) {
	t.Parallel()
	dir := filepath.Join("..", "..", "examples", "agents")
	for file, want := range map[string]string{"code-reviewer.md": "code-reviewer", "team.yaml": "test-writer release-notes"} {
		f, err := os.Open(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		defs, _, err := agentfile.ReadDefinitions(file, f)
		var got []string
		for _, d := range defs {
			got = append(got, d.Name)
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %q, %v; want %s", file, got, err, want)
		}
	}
}

func TestReadDefinitions(t *testing.T) {
	t.Parallel()
	read := func(file, text string) ([]agentfile.Definition, error) {
		defs, _, err := agentfile.ReadDefinitions(file, strings.NewReader(text))
		return defs, err
	}
	defs, err := read("x.yaml", "---\nname: A\ndescription: d\nsystem_prompt: p\ntools: []\nenabled: false\n---\n---\n{\"name\": \"b\", \"description\": \"d\", \"system_prompt\": \"p\"}\n")
	if err != nil || len(defs) != 2 || defs[0].Name != "a" || defs[0].Request.Tools == nil || *defs[0].Request.Enabled || defs[1].Request.Tools != nil {
		t.Fatalf("%+v, %v", defs, err)
	}
	stored := wire.Subagent{
		Name: "b", Enabled: true, Description: "d", SystemPrompt: "p", DisallowedTools: []string{"task", "ask_clarification", "present_files"},
		Model: "inherit", MaxTurns: 50, TimeoutSeconds: 900, Revision: 7,
	}
	if !defs[1].Same(stored) {
		t.Error("what is stored as it is counts as changed")
	}
	for name, change := range map[string]func(*wire.Subagent){
		"enabled": func(s *wire.Subagent) { s.Enabled = false }, "tools": func(s *wire.Subagent) { s.Tools = []string{} },
		"prompt": func(s *wire.Subagent) { s.SystemPrompt = "q" }, "turns": func(s *wire.Subagent) { s.MaxTurns = 1 }, "network": func(s *wire.Subagent) { s.Network = true },
	} {
		s := stored
		if change(&s); defs[1].Same(s) {
			t.Errorf("another %s counts as unchanged", name)
		}
	}
	for _, c := range [][3]string{
		{"x.yaml", "", "no definition"}, {"x.yaml", "name: a\ndescription: d\nsystem_prompt: p\nsudo: true\n", "document 1: unmarshal errors:\n  line 4: field sudo"},
		{"x.yaml", "name: a\ndescription: d\nsystem_prompt: p\n---\nname: A\ndescription: d\nsystem_prompt: p\n", "document 2: a is defined"},
		{"x.yaml", "name: a\n", "description is blank"}, {"x.md", "---\nname: a\n---\np", "x.md:1: there is no description"},
		{"x.md", "---\nname: a_b\ndescription: d\n---\np", "letters, digits and hyphens"},
	} {
		if defs, err := read(c[0], c[1]); err == nil || defs != nil || !strings.Contains(err.Error(), c[2]) {
			t.Errorf("%q: %+v, %v; want %q", c[1], defs, err, c[2])
		}
	}
}
