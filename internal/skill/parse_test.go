package skill

import (
	"reflect"
	"strings"
	"testing"
)

func header(lines ...string) string { return "---\n" + strings.Join(lines, "\n") + "\n---\nDo it.\n" }

const named = "name: a\ndescription: d"

// What people have for Claude Code is read, SKILL-07: nothing declared, none, some.
func TestParse(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		file  string
		tools []string
		warn  string
	}{
		"nothing declared": {header(named), nil, ""},
		"none":             {header(named, "allowed-tools: []"), []string{}, ""},
		"empty text":       {header(named, `allowed-tools: ""`), []string{}, ""},
		"one name":         {header(named, "allowed-tools: bash"), []string{"bash"}, ""},
		"commas":           {header(named, "allowed-tools: Read, Grep,Bash"), []string{"read_file", "grep", "bash"}, ""},
		"blanks":           {header(named, "allowed-tools: Read Grep"), []string{"read_file", "grep"}, ""},
		"list":             {header(named, "allowed-tools:", "  - read_file", "  - crm__find", "  - Read"), []string{"read_file", "crm__find"}, ""},
		"underscore":       {header(named, "allowed_tools: [ls]"), []string{"ls"}, ""},
		// To allow the tool as a whole would be more than the author meant.
		"limited arguments":      {header(named, "allowed-tools: Read, Bash(git add:*)"), []string{"read_file"}, `4: allowed-tools: "Bash(git add:*)" is left out`},
		"only limited arguments": {header(named, "allowed-tools: [Bash(git:*)]"), []string{}, "is left out"},
		"null":                   {header(named, "allowed-tools: null"), nil, "4: allowed-tools is null, which declares nothing"},
		"unknown key":            {header(named, "colour: green", "license: MIT", "metadata: {x: y}"), nil, `4: "colour" is not known here`},
		"byte-order mark, CRLF":  {"\ufeff" + strings.ReplaceAll(header(named, "allowed-tools: [ls]"), "\n", "\r\n"), []string{"ls"}, ""},
		"long description":       {header("name: a", "description: "+strings.Repeat("d", MaxDescriptionChars+1)), nil, "3: description has more than 1024"},
	} {
		p, warnings, err := Parse([]byte(tt.file))
		if err != nil || p.Name != "a" || p.Description == "" || !p.Enabled || p.Body != "Do it." || !reflect.DeepEqual(p.AllowedTools, tt.tools) {
			t.Errorf("%s: %+v, %v; want tools %#v", name, p, err, tt.tools)
		}
		var got []string
		for _, w := range warnings {
			got = append(got, w.String())
		}
		if told := strings.Join(got, "\n"); tt.warn == "" && told != "" || !strings.Contains(told, tt.warn) {
			t.Errorf("%s: warned of %q, want %q", name, told, tt.warn)
		}
	}
	if p, _, err := Parse([]byte(header(named, "enabled: false"))); err != nil || p.Enabled {
		t.Errorf("enabled: false gives %+v, %v", p, err)
	}
}

// F-092: a broken header is told with its line and with what would be right.
func TestParseBroken(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		file string
		line int
		want string
	}{
		"no header":          {"# Title\n", 1, `the first line is "# Title"; want ---`},
		"empty":              {"", 1, "want ---"},
		"no end":             {"---\nname: a\ndescription: d\ntext", 4, "want a line --- behind it"},
		"empty header":       {"---\n---\n", 1, "want at least name and description"},
		"no keys":            {header("- a"), 2, "no list of keys"},
		"no name":            {header("description: d"), 1, "name is missing"},
		"no description":     {header("name: a"), 1, "description is missing"},
		"null description":   {header("name: a", "description:"), 3, "description is null; want a text"},
		"blank name":         {header("name: ' '", "description: d"), 2, "want a text"},
		"name with slash":    {header("name: bad/name", "description: d"), 2, `name is "bad/name"; want 1 to 64 letters`},
		"name of dots":       {header("name: ..", "description: d"), 2, "want 1 to 64"},
		"name with blanks":   {header("name: bad name", "description: d"), 2, "want 1 to 64"},
		"long name":          {header("name: "+strings.Repeat("a", 65), "description: d"), 2, "want 1 to 64"},
		"twice":              {header(named, "name: b"), 4, `"name" is there twice`},
		"colon":              {header("name: a", "description: use it when: now"), 3, "between quotation marks"},
		"tab":                {header("name: a", "description: d", "\tx: y"), 3, "no YAML"},
		"tool with blank":    {header(named, "allowed-tools: ['a b']"), 4, "want names of 1 to 64"},
		"tool null":          {header(named, "allowed-tools:", "  - ls", "  - null"), 6, "holds null; want names of tools"},
		"tool keys":          {header(named, "allowed-tools: {a: b}"), 4, "want a list of names"},
		"enabled text":       {header(named, "enabled: maybe"), 4, `enabled is "maybe"; want true or false`},
		"reference":          {header("x: &x d", "name: a", "description: *x"), 4, "a reference; want a text"},
		"not UTF-8":          {"---\nname: a\ndescription: \xff\n---\n", 3, "not in UTF-8"},
		"description of map": {header("name: a", "description: {a: b}"), 3, "want a text"},
	} {
		p, _, err := Parse([]byte(tt.file))
		if err == nil || !strings.Contains(err.Error(), tt.want) || lineOf(err) != tt.line {
			t.Errorf("%s: %+v, line %d: %v; want line %d: %s", name, p, lineOf(err), err, tt.line, tt.want)
		}
	}
	if _, _, err := Parse([]byte(header(named) + strings.Repeat("x", MaxFileBytes))); err == nil || !strings.Contains(err.Error(), "more than 262144 bytes") {
		t.Errorf("a file that is too large: %v", err)
	}
	if _, _, err := Parse([]byte(header(named, "metadata: "+strings.Repeat("x", maxHeaderBytes)))); err == nil || !strings.Contains(err.Error(), "the header has") {
		t.Errorf("a header that is too large: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(header(named, "allowed-tools: Read, Bash(git:*)")))
	f.Add([]byte("\ufeff---\nname: bad/name here\ndescription:\nallowed-tools: null\ncolour: green\n\tindented: with a tab\nNo end mark follows this header.\n"))
	f.Add([]byte("---\na: &a [*a]\n---\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, _, err := Parse(b)
		if err != nil {
			return
		}
		if !namePattern.MatchString(p.Name) || p.Description == "" {
			t.Fatalf("%q was taken: %+v", b, p)
		}
		for _, name := range p.AllowedTools {
			if !toolPattern.MatchString(name) {
				t.Fatalf("%q allows %q", b, name)
			}
		}
	})
}
