package contract

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Breaks lists how current breaks what released has promised: a schema or a field
// that is gone, a type that changed, and, by the direction of each message, what is
// written beyond the promise or not taken any more. Both are schemas by name.
func Breaks(released, current map[string][]byte) ([]string, error) {
	directions := map[string]Direction{}
	for _, m := range Messages() {
		directions[m.Name] = m.Direction
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(released)) {
		if current[name] == nil {
			out = append(out, name+": the schema is gone")
			continue
		}
		var before, now map[string]any
		if err := json.Unmarshal(released[name], &before); err != nil {
			return nil, fmt.Errorf("released %s: %w", name, err)
		}
		if err := json.Unmarshal(current[name], &now); err != nil {
			return nil, fmt.Errorf("current %s: %w", name, err)
		}
		direction, ok := directions[name]
		if !ok {
			direction = Both
		}
		c := comparison{direction: direction, before: before, now: now, seen: map[[2]string]bool{}}
		c.compare(name, before, now)
		out = append(out, c.breaks...)
	}
	return out, nil
}

type comparison struct {
	direction   Direction
	before, now map[string]any // the whole schemas, for references
	seen        map[[2]string]bool
	breaks      []string
}

func (c *comparison) say(path, format string, args ...any) {
	c.breaks = append(c.breaks, path+": "+fmt.Sprintf(format, args...))
}

// follow returns what a reference points to, and its name.
func follow(root, s map[string]any) (map[string]any, string) {
	ref, ok := s["$ref"].(string)
	if !ok {
		return s, ""
	}
	defs, _ := root["$defs"].(map[string]any)
	name := strings.TrimPrefix(ref, "#/$defs/")
	target, _ := defs[name].(map[string]any)
	return target, name
}

// shape is a schema in a form that is easy to compare.
type shape struct {
	types    []string // nil: any
	words    []string // the only ones, or the known ones of an open list
	open     bool
	others   any // what an open list takes beside them
	schema   map[string]any
	fields   map[string]any
	required []string
}

func shapeOf(root, s map[string]any) (shape, string) {
	nullable := false
	if list, ok := s["anyOf"].([]any); ok && len(list) == 2 {
		if second, _ := list[1].(map[string]any); second["type"] == "null" {
			s, nullable = list[0].(map[string]any), true
		}
	}
	s, name := follow(root, s)
	out := shape{schema: s}
	switch t := s["type"].(type) {
	case string:
		out.types = []string{t}
	case []any:
		out.types = texts(t)
	}
	if nullable && out.types != nil {
		out.types = append(out.types, "null")
	}
	if v, ok := s["const"].(string); ok {
		out.types, out.words = []string{"string"}, []string{v}
	}
	if v, ok := s["enum"].([]any); ok {
		out.words = texts(v)
	}
	if list, ok := s["anyOf"].([]any); ok && len(list) > 0 {
		first, _ := list[0].(map[string]any)
		known, _ := first["enum"].([]any)
		out.words, out.open, out.others = texts(known), true, list[1:]
	}
	out.fields, _ = s["properties"].(map[string]any)
	required, _ := s["required"].([]any)
	out.required = texts(required)
	return out, name
}

func texts(list []any) []string {
	var out []string
	for _, v := range list {
		out = append(out, fmt.Sprint(v))
	}
	return out
}

// compared are the keywords that compare looks at; of no other one is it known what
// a change means, so that none is allowed.
var compared = []string{
	"$schema", "$id", "$ref", "$defs", "title", "description", "type", "const", "enum", "anyOf", "properties", "required", "items",
	"additionalProperties", "maxLength", "maxItems", "maximum", "minLength", "minItems", "minimum", "pattern", "format",
}

