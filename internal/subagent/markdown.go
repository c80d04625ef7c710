package subagent

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/herdgate/herdgate/pkg/contract"
)

// MaxMarkdownBytes is the largest file of a definition.
const MaxMarkdownBytes = 512 << 10

// Markdown says what is known when a file is read.
type Markdown struct {
	// Models are the names of the configured models; nil: any is taken.
	Models []string
}

// Note is something about a definition that a person should know: it was read in
// another way than it was written. Line is 0 where none is to blame.
type Note struct {
	Line int
	Text string
}

// foreign are names that other programs give to tools that are the same here.
var foreign = map[string]string{
	"Read": "read_file", "Write": "write_file", "Edit": "str_replace", "MultiEdit": "str_replace",
	"Bash": "bash", "Grep": "grep", "Glob": "glob", "LS": "ls", "WebFetch": "web_fetch",
}

// own are the tools that sub-agents can be offered here.
var own = []string{"read_file", "write_file", "str_replace", "bash", "grep", "glob", "ls", "web_fetch", searchTool, "describe_skill"}

var (
	toolName    = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,256}$`)
	simpleEntry = regexp.MustCompile(`^([A-Za-z_][A-Za-z0-9_-]*):(?:[ \t]+(.*))?$`)
)

// Parse reads a definition out of a Markdown file: front matter between two lines
// of three hyphens, and the prompt after it. Keys and tools that mean nothing here
// become notes. The error says in which line the file is wrong, and what would be
// right.
func (o Markdown) Parse(data []byte) (Custom, []Note, error) {
	p := &markdown{models: o.Models}
	c, err := p.parse(data)
	if err != nil {
		return Custom{}, nil, err
	}
	return c, p.notes, nil
}

// LineError is a fault at a line of a file.
type LineError struct {
	Line int
	Text string
}

// Error tells the line and the fault.
func (e *LineError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Text) }

// Unwrap makes it an [ErrDefinition].
func (e *LineError) Unwrap() error { return ErrDefinition }

type markdown struct {
	models []string
	notes  []Note
}

func (p *markdown) note(line int, format string, args ...any) {
	p.notes = append(p.notes, Note{line, fmt.Sprintf(format, args...)})
}

func at(line int, format string, args ...any) error {
	return &LineError{line, fmt.Sprintf(format, args...)}
}

func (p *markdown) parse(data []byte) (Custom, error) {
	if len(data) > MaxMarkdownBytes {
		return Custom{}, at(1, "the file has %d bytes; want at most %d", len(data), MaxMarkdownBytes)
	}
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	if !utf8.Valid(data) {
		return Custom{}, at(1+bytes.Count(data[:firstInvalid(data)], []byte("\n")), "the file is not UTF-8 text")
	}
	text := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(data))
	head, body, bodyLine, err := split(text)
	if err != nil {
		return Custom{}, err
	}
	fields, err := p.fields(head)
	if err != nil {
		return Custom{}, err
	}
	c := Custom{MaxTurns: nil}
	denied := deniedTools()
	for _, f := range fields {
		if err := p.take(&c, &denied, f); err != nil {
			return Custom{}, err
		}
	}
	c.DisallowedTools = &denied
	c.SystemPrompt = strings.TrimSpace(body)
	switch {
	case c.Name == "":
		return Custom{}, at(1, "there is no name; want a line such as name: code-reviewer in the front matter")
	case strings.TrimSpace(c.Description) == "":
		return Custom{}, at(1, "there is no description; want a line such as description: Reviews changes. It tells when to use the type")
	case c.SystemPrompt == "":
		return Custom{}, at(bodyLine, "nothing follows the front matter; want the sub-agent's system prompt there")
	case utf8.RuneCountInString(c.SystemPrompt) > MaxPromptChars:
		return Custom{}, at(bodyLine, "the prompt has %d characters; want at most %d", utf8.RuneCountInString(c.SystemPrompt), MaxPromptChars)
	}
	return c, nil
}

func firstInvalid(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return len(data)
}

// split takes front matter and body apart; the front matter begins in line 2.
func split(text string) (head, body string, bodyLine int, err error) {
	lines := strings.Split(text, "\n")
	if strings.TrimRight(lines[0], " \t") != "---" {
		return "", "", 0, at(1, "there is no front matter; want a first line of three hyphens, then name: and description:, then three hyphens again")
	}
	for i, l := range lines[1:] {
		if strings.TrimRight(l, " \t") == "---" {
			return strings.Join(lines[1:i+1], "\n"), strings.Join(lines[i+2:], "\n"), i + 3, nil
		}
	}
	return "", "", 0, at(len(lines), "the front matter does not end; want a line of three hyphens after it")
}

// field is one key of the front matter with its value: a text, a list, or null.
type field struct {
	key  string
	line int
	node *yaml.Node // nil for a text of the lenient reading
	text string
}

// fields reads the front matter as YAML. People write descriptions with colons in
// them and no quotes, which other programs take; such front matter is read line by
// line, with a note.
func (p *markdown) fields(head string) ([]field, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(head), &doc); err != nil {
		fields, ok := lenient(head)
		if !ok {
			return nil, at(yamlLine(err), "the front matter is not YAML: %s", yamlText(err))
		}
		p.note(yamlLine(err), "the front matter is not YAML (%s) and was read line by line; put the text in quotes", yamlText(err))
		return fields, unique(fields)
	}
	if len(doc.Content) == 0 {
		return nil, at(1, "the front matter is empty; want name: and description:")
	}
	m := doc.Content[0]
	if m.Kind != yaml.MappingNode {
		return nil, at(m.Line+1, "the front matter is no list of keys; want lines such as name: code-reviewer")
	}
	var fields []field
	for i := 0; i+1 < len(m.Content); i += 2 {
		k, v := m.Content[i], m.Content[i+1]
		if k.Kind != yaml.ScalarNode {
			return nil, at(k.Line+1, "a key is no text; want lines such as name: code-reviewer")
		}
		fields = append(fields, field{key: k.Value, line: k.Line + 1, node: v})
	}
	return fields, unique(fields)
}

// spellings are the keys that other programs write in another way.
var spellings = map[string]string{"disallowedTools": "disallowed_tools", "maxTurns": "max_turns"}

// unique refuses a key that stands there twice, in whichever spelling: the second
// one would take away what the first one denies.
func unique(fields []field) error {
	seen := map[string]int{}
	for _, f := range fields {
		key := cmpOr(spellings[f.key], f.key)
		if before, twice := seen[key]; twice {
			return at(f.line, "%s stands here a second time, after line %d; keep one of them", f.key, before)
		}
		seen[key] = f.line
	}
	return nil
}

var yamlError = regexp.MustCompile(`line (\d+): `)

func yamlLine(err error) int {
	if m := yamlError.FindStringSubmatch(err.Error()); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			return n + 1
		}
	}
	return 2
}

func yamlText(err error) string {
	return yamlError.ReplaceAllString(strings.TrimPrefix(err.Error(), "yaml: "), "")
}

// lenient takes each line that begins with a key as a text up to the next one. It
// knows no lists and no nesting: what looks like either is left to YAML's error.
func lenient(head string) ([]field, bool) {
	var fields []field
	for i, l := range strings.Split(head, "\n") {
		m := simpleEntry.FindStringSubmatch(l)
		trimmed := strings.TrimSpace(l)
		switch {
		case m != nil:
			fields = append(fields, field{key: m[1], line: i + 2, text: strings.TrimSpace(m[2])})
		case trimmed == "" || strings.HasPrefix(trimmed, "#"):
		case len(fields) == 0 || strings.HasPrefix(trimmed, "- "):
			return nil, false
		default:
			last := &fields[len(fields)-1]
			last.text = strings.TrimSpace(last.text + "\n" + trimmed)
		}
	}
	for i, f := range fields {
		if len(f.text) > 1 && (f.text[0] == '"' || f.text[0] == '\'') && f.text[len(f.text)-1] == f.text[0] {
			fields[i].text = f.text[1 : len(f.text)-1]
		}
	}
	return fields, len(fields) > 0
}

// value is the field as one text.
func (f field) value() (string, error) {
	if f.node == nil {
		return f.text, nil
	}
	n := f.node
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.ScalarNode {
		return "", at(f.line, "%s is no text; want one line such as %s: …", f.key, f.key)
	}
	if n.Tag == "!!null" {
		return "", nil
	}
	return n.Value, nil
}

// list is the field as names: a list, or a text with commas. Without a value it is
// nil, an empty list is empty.
func (f field) list() ([]string, error) {
	if f.node != nil && f.node.Kind == yaml.SequenceNode {
		out := []string{}
		for _, n := range f.node.Content {
			if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
				return nil, at(n.Line+1, "%s holds something that is no name; want [a, b] or a, b", f.key)
			}
			if s := strings.TrimSpace(n.Value); s != "" {
				out = append(out, s)
			}
		}
		return bounded(f, out)
	}
	text, err := f.value()
	if err != nil {
		return nil, at(f.line, "%s is no list; want [a, b] or a, b", f.key)
	}
	if f.node == nil {
		text = strings.Trim(text, "[]")
	}
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var out []string
	for s := range strings.SplitSeq(splitOutside(text), "\x00") {
		if s = strings.TrimSpace(s); s != "" {
			out = append(out, s)
		}
	}
	return bounded(f, out)
}

// splitOutside replaces the commas that stand outside of parentheses by NUL.
func splitOutside(text string) string {
	depth := 0
	return strings.Map(func(r rune) rune {
		switch r {
		case '(':
			depth++
		case ')':
			depth = max(depth-1, 0)
		case ',':
			if depth == 0 {
				return 0
			}
		case 0:
			return ' '
		}
		return r
	}, text)
}

func bounded(f field, list []string) ([]string, error) {
	if len(list) > MaxListItems {
		return nil, at(f.line, "%s has %d items; want at most %d", f.key, len(list), MaxListItems)
	}
	return list, nil
}

func (f field) number(limit int) (*int, error) {
	text, err := f.value()
	if err != nil || text == "" {
		return nil, err
	}
	n, convErr := strconv.Atoi(text)
	if convErr != nil || n < 1 || n > limit {
		return nil, at(f.line, "%s is %.40q; want a whole number from 1 to %d", f.key, text, limit)
	}
	return &n, nil
}

// take puts a field into c.
func (p *markdown) take(c *Custom, denied *[]string, f field) error {
	var err error
	switch f.key {
	case "name":
		if c.Name, err = f.value(); err != nil {
			return err
		}
		if c.Name = strings.TrimSpace(c.Name); contract.ValidateToken("name", c.Name) != nil || len(c.Name) > MaxNameChars {
			return at(f.line, "name is %.80q; want 1 to %d letters, digits, hyphens and underscores, such as code-reviewer", c.Name, MaxNameChars)
		}
	case "description":
		if c.Description, err = f.value(); err != nil {
			return err
		}
		c.Description = strings.TrimSpace(c.Description)
		if n := utf8.RuneCountInString(c.Description); n > MaxDescriptionChars {
			return at(f.line, "description has %d characters; want at most %d", n, MaxDescriptionChars)
		}
	case "tools":
		list, err := f.list()
		if err != nil {
			return err
		}
		if len(list) == 1 && list[0] == "*" {
			list = nil
		}
		if c.Tools, err = p.tools(f, list, true); err != nil {
			return err
		}
	case "disallowed_tools", "disallowedTools":
		list, err := f.list()
		if err != nil {
			return err
		}
		list, err = p.tools(f, list, false)
		if err != nil {
			return err
		}
		if *denied = withDenials(list); len(*denied) > MaxListItems {
			return at(f.line, "%s has %d items with the %d that are always denied; want at most %d", f.key, len(*denied), len(deniedTools()), MaxListItems)
		}
	case "skills":
		if c.Skills, err = f.list(); err != nil {
			return err
		}
	case "model":
		return p.model(c, f)
	case "max_turns", "maxTurns":
		c.MaxTurns, err = f.number(maxTurns)
	case "timeout_seconds":
		c.TimeoutSeconds, err = f.number(maxTimeoutSeconds)
	case "pool":
		text, err := f.value()
		if err != nil {
			return err
		}
		if c.Pool = contract.Pool(text); text != "" && c.Pool.Validate() != nil {
			return at(f.line, "pool is %.80q; want the name of a pool, such as default", text)
		}
	case "network":
		text, err := f.value()
		if err != nil {
			return err
		}
		if c.Network, err = strconv.ParseBool(text); err != nil {
			return at(f.line, "network is %.40q; want true or false", text)
		}
	default:
		p.note(f.line, "%s means nothing here and is left out", f.key)
	}
	return err
}

// mcpPrefix begins the names that other programs give to the tools of MCP servers:
// mcp__SERVER__TOOL is SERVER__TOOL here.
const mcpPrefix = "mcp__"

// wholeServer is a name of theirs for all tools of an MCP server.
func wholeServer(name string) bool {
	rest, mcp := strings.CutPrefix(name, mcpPrefix)
	server, tool, named := strings.Cut(rest, "__")
	return mcp && (!named || server == "" || tool == "")
}

// tools translates the names of other programs. What cannot be had here is left
// out, so that a list never becomes wider than it was written: one of which nothing
// is left stays a list, and permits nothing. For the same reason a denial of more
// than one tool is refused, as names compare exactly here.
func (p *markdown) tools(f field, list []string, allow bool) ([]string, error) {
	if list == nil {
		return nil, nil
	}
	out := []string{}
	add := func(name string) {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	for _, name := range list {
		bare, rule, ruled := strings.Cut(name, "(")
		switch mapped := foreign[strings.TrimSpace(bare)]; {
		case ruled && allow:
			p.note(f.line, "%s: %.80q is left out: there are no rules for single calls here, and all of %s would be more", f.key, name, cmpOr(mapped, bare))
		case ruled:
			p.note(f.line, "%s: all of %s is denied: there are no rules for single calls here (%.80q)", f.key, cmpOr(mapped, bare), rule)
			add(cmpOr(mapped, bare))
		case !allow && (strings.Contains(name, "*") || wholeServer(name)):
			return nil, at(f.line, "%s: %.80q denies more than one tool; name each of them, or name in tools what is permitted", f.key, name)
		case wholeServer(name):
			p.note(f.line, "%s: %.80q is left out: tools of MCP servers are named one by one, as SERVER__TOOL", f.key, name)
		case mapped != "":
			p.note(f.line, "%s: %s is called %s here", f.key, name, mapped)
			add(mapped)
		case slices.Contains(own, name):
			add(name)
		case !toolName.MatchString(name):
			p.note(f.line, "%s: %.80q is no name of a tool and is left out", f.key, name)
		case strings.HasPrefix(name, mcpPrefix):
			p.note(f.line, "%s: %s is called %s here", f.key, name, strings.TrimPrefix(name, mcpPrefix))
			add(strings.TrimPrefix(name, mcpPrefix))
		default:
			p.note(f.line, "%s: %s is no built-in tool; it counts only where an executor has a tool of that name", f.key, name)
			add(name)
		}
	}
	return out, nil
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return strings.TrimSpace(b)
}

func (p *markdown) model(c *Custom, f field) error {
	text, err := f.value()
	if err != nil {
		return err
	}
	text = strings.TrimSpace(text)
	if text != "" && text != InheritModel && p.models != nil && !slices.Contains(p.models, text) {
		p.note(f.line, "model: %.80q is not configured (there are: %s); the parent's is taken", text, strings.Join(p.models, ", "))
		text = ""
	}
	c.Model = text
	return nil
}

// IsLineError returns the line of a fault in a file, and its text.
func IsLineError(err error) (*LineError, bool) {
	var e *LineError
	ok := errors.As(err, &e)
	return e, ok
}
