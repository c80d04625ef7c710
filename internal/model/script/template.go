package script

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/prompt"
)

// maxOutput bounds what one template may write, in bytes.
const maxOutput = 1 << 20

var errOutput = errors.New("template wrote more than 1 MiB")

// view is what templates see.
type view struct {
	LastToolResult string
	ToolResults    []toolResult
	AllToolResults []toolResult
	Input          string
	Agent          string
}

// toolResult is a tool message in a template. Printed it is its text.
type toolResult struct{ Name, Text string }

func (t toolResult) String() string { return t.Text }

func newView(agent string, msgs []model.Message) view {
	v := view{Agent: agent}
	step := len(msgs)
	for step > 0 && msgs[step-1].Role != model.RoleAssistant {
		step--
	}
	input := false
	for i, m := range msgs {
		switch m.Role {
		case model.RoleUser:
			if !input && !m.Marked(model.MetaHidden) {
				v.Input, input = prompt.Unframe(m.Text), true
			}
		case model.RoleTool:
			r := toolResult{Name: m.ToolName, Text: m.Text}
			v.AllToolResults = append(v.AllToolResults, r)
			v.LastToolResult = m.Text
			if i >= step {
				v.ToolResults = append(v.ToolResults, r)
			}
		}
	}
	return v
}

// The functions take a text or a list; grep, sort and uniq give back what they
// got: lines of a text stay a text.
var funcs = template.FuncMap{
	"lines":   toLines,
	"grep":    grep,
	"sort":    func(v any) (any, error) { return each(v, func(l []string) []string { slices.Sort(l); return l }) },
	"uniq":    func(v any) (any, error) { return each(v, uniq) },
	"indent":  indent,
	"trim":    func(v any) (string, error) { s, err := toText(v); return strings.TrimSpace(s), err },
	"join":    join,
	"default": orDefault,
	"count":   func(v any) (int, error) { l, err := toLines(v); return len(l), err },
	"json": func(v any) (string, error) {
		b, err := json.Marshal(v)
		return string(b), err
	},
	// The standard printf can be made to write without end.
	"printf": func(string, ...any) (string, error) { return "", errors.New("printf is not available here") },
}

func parseTemplate(s string) (*template.Template, error) {
	return template.New("text").Funcs(funcs).Option("missingkey=error").Parse(s)
}

func (t text) render(v view) (string, error) {
	if t.tmpl == nil {
		return t.plain, nil
	}
	var w bounded
	if err := t.tmpl.Execute(&w, v); err != nil {
		return "", err
	}
	return w.String(), nil
}

// bounded is a writer that refuses more than maxOutput.
type bounded struct{ strings.Builder }

func (b *bounded) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxOutput {
		return 0, errOutput
	}
	return b.Builder.Write(p)
}

// render gives the JSON value with its templates filled in.
func (v value) render(d view) (any, error) {
	switch {
	case v.str != nil:
		return v.str.render(d)
	case v.fields != nil:
		out := make(map[string]any, len(v.fields))
		for k, f := range v.fields {
			r, err := f.render(d)
			if err != nil {
				return nil, err
			}
			out[k] = r
		}
		return out, nil
	case v.list != nil:
		out := make([]any, len(v.list))
		for i, f := range v.list {
			r, err := f.render(d)
			if err != nil {
				return nil, err
			}
			out[i] = r
		}
		return out, nil
	}
	return v.scalar, nil
}

func toText(v any) (string, error) {
	switch v := v.(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	case toolResult:
		return v.Text, nil
	case []string:
		return strings.Join(v, "\n"), nil
	case []toolResult:
		l := make([]string, len(v))
		for i, r := range v {
			l[i] = r.Text
		}
		return strings.Join(l, "\n"), nil
	case int:
		return fmt.Sprint(v), nil
	}
	return "", fmt.Errorf("want a text or a list, not %T", v)
}

// toLines gives the lines of a text that are not blank, or a list as it is.
func toLines(v any) ([]string, error) {
	if l, ok := v.([]string); ok {
		return slices.Clone(l), nil
	}
	s, err := toText(v)
	if err != nil {
		return nil, err
	}
	var out []string
	for l := range strings.Lines(s) {
		if l = strings.TrimRight(l, "\r\n"); strings.TrimSpace(l) != "" {
			out = append(out, l)
		}
	}
	return out, nil
}

func each(v any, f func([]string) []string) (any, error) {
	l, err := toLines(v)
	if err != nil {
		return nil, err
	}
	l = f(l)
	if _, ok := v.([]string); ok {
		return l, nil
	}
	return strings.Join(l, "\n"), nil
}

func grep(pattern string, v any) (any, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	return each(v, func(l []string) []string {
		return slices.DeleteFunc(l, func(s string) bool { return !re.MatchString(s) })
	})
}

func uniq(l []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(l, func(s string) bool {
		dup := seen[s]
		seen[s] = true
		return dup
	})
}

func indent(n int, v any) (string, error) {
	s, err := toText(v)
	if err != nil {
		return "", err
	}
	if n < 0 || n > 100 {
		return "", fmt.Errorf("indent by %d; want 0 to 100", n)
	}
	pad := strings.Repeat(" ", n)
	return pad + strings.ReplaceAll(s, "\n", "\n"+pad), nil
}

func join(sep string, v any) (string, error) {
	if l, ok := v.([]toolResult); ok {
		texts := make([]string, len(l))
		for i, r := range l {
			texts[i] = r.Text
		}
		return strings.Join(texts, sep), nil
	}
	l, err := toLines(v)
	return strings.Join(l, sep), err
}

func orDefault(fallback string, v any) (string, error) {
	s, err := toText(v)
	if strings.TrimSpace(s) == "" {
		return fallback, err
	}
	return s, err
}
