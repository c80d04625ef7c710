package skill

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// FileName is the name of the file that makes a folder a skill.
const FileName = "SKILL.md"

// Bounds of one skill.
const (
	// MaxFileBytes bounds a SKILL.md, header and body.
	MaxFileBytes = 256 << 10
	// MaxDescriptionChars bounds a description, in code points.
	MaxDescriptionChars = 1024
	maxHeaderBytes      = 32 << 10
	maxTools            = 200
)

var (
	namePattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	toolPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
)

// Parsed is what a SKILL.md says.
type Parsed struct {
	Name, Description string
	// AllowedTools: nil declares nothing, empty declares no tool.
	AllowedTools []string
	Enabled      bool
	Body         string
}

// Warning is something about a skill that its author should know. A skill with a
// broken file is left out; all others are as usable as without it.
type Warning struct {
	File string
	// Line is 0 if it concerns no line.
	Line int
	Text string
	// Broken: because of it the skill is left out.
	Broken bool
}

// String writes the warning with its place.
func (w Warning) String() string {
	if w.Line > 0 {
		return fmt.Sprintf("%s:%d: %s", w.File, w.Line, w.Text)
	}
	return w.File + ": " + w.Text
}

// lineError is what is wrong in a line of a file.
type lineError struct {
	line int
	text string
}

func (e *lineError) Error() string { return e.text }

func wrong(line int, format string, args ...any) error {
	return &lineError{line: line, text: fmt.Sprintf(format, args...)}
}

// known are the keys of a header that are read or, as they say nothing to us, passed over.
var known = []string{"name", "description", "allowed-tools", "enabled", "license", "metadata", "version", "author", "compatibility"}

// Parse reads a SKILL.md. What it returns besides an error is not to be used; what
// can be used although something is odd comes with warnings without a file.
func Parse(content []byte) (Parsed, []Warning, error) {
	p := Parsed{Enabled: true}
	header, body, err := split(content)
	if err != nil {
		return p, nil, err
	}
	p.Body = body
	var doc yaml.Node
	// The line of the opening mark is kept empty, so that lines count from the file's first.
	if err := yaml.Unmarshal([]byte("\n"+header), &doc); err != nil {
		return p, nil, headerError(err)
	}
	if len(doc.Content) == 0 {
		return p, nil, wrong(1, "the header is empty; want at least name and description")
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return p, nil, wrong(top.Line, "the header is no list of keys; want lines such as name: my-skill")
	}
	var warnings []Warning
	seen := map[string]bool{}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		name := strings.ReplaceAll(key.Value, "allowed_tools", "allowed-tools")
		if seen[name] {
			return p, nil, wrong(key.Line, "%s is there twice; keep one", quote(name))
		}
		seen[name] = true
		more, err := p.set(name, key, value)
		if err != nil {
			return p, nil, err
		}
		warnings = append(warnings, more...)
	}
	switch {
	case p.Name == "":
		return p, nil, wrong(1, "name is missing; want name: followed by 1 to 64 letters, digits, _ or -")
	case p.Description == "":
		return p, nil, wrong(1, "description is missing; want description: followed by what the skill is for and when to use it")
	}
	return p, warnings, nil
}

// set takes one key of a header.
func (p *Parsed) set(name string, key, value *yaml.Node) ([]Warning, error) {
	var err error
	switch name {
	case "name":
		if p.Name, err = text(name, value); err == nil && !namePattern.MatchString(p.Name) {
			err = wrong(value.Line, "name is %s; want 1 to 64 letters, digits, _ or -", quote(p.Name))
		}
	case "description":
		if p.Description, err = text(name, value); err == nil && utf8.RuneCountInString(p.Description) > MaxDescriptionChars {
			p.Description = string([]rune(p.Description)[:MaxDescriptionChars])
			return []Warning{{Line: value.Line, Text: fmt.Sprintf("description has more than %d characters; the rest is not shown to models", MaxDescriptionChars)}}, nil
		}
	case "allowed-tools":
		return p.setTools(value)
	case "enabled":
		if value.Kind != yaml.ScalarNode || value.Decode(&p.Enabled) != nil || value.Tag != "!!bool" {
			err = wrong(value.Line, "enabled is %s; want true or false", shown(value))
		}
	default:
		if !slices.Contains(known, name) {
			return []Warning{{Line: key.Line, Text: fmt.Sprintf("%s is not known here and has no effect", quote(name))}}, nil
		}
	}
	return nil, err
}

// claude are tools under the names that skills for Claude Code use.
var claude = map[string]string{
	"Read": "read_file", "Write": "write_file", "Edit": "str_replace", "MultiEdit": "str_replace", "Bash": "bash",
	"Glob": "glob", "Grep": "grep", "LS": "ls", "WebFetch": "web_fetch", "Task": "task", "ToolSearch": "tool_search",
}

