package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	reflector "github.com/invopop/jsonschema"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

const schemaURL = "https://herdgate.github.io/schema/herdgate.yaml.json"

// schema is one node of the JSON Schema, as decoded JSON. Besides the keywords
// of the standard it has ours:
//
//	x-path     relative values mean files beside the configuration file
//	           (dotted: only values that begin with a dot)
//	x-hide     values may be secret and are never shown
//	x-rule     the rule in words, where the keywords alone would not say it
//	x-single   a lone element may stand for a list of one
//	x-null     keep: null is not the same as missing
type schema map[string]any

type compiled struct {
	// strict describes the document after normalisation; it is the one that is
	// checked against.
	strict    schema
	validator *jsonschema.Schema
	published []byte
}

// theSchema is made once: it depends on nothing but the program.
var theSchema = sync.OnceValues(compile)

// Schema returns the JSON Schema (draft 2020-12) of the configuration file,
// with defaults and descriptions, for editors.
func Schema() []byte {
	c, err := theSchema()
	if err != nil {
		// The schema comes from the types of this package alone; the package's
		// tests are what finds a broken tag.
		return []byte("false\n")
	}
	return bytes.Clone(c.published)
}

func compile() (*compiled, error) {
	r := reflector.Reflector{
		Anonymous:                  true,
		DoNotReference:             true,
		ExpandedStruct:             true,
		RequiredFromJSONSchemaTags: true,
		FieldNameTag:               "yaml",
		Mapper:                     textTypes,
	}
	strict, err := reparse(r.Reflect(&Config{}))
	if err != nil {
		return nil, err
	}
	defaults, err := asYAML(Default())
	if err != nil {
		return nil, err
	}
	if err := complete(strict, reflect.TypeFor[Config](), defaults); err != nil {
		return nil, err
	}
	strict["$id"] = schemaURL
	strict["title"] = "Configuration of Herdgate"
	strict["description"] = "herdgate.yaml. Every key has a default, so an empty file is valid."

	// A copy, because the published schema allows what normalisation takes away.
	loose, err := reparse(strict)
	if err != nil {
		return nil, err
	}
	loosen(loose)
	published, err := json.MarshalIndent(loose, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}

	c := jsonschema.NewCompiler()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(mustJSON(strict)))
	if err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}
	v, err := c.Compile(schemaURL)
	if err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}
	return &compiled{strict: strict, validator: v, published: append(published, '\n')}, nil
}

// textTypes tells the reflector that our text types are strings.
func textTypes(t reflect.Type) *reflector.Schema {
	if t == reflect.TypeFor[Secret]() || t == reflect.TypeFor[Address]() {
		return &reflector.Schema{Type: "string"}
	}
	return nil
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil { // decoded JSON: cannot happen
		return []byte("false")
	}
	return b
}

func reparse(v any) (schema, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("config: schema: %w", err)
	}
	return m, nil
}

func asYAML(v any) (any, error) {
	b, err := yaml.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("config: schema defaults: %w", err)
	}
	var out any
	if err := yaml.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("config: schema defaults: %w", err)
	}
	return out, nil
}

// elementDefaults are the defaults of what stands in lists and named maps.
func elementDefaults(t reflect.Type) any {
	switch t {
	case reflect.TypeFor[Model]():
		return defaultModel()
	case reflect.TypeFor[Token]():
		return defaultToken()
	case reflect.TypeFor[CustomAgent]():
		return defaultCustomAgent()
	case reflect.TypeFor[MCPServer]():
		return defaultMCPServer()
	case reflect.TypeFor[Routing]():
		return defaultRouting()
	case reflect.TypeFor[TokenBudget]():
		return defaultTokenBudget(false)
	}
	return nil
}

// complete adds to s, the schema of t, what tags cannot express: what may be
// null, the rules for the names and elements of collections, and the defaults.
func complete(s schema, t reflect.Type, def any) error {
	nullable := false
	if t.Kind() == reflect.Pointer {
		t, nullable = t.Elem(), true
	}
	switch t.Kind() {
	case reflect.Struct:
		if s["type"] != "object" {
			return fmt.Errorf("config: schema of %s is not an object", t)
		}
		if own := elementDefaults(t); own != nil {
			var err error
			if def, err = asYAML(own); err != nil {
				return err
			}
		}
		values, _ := def.(map[string]any)
		for i := range t.NumField() {
			name, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
			if name == "-" {
				continue
			}
			child, ok := s.property(name)
			if !ok {
				return fmt.Errorf("config: schema of %s has no %s", t, name)
			}
			if err := complete(child, t.Field(i).Type, values[name]); err != nil {
				return err
			}
			if v, ok := values[name]; ok && v != nil && scalarOrList(v) && child["default"] == nil {
				child["default"] = v
			}
		}
	case reflect.Map:
		child, ok := s["additionalProperties"].(map[string]any)
		if !ok {
			return fmt.Errorf("config: schema of %s has no additionalProperties", t)
		}
		if p, ok := s["x-names"]; ok {
			s["propertyNames"] = map[string]any{"pattern": p, "maxLength": 128}
			delete(s, "x-names")
		}
		s["maxProperties"] = 1000
		if err := complete(child, t.Elem(), nil); err != nil {
			return err
		}
	case reflect.Slice:
		child, ok := s["items"].(map[string]any)
		if !ok {
			return fmt.Errorf("config: schema of %s has no items", t)
		}
		switch s["x-items"] {
		case "name":
			maps.Copy(child, schema{"minLength": 1, "maxLength": 256, "pattern": `^\S(.*\S)?$`, "x-rule": "a name"})
		case "text":
			maps.Copy(child, schema{"minLength": 1, "pattern": `\S`})
		}
		delete(s, "x-items")
		if err := complete(child, t.Elem(), nil); err != nil {
			return err
		}
	case reflect.String, reflect.Int, reflect.Float64, reflect.Bool:
	default:
		return fmt.Errorf("config: schema of %s: kind %s is not supported", t, t.Kind())
	}
	if nullable {
		s["type"] = []any{s["type"], "null"}
	}
	return nil
}

