package tool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// maxArgsBytes bounds the arguments of one call.
const maxArgsBytes = 10 << 20

// args reads what a model sent. Models get types wrong in harmless ways, a
// number as a text or a list for a text; what can only have been meant in one
// way is accepted, everything else is told back. The first error sticks.
type args struct {
	raw map[string]json.RawMessage
	err error
}

func readArgs(b json.RawMessage) *args {
	a := &args{}
	b = bytes.TrimSpace(b)
	switch {
	case len(b) > maxArgsBytes:
		a.err = fmt.Errorf("the arguments have %d bytes; want at most %d", len(b), maxArgsBytes)
	case len(b) == 0:
		a.raw = map[string]json.RawMessage{}
	case b[0] != '{':
		a.err = fmt.Errorf("the arguments are no JSON object: %s", quote(string(b)))
	default:
		if a.err = contract.CheckDepth(b, 64); a.err != nil {
			break
		}
		if err := json.Unmarshal(b, &a.raw); err != nil {
			at := ""
			var syn *json.SyntaxError
			if errors.As(err, &syn) {
				at = fmt.Sprintf(" at byte %d", syn.Offset)
			}
			a.err = fmt.Errorf("the arguments are no JSON object%s: %w: %s", at, err, quote(string(b)))
		}
	}
	return a
}

// get finds the first of names that is there and not null.
func (a *args) get(names []string) (json.RawMessage, bool) {
	if a.err != nil {
		return nil, false
	}
	for _, n := range names {
		if v, ok := a.raw[n]; ok && string(v) != "null" {
			return v, true
		}
	}
	return nil, false
}

// str reads a text; further names are spellings that models use instead.
func (a *args) str(names ...string) string {
	v, ok := a.get(names)
	if !ok {
		return ""
	}
	var s string
	if json.Unmarshal(v, &s) == nil {
		return s
	}
	switch v[0] {
	case '{', '[':
		a.err = fmt.Errorf("%s is %s; want a string", names[0], quote(string(v)))
		return ""
	}
	return string(v) // a number or a truth value
}

// content reads a text that may hold anything; an object is taken as the JSON
// that it is.
func (a *args) content(name string) string {
	v, ok := a.get([]string{name})
	if ok && (v[0] == '{' || v[0] == '[') {
		return string(v)
	}
	return a.str(name)
}

func (a *args) need(names ...string) string {
	s := a.str(names...)
	if a.err == nil && strings.TrimSpace(s) == "" {
		a.err = fmt.Errorf("%s is missing or empty; give it as a string", names[0])
	}
	return s
}

func (a *args) has(name string) {
	if _, ok := a.get([]string{name}); a.err == nil && !ok {
		a.err = fmt.Errorf("%s is missing; give it as a string, which may be empty", name)
	}
}

// num reads a number within lo and hi; absent it is fallback.
func (a *args) num(name string, fallback, lo, hi float64) float64 {
	v, ok := a.get([]string{name})
	if !ok {
		return fallback
	}
	s := string(v)
	var text string
	if json.Unmarshal(v, &text) == nil {
		if s = strings.TrimSpace(text); s == "" {
			return fallback
		}
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(f) {
		a.err = fmt.Errorf("%s is %s; want a number", name, quote(string(v)))
		return fallback
	}
	if f < lo || f > hi {
		a.err = fmt.Errorf("%s is %v; want %v to %v", name, f, lo, hi)
	}
	return f
}

func (a *args) int(name string, fallback, lo, hi int) int {
	return int(a.num(name, float64(fallback), float64(lo), float64(hi)))
}

// lineRange reads which lines are wanted, as start_line and end_line or in one of
// the ways of other tools: offset and limit, or view_range. A last line of 0 is
// the end.
func (a *args) lineRange() (first, last int) {
	const most = 1 << 30
	first, last = a.int("start_line", 1, 1, most), a.int("end_line", 0, 0, most)
	if v, ok := a.get([]string{"view_range"}); ok {
		var r []int
		if json.Unmarshal(v, &r) != nil || len(r) != 2 || r[0] < 1 || r[1] < -1 {
			a.err = fmt.Errorf("view_range is %s; want [first line, last line], where -1 is the end", quote(string(v)))
			return first, last
		}
		first, last = r[0], max(r[1], 0)
	}
	if first == 1 {
		first = max(a.int("offset", 1, 0, most), 1)
	}
	if n := a.int("limit", 0, 0, most); n > 0 && last == 0 {
		last = first + n - 1
	}
	return first, last
}

func (a *args) flag(name string) bool {
	switch s := strings.ToLower(strings.TrimSpace(a.str(name))); s {
	case "", "false", "no", "0":
		return false
	case "true", "yes", "1":
		return true
	default:
		if a.err == nil {
			a.err = fmt.Errorf("%s is %s; want true or false", name, quote(s))
		}
		return false
	}
}

// quote shows a text shortly, so that an error never carries a flood back.
func quote(s string) string {
	const limit = 120
	if utf8.RuneCountInString(s) > limit {
		s = string([]rune(s)[:limit]) + "…"
	}
	return strconv.Quote(s)
}

// fileTool is a tool made of a function.
type fileTool struct {
	spec   model.ToolSpec
	writes bool
	call   func(ctx context.Context, a *args) (Result, error)
}

func (t *fileTool) Spec() model.ToolSpec { return t.spec }

// Writes implements OnFiles.
func (t *fileTool) Writes() bool { return t.writes }

// Call implements Tool: an error of the function is for the model, unless the
// call was stopped.
func (t *fileTool) Call(ctx context.Context, call Call) (Result, error) {
	if ctx.Err() != nil {
		return Result{}, context.Cause(ctx)
	}
	a := readArgs(call.Args)
	var res Result
	err := a.err
	if err == nil {
		res, err = t.call(ctx, a)
	}
	if ctx.Err() != nil {
		return res, context.Cause(ctx)
	}
	if err != nil {
		res = Failure(t.spec.Name + ": " + err.Error())
	}
	res.Text = visible(res.Text)
	return res, nil
}

// visible makes a text fit for models and stores: valid UTF-8, and control
// characters but tab and line ends as their pictures (F-088).
func visible(s string) string {
	ok := true
	for i := 0; i < len(s) && ok; i++ {
		c := s[i]
		ok = c < utf8.RuneSelf && c != 0x7f && (c >= ' ' || c == '\t' || c == '\n' || c == '\r')
	}
	if ok {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	for _, r := range s { // broken bytes come as U+FFFD
		switch {
		case r == 0x7f:
			r = '\u2421'
		case r < ' ' && r != '\t' && r != '\n' && r != '\r':
			r += '\u2400'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// schema writes a JSON Schema of type object; props is the text of its properties.
func schema(required, props string) json.RawMessage {
	s := `{"type":"object","properties":{` + props + `}`
	if required != "" {
		s += `,"required":["` + strings.ReplaceAll(required, " ", `","`) + `"]`
	}
	return json.RawMessage(s + "}")
}