// setTools takes allowed-tools: a list, or a text with commas or blanks between names.
func (p *Parsed) setTools(value *yaml.Node) ([]Warning, error) {
	type item struct {
		line int
		name string
	}
	var items []item
	switch {
	case value.Kind == yaml.ScalarNode && value.Tag == "!!null":
		return []Warning{{Line: value.Line, Text: "allowed-tools is null, which declares nothing; want a list, [] for no tools, or no such line"}}, nil
	case value.Kind == yaml.ScalarNode:
		for _, name := range words(value.Value) {
			items = append(items, item{value.Line, name})
		}
	case value.Kind == yaml.SequenceNode:
		for _, e := range value.Content {
			if e.Kind != yaml.ScalarNode || e.Tag == "!!null" || strings.TrimSpace(e.Value) == "" {
				return nil, wrong(e.Line, "allowed-tools holds %s; want names of tools", shown(e))
			}
			items = append(items, item{e.Line, strings.TrimSpace(e.Value)})
		}
	default:
		return nil, wrong(value.Line, "allowed-tools is %s; want a list of names of tools", shown(value))
	}
	if len(items) > maxTools {
		return nil, wrong(value.Line, "allowed-tools has %d entries; want at most %d", len(items), maxTools)
	}
	p.AllowedTools = []string{}
	var warnings []Warning
	for _, it := range items {
		name := it.name
		if ours, ok := claude[name]; ok {
			name = ours
		}
		if open := strings.IndexByte(name, '('); open > 0 {
			// To allow the tool as a whole would be more than was meant.
			warnings = append(warnings, Warning{Line: it.line, Text: fmt.Sprintf("allowed-tools: %s is left out: arguments cannot be limited; write the tool's name alone to allow it whole", quote(name))})
			continue
		}
		if !toolPattern.MatchString(name) {
			return nil, wrong(it.line, "allowed-tools holds %s; want names of 1 to 64 letters, digits, _ or -", quote(name))
		}
		if !slices.Contains(p.AllowedTools, name) {
			p.AllowedTools = append(p.AllowedTools, name)
		}
	}
	return warnings, nil
}

// words splits a text at commas and blanks, but not inside brackets.
func words(s string) []string {
	depth := 0
	return strings.FieldsFunc(s, func(r rune) bool {
		switch r {
		case '(':
			depth++
		case ')':
			depth--
		case ',', ' ', '\t', '\n':
			return depth <= 0
		}
		return false
	})
}

// text is a value that must be a text that is not blank.
func text(name string, n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || strings.TrimSpace(n.Value) == "" {
		return "", wrong(n.Line, "%s is %s; want a text", name, shown(n))
	}
	return strings.TrimSpace(n.Value), nil
}

// split takes header and body apart.
func split(content []byte) (header, body string, err error) {
	switch {
	case len(content) > MaxFileBytes:
		return "", "", wrong(0, "the file has more than %d bytes; move details into files beside it", MaxFileBytes)
	case !utf8.Valid(content):
		line := 1
		for rest := content; len(rest) > 0; {
			r, size := utf8.DecodeRune(rest)
			if r == utf8.RuneError && size <= 1 {
				break
			}
			if r == '\n' {
				line++
			}
			rest = rest[size:]
		}
		return "", "", wrong(line, "the file is not in UTF-8; save it in that encoding")
	}
	content = bytes.TrimPrefix(content, []byte("\xef\xbb\xbf"))
	lines := strings.Split(strings.ReplaceAll(string(content), "\r\n", "\n"), "\n")
	if strings.TrimRight(lines[0], " \t") != "---" {
		return "", "", wrong(1, "the first line is %s; want --- and then the header", quote(lines[0]))
	}
	for i, l := range lines[1:] {
		if strings.TrimRight(l, " \t") != "---" {
			continue
		}
		header = strings.Join(lines[1:i+1], "\n")
		if len(header) > maxHeaderBytes {
			return "", "", wrong(1, "the header has %d bytes; want at most %d", len(header), maxHeaderBytes)
		}
		return header, strings.TrimSpace(strings.Join(lines[i+2:], "\n")), nil
	}
	return "", "", wrong(len(lines), "the header has no end; want a line --- behind it")
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// headerError words what YAML does not understand.
func headerError(err error) error {
	line := 1
	msg := err.Error()
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		if m[1] != "" {
			_, _ = fmt.Sscan(m[1], &line)
		}
		msg = msg[len(m[0]):]
	}
	hint := ""
	switch {
	case strings.Contains(msg, "mapping values"):
		hint = `; put a text that holds ": " between quotation marks`
	case strings.Contains(msg, "character that cannot start any token"):
		hint = "; indent with blanks, not tabs, and put texts with special characters between quotation marks"
	}
	return wrong(line, "the header is no YAML: %s%s", msg, hint)
}

// lineOf is the line that an error of [Parse] concerns.
func lineOf(err error) int {
	var e *lineError
	if errors.As(err, &e) {
		return e.line
	}
	return 0
}

func shown(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a set of keys"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.AliasNode:
		return "a reference"
	case n.Tag == "!!null":
		return "null"
	}
	return quote(n.Value)
}

func quote(s string) string {
	if r := []rune(s); len(r) > 80 {
		s = string(r[:80]) + "…"
	}
	return fmt.Sprintf("%q", s)
}