func scalarOrList(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		return false
	case []any:
		return len(v) > 0
	}
	return true
}

// loosen allows in the published schema what normalisation removes: null for
// sections and collections, and a lone element for a list.
func loosen(s schema) {
	for _, p := range s.properties() {
		loosen(p)
	}
	if items, ok := s["items"].(map[string]any); ok {
		loosen(items)
	}
	if extra, ok := s["additionalProperties"].(map[string]any); ok {
		loosen(extra)
	}
	if t, ok := s["type"].(string); ok && (t == "object" || t == "array") && s["$id"] == nil {
		s["type"] = []any{t, "null"}
	}
	if s["x-single"] == true {
		s["anyOf"] = []any{schema{"type": []any{"array", "null"}, "items": s["items"]}, s["items"]}
		delete(s, "type")
		delete(s, "items")
	}
	for _, k := range []string{"x-path", "x-hide", "x-rule", "x-single", "x-null"} {
		delete(s, k)
	}
}

func (s schema) property(name string) (schema, bool) {
	props, _ := s["properties"].(map[string]any)
	p, ok := props[name].(map[string]any)
	return p, ok
}

func (s schema) properties() map[string]schema {
	props, _ := s["properties"].(map[string]any)
	out := make(map[string]schema, len(props))
	for name, p := range props {
		if p, ok := p.(map[string]any); ok {
			out[name] = p
		}
	}
	return out
}

// child is the schema of the value under key, which is a name in a section, a
// name in a map, or any element of a list.
func (s schema) child(key string) (schema, bool) {
	if s == nil {
		return nil, false
	}
	if p, ok := s.property(key); ok {
		return p, true
	}
	var c schema
	if items, ok := s["items"].(map[string]any); ok {
		c = items
	} else if extra, ok := s["additionalProperties"].(map[string]any); ok {
		c = extra
	} else {
		return nil, false
	}
	// What holds for a collection's values is written at the collection.
	for _, k := range []string{"x-path", "x-hide"} {
		if v, ok := s[k]; ok && c[k] == nil {
			c = maps.Clone(c)
			c[k] = v
		}
	}
	return c, true
}

// at is the schema of the value at path, or nil.
func (s schema) at(path []string) schema {
	for _, key := range path {
		var ok bool
		if s, ok = s.child(key); !ok {
			return nil
		}
	}
	return s
}

// kind is the type of the value, without null.
func (s schema) kind() string {
	switch t := s["type"].(type) {
	case string:
		return t
	case []any:
		for _, v := range t {
			if v != "null" {
				k, _ := v.(string)
				return k
			}
		}
	}
	return ""
}

func (s schema) nullable() bool {
	t, ok := s["type"].([]any)
	return ok && slices.Contains(t, any("null"))
}

func (s schema) scalar() bool {
	switch s.kind() {
	case "string", "integer", "number", "boolean":
		return true
	}
	return false
}

// rule says in words what the value must be.
func (s schema) rule() string {
	var b strings.Builder
	b.WriteString("must be ")
	words, _ := s["x-rule"].(string)
	switch kind := s.kind(); {
	case s["enum"] != nil:
		list, _ := s["enum"].([]any)
		names := make([]string, len(list))
		for i, v := range list {
			names[i] = fmt.Sprint(v)
		}
		b.WriteString("one of " + strings.Join(names, ", "))
	case words != "":
		b.WriteString(words)
	case kind == "integer":
		b.WriteString("an integer" + s.span())
	case kind == "number":
		b.WriteString("a number" + s.span())
	case kind == "boolean":
		b.WriteString("true or false")
	case kind == "array":
		b.WriteString("a list")
		if n, ok := s["maxItems"]; ok {
			fmt.Fprintf(&b, " (at most %v elements)", n)
		}
	case kind == "object":
		b.WriteString("a mapping")
	case kind == "string":
		minimum, _ := s["minLength"].(float64)
		if i, ok := s["minLength"].(int); ok {
			minimum = float64(i)
		}
		maximum, bounded := s["maxLength"]
		switch {
		case bounded:
			fmt.Fprintf(&b, "a text (%.0f to %.0f characters)", minimum, maximum)
		case minimum > 0:
			b.WriteString("a text that is not empty")
		default:
			b.WriteString("a text")
		}
	default:
		b.WriteString("something else")
	}
	if s.nullable() {
		b.WriteString(" or null")
	}
	return b.String()
}

func (s schema) span() string {
	low, hasLow := s["minimum"].(float64)
	high, hasHigh := s["maximum"].(float64)
	switch {
	case hasLow && hasHigh:
		return fmt.Sprintf(" (%s to %s)", plain(low), plain(high))
	case hasLow:
		return fmt.Sprintf(" (at least %s)", plain(low))
	case hasHigh:
		return fmt.Sprintf(" (at most %s)", plain(high))
	}
	return ""
}

func plain(f float64) string {
	s := fmt.Sprintf("%.6f", f)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}