func (c *comparison) compare(path string, before, now map[string]any) {
	was, nameBefore := shapeOf(c.before, before)
	is, nameNow := shapeOf(c.now, now)
	if nameBefore != "" {
		key := [2]string{nameBefore, nameNow}
		if c.seen[key] {
			return
		}
		c.seen[key] = true
	}
	written, taken := c.direction&Written != 0, c.direction&Taken != 0
	if was.types != nil || is.types != nil {
		more := is.types == nil && was.types != nil || was.types != nil && !within(is.types, was.types)
		less := was.types == nil && is.types != nil || is.types != nil && !within(was.types, is.types)
		if more && written || less && taken {
			c.say(path, "the type was %q and is %q", was.types, is.types)
		}
	}
	c.words(path, was, is)
	for _, f := range slices.Sorted(maps.Keys(was.fields)) {
		if is.fields[f] == nil {
			c.say(path+"."+f, "the field is gone")
			continue
		}
		c.compare(path+"."+f, was.fields[f].(map[string]any), is.fields[f].(map[string]any))
	}
	if written && !within(was.required, is.required) {
		c.say(path, "not always written any more: %q", minus(was.required, is.required))
	}
	if taken && !within(is.required, was.required) {
		c.say(path, "asked for now: %q", minus(is.required, was.required))
	}
	for _, k := range []string{"maxLength", "maxItems", "maximum"} {
		c.limit(path, k, was.schema[k], is.schema[k], 1)
	}
	for _, k := range []string{"minLength", "minItems", "minimum"} {
		c.limit(path, k, was.schema[k], is.schema[k], -1)
	}
	for _, k := range []string{"pattern", "format"} {
		a, b := was.schema[k], is.schema[k]
		if a != b && (written && a != nil || taken && b != nil) {
			c.say(path, "%s was %v and is %v", k, a, b)
		}
	}
	for _, k := range []string{"items", "additionalProperties"} {
		a, _ := was.schema[k].(map[string]any)
		b, _ := is.schema[k].(map[string]any)
		switch {
		case a != nil && b != nil:
			c.compare(path+"[]", a, b)
		case !reflect.DeepEqual(was.schema[k], is.schema[k]):
			c.say(path, "%s was %v and is %v", k, was.schema[k], is.schema[k])
		}
	}
	keys := maps.Clone(was.schema)
	maps.Copy(keys, is.schema)
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		if !slices.Contains(compared, k) && !reflect.DeepEqual(was.schema[k], is.schema[k]) {
			c.say(path, "%s was %v and is %v", k, was.schema[k], is.schema[k])
		}
	}
}

func (c *comparison) words(path string, was, is shape) {
	written, taken := c.direction&Written != 0, c.direction&Taken != 0
	switch {
	case was.words == nil && is.words == nil:
	case was.words == nil:
		if taken && !is.open {
			c.say(path, "only %q are taken now", is.words)
		}
	case is.words == nil:
		if written {
			c.say(path, "the words %q are not promised any more", was.words)
		}
	default:
		if !within(was.words, is.words) {
			c.say(path, "words are gone: %q", minus(was.words, is.words))
		}
		if written && !was.open && (is.open || !within(is.words, was.words)) {
			c.say(path, "words that readers cannot know: %q", minus(is.words, was.words))
		}
		if taken && was.open && !is.open {
			c.say(path, "only %q are taken now", is.words)
		}
		if was.open && is.open && !reflect.DeepEqual(was.others, is.others) {
			c.say(path, "words of tomorrow were %v and are %v", was.others, is.others)
		}
	}
}

// limit: sign is 1 for an upper bound, -1 for a lower one.
func (c *comparison) limit(path, keyword string, was, is any, sign float64) {
	a, had := was.(float64)
	b, has := is.(float64)
	wider := had && (!has || sign*b > sign*a)
	narrower := has && (!had || sign*b < sign*a)
	if wider && c.direction&Written != 0 || narrower && c.direction&Taken != 0 {
		c.say(path, "%s was %v and is %v", keyword, was, is)
	}
}

func within(part, whole []string) bool { return len(minus(part, whole)) == 0 }

func minus(a, b []string) []string {
	var out []string
	for _, s := range a {
		if !slices.Contains(b, s) {
			out = append(out, s)
		}
	}
	return out
}
