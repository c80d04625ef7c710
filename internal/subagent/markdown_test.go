package subagent

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// A definition as people have it for another program, with all that this one knows.
func TestMarkdown(t *testing.T) {
	t.Parallel()
	text := "\ufeff---\r\nname: code-reviewer\r\ndescription: Reviews changes.\r\ntools: Read, Grep, Bash(git:*), mcp__x__y, odd_tool, Read\r\nmodel: sonnet\r\ncolor: blue\r\n" +
		"disallowedTools: [Write, bash]\r\nskills: [a, b]\r\nmaxTurns: 7\r\ntimeout_seconds: 60\r\npool: gpu\r\nnetwork: true\r\n---\r\n\r\nYou review.\r\n---\r\nMore.\r\n"
	c, notes, err := Markdown{Models: []string{"main"}}.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	want := Custom{
		Name: "code-reviewer", Description: "Reviews changes.", SystemPrompt: "You review.\n---\nMore.",
		Tools: []string{"read_file", "grep", "x__y", "odd_tool"}, DisallowedTools: ptr([]string{"write_file", "bash", "task", "ask_clarification", "present_files"}),
		Skills: []string{"a", "b"}, Pool: "gpu", MaxTurns: ptr(7), TimeoutSeconds: ptr(60), Network: true,
	}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("read %+v\nwant %+v", c, want)
	}
	told := map[int]string{}
	for _, n := range notes {
		told[n.Line] += n.Text + "\n"
	}
	for line, words := range map[int][]string{4: {"Read is called read_file", "Bash(git:*)", "would be more", "mcp__x__y is called x__y", "odd_tool is no built-in"}, 5: {"sonnet", "main"}, 6: {"color means nothing here"}, 7: {"Write is called write_file"}} {
		for _, w := range words {
			if !strings.Contains(told[line], w) {
				t.Errorf("line %d: %q, want %q in it", line, told[line], w)
			}
		}
	}
}

// The difference between no list, an empty one, and one of which nothing is left.
func TestMarkdownLists(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		"": nil, "tools:": nil, "tools: ": nil, "tools: '*'": nil, "tools: []": {}, "tools: Bash(ls:*)": {}, "tools: [Read, ls]": {"read_file", "ls"}, "tools:\n  - Glob\n  - Edit": {"glob", "str_replace"},
	} {
		c, _, err := Markdown{}.Parse([]byte("---\nname: a\ndescription: d\n" + line + "\n---\np"))
		if err != nil || !reflect.DeepEqual(c.Tools, want) {
			t.Errorf("%q: %#v, %v; want %#v", line, c.Tools, err, want)
		}
		if got := *c.DisallowedTools; !reflect.DeepEqual(got, denied) {
			t.Errorf("%q: denied %q", line, got)
		}
	}
}

// Descriptions with colons and no quotes are common, and taken by other programs.
func TestMarkdownThatIsNotYAML(t *testing.T) {
	t.Parallel()
	text := "---\nname: helper\ndescription: Use this when: tests fail. Example: user: 'go'\n  and more\ntools: Read, Grep\n---\np"
	c, notes, err := Markdown{}.Parse([]byte(text))
	if err != nil || c.Description != "Use this when: tests fail. Example: user: 'go'\nand more" || !reflect.DeepEqual(c.Tools, []string{"read_file", "grep"}) {
		t.Errorf("read %+v, %v", c, err)
	}
	if len(notes) == 0 || !strings.Contains(notes[0].Text, "quotes") {
		t.Errorf("notes = %+v", notes)
	}
}

// A broken file is told with its line and with what would be right.
func TestMarkdownFaults(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct {
		line int
		says string
	}{
		"": {1, "three hyphens"}, "hello": {1, "three hyphens"}, "---\nname: a\n": {3, "does not end"}, "---\n---\np": {1, "is empty"},
		"---\n- a\n---\np":                                                            {2, "no list of keys"},
		"---\ndescription: d\n---\np":                                                 {1, "no name"},
		"---\nname: a\n---\np":                                                        {1, "no description"},
		"---\nname: a\ndescription: d\n---\n \n":                                      {5, "system prompt"},
		"---\nname: a b\ndescription: d\n---\np":                                      {2, "such as code-reviewer"},
		"---\nname: a\nname: b\ndescription: d\n---\np":                               {3, "second time, after line 2"},
		"---\nname: a\ndescription: d\nmax_turns: 0\n---\np":                          {4, "whole number from 1"},
		"---\nname: a\ndescription: d\nnetwork: maybe\n---\np":                        {4, "true or false"},
		"---\nname: a\ndescription: d\ntools: {a: b}\n---\np":                         {4, "want [a, b]"},
		"---\nname: a\ndescription: d\ntools: [[a]]\n---\np":                          {4, "want [a, b]"},
		"---\nname: a\ndescription: \xff\n---\np":                                     {3, "UTF-8"},
		"---\nname: a\ndescription: \"d\n  - x: [\n---\np":                            {0, "not YAML"},
		"---\nname: a\ndescription: d\npool: 'a b'\n---\np":                           {4, "pool"},
		"---\nname: a\ndescription: [x]\n---\np":                                      {3, "no text"},
		"---\nname: &a [*a]\ndescription: d\n---\np":                                  {0, ""},
		"---\nname: a\ndescription: d\n---\n" + strings.Repeat("x", MaxPromptChars+1): {5, "at most"},
	} {
		_, _, err := Markdown{}.Parse([]byte(text))
		e, ok := IsLineError(err)
		if !ok || !errors.Is(err, ErrDefinition) || want.line != 0 && e.Line != want.line || !strings.Contains(e.Text, want.says) {
			t.Errorf("%.60q: %v; want line %d and %q", text, err, want.line, want.says)
		}
	}
}

func FuzzMarkdown(f *testing.F) {
	f.Add([]byte("---\nname: a\ndescription: d\ntools: Read, Bash(x, y)\n---\np"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := Markdown{}.Parse(data)
		if err == nil && (c.Name == "" || c.Description == "" || c.SystemPrompt == "") {
			t.Errorf("taken without what it needs: %+v", c)
		}
		if _, ok := IsLineError(err); err != nil && !ok {
			t.Errorf("no line: %v", err)
		}
	})
}

// A denial that would deny nothing here is translated or refused, never lost: names
// compare exactly, and the tools of MCP servers have other names.
func TestMarkdownDenialsAreKept(t *testing.T) {
	t.Parallel()
	parse := func(lines string) (Custom, []Note, error) {
		return Markdown{}.Parse([]byte("---\nname: a\ndescription: d\n" + lines + "\n---\np"))
	}
	c, notes, err := parse("disallowed_tools: [mcp__github__create_issue]")
	if err != nil || (*c.DisallowedTools)[0] != "github__create_issue" || len(notes) != 1 {
		t.Errorf("denied %q, %v, %v", *c.DisallowedTools, notes, err)
	}
	for _, name := range []string{"*", "mcp__*", "mcp__github", "mcp__github__", "mcp__github__*", "github__*"} {
		_, _, err := parse("disallowedTools: ['" + name + "']")
		if e, ok := IsLineError(err); !ok || e.Line != 4 || !strings.Contains(e.Text, "name each of them") {
			t.Errorf("a denial of %s: %v", name, err)
		}
		c, notes, err := parse("tools: [ls, '" + name + "']")
		if err != nil || !reflect.DeepEqual(c.Tools, []string{"ls"}) || len(notes) != 1 {
			t.Errorf("tools with %s: %q, %v, %v", name, c.Tools, notes, err)
		}
	}
	for _, twice := range []string{"disallowed_tools: [a]\ndisallowedTools: [b]", "max_turns: 5\nmaxTurns: 6"} {
		if _, _, err := parse(twice); err == nil || !strings.Contains(err.Error(), "line 5") {
			t.Errorf("%q: %v", twice, err)
		}
	}
}

// What is always denied counts: a list that is stored can be read again (REG-06).
func TestDenialsAreBounded(t *testing.T) {
	t.Parallel()
	var names []string
	for i := range MaxListItems {
		names = append(names, fmt.Sprintf("t%d", i))
	}
	m := Managed{Name: "a", Description: "d", SystemPrompt: "p", DisallowedTools: names}
	if _, err := m.Normalize(); err == nil || !strings.Contains(err.Error(), "disallowed_tools has 1003 items") {
		t.Errorf("too many with those that are added: %v", err)
	}
	if _, _, err := (Markdown{}).Parse([]byte("---\nname: a\ndescription: d\ndisallowed_tools: " + strings.Join(names, ",") + "\n---\np")); err == nil || !strings.Contains(err.Error(), "1003") {
		t.Errorf("too many in a file: %v", err)
	}
	m.DisallowedTools = names[:MaxListItems-len(deniedTools())]
	m, err := m.Normalize()
	if err == nil {
		_, err = m.Normalize()
	}
	if err != nil {
		t.Errorf("as many as there may be: %v", err)
	}
}
