package contract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Dialect is the dialect of all schemas.
const Dialect = "https://json-schema.org/draft/2020-12/schema"

// object is a JSON object that keeps the order in which it was written.
type object []member

type member struct {
	key   string
	value any
}

func (o *object) set(key string, value any) { *o = append(*o, member{key, value}) }

// replace sets a key that is there already.
func (o object) replace(key string, value any) {
	for i := range o {
		if o[i].key == key {
			o[i].value = value
		}
	}
}

func (o object) get(key string) any {
	for _, m := range o {
		if m.key == key {
			return m.value
		}
	}
	return nil
}

// MarshalJSON keeps the order.
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		k, err := compactJSON(m.key)
		if err != nil {
			return nil, err
		}
		v, err := compactJSON(m.value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.key, err)
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(v)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// compactJSON is v as JSON without escaping what only HTML minds.
func compactJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSpace(b.Bytes()), err
}

func prettyJSON(v any) ([]byte, error) {
	b, err := compactJSON(v)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = json.Indent(&out, b, "", "  ")
	out.WriteByte('\n')
	return out.Bytes(), err
}

// Schemas makes all schemas by name. root is the top folder of the checkout,
// whose sources have the descriptions.
func Schemas(root string) (map[string][]byte, error) {
	comments, err := readComments(root)
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	used := map[string]bool{}
	for _, m := range Messages() {
		if m.Type == nil {
			return nil, fmt.Errorf("%s has no Go type", m.Name)
		}
		g := &generator{comments: comments, rules: rules(), used: used, defs: map[string]object{}}
		b, err := prettyJSON(g.message(m))
		if err = errors.Join(append(g.faults, err)...); err != nil {
			return nil, fmt.Errorf("schema %s: %w", m.Name, err)
		}
		out[m.Name] = b
	}
	for key := range rules() {
		if !used[key] {
			return nil, fmt.Errorf("the rule for %s is for no field", key)
		}
	}
	return out, nil
}

type generator struct {
	comments map[string]string
	rules    map[string]rule
	used     map[string]bool
	defs     map[string]object
	faults   []error
}

// ID is the $id of the schema called name.
func ID(name string) string { return "urn:herdgate:schema:" + name + ":" + contract.Version }

func (g *generator) message(m Message) object {
	id := ID(m.Name)
	if m.DataOnly {
		id = envelope.DataSchema(m.Event) // what dataschema of the event names
	}
	s := object{{"$schema", Dialect}, {"$id", id}, {"title", m.Title}}
	var body object
	if m.Event != "" && !m.DataOnly {
		body = g.envelope(m)
	} else {
		body = g.structure(m.Type)
		g.statusOf(m, body)
	}
	s = append(s, body...)
	if len(g.defs) > 0 {
		defs := object{}
		names := make([]string, 0, len(g.defs))
		for n := range g.defs {
			names = append(names, n)
		}
		slices.Sort(names)
		for _, n := range names {
			defs.set(n, g.defs[n])
		}
		s.set("$defs", defs)
	}
	return s
}

// statusOf: the status in a terminal event is the one that its type tells.
func (g *generator) statusOf(m Message, data object) {
	if !m.Event.Terminal() {
		return
	}
	_, status, _ := strings.Cut(string(m.Event), "_")
	data.get("properties").(object).replace("status", object{{"const", status}})
}

// envelope is the CloudEvent around the data of an event.
func (g *generator) envelope(m Message) object {
	isTask := strings.HasPrefix(string(m.Event), "task_")
	g.ref(m.Type)
	g.statusOf(m, g.defs[m.Type.Name()])
	text := func(description string, more ...member) object {
		return append(object{{"description", description}, {"type", "string"}, {"minLength", 1}}, more...)
	}
	p := object{
		{"specversion", object{{"const", envelope.SpecVersion}}},
		{"id", text("The same for every repeat of the event; made of what it tells, not of when.", member{"maxLength", 256})},
		{"source", text("Who tells: /herdgate/SERVICE/PROCESS.", member{"maxLength", 256}, member{"format", "uri-reference"})},
		{"type", object{{"const", string(m.Event)}}},
		{"subject", text("The task's id, in events of a run the run's id.", member{"pattern", idPattern})},
		{"time", object{{"description", "When it happened, in UTC with six decimals."}, {"type", "string"}, {"format", "date-time"}}},
		{"datacontenttype", object{{"const", "application/json"}}},
		{"dataschema", object{{"description", "The name of the schema of data."}, {"const", envelope.DataSchema(m.Event)}}},
		{"traceparent", object{{"description", "W3C trace context."}, {"type", "string"}, {"pattern", tracePattern}, {"maxLength", 512}}},
		{"tenant", g.ids(of[contract.Tenant]())},
		{"threadid", g.ids(of[contract.ThreadID]())},
		{"runid", g.ids(of[contract.RunID]())},
	}
	required := []string{"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema", "tenant", "threadid", "runid"}
	if isTask {
		p.set("tracestate", object{{"description", "W3C trace context, only beside a traceparent."}, {"type", "string"}, {"minLength", 1}, {"maxLength", envelope.MaxTraceState}})
		p.set("taskid", g.ids(of[contract.TaskID]()))
		required = append(required, "taskid")
		if m.Event != contract.EventTaskQueued {
			if !m.Event.Terminal() || m.Event == contract.EventTaskCompleted {
				required = append(required, "attempt") // the other endings may come before a slot
			}
			p.set("attempt", object{{"description", "Counts from 1; absent from the ending of a task that never had a slot."}, {"type", "integer"}, {"minimum", 1}})
		}
	}
	p.set("data", object{{"$ref", "#/$defs/" + m.Type.Name()}})
	return object{
		{"description", "A CloudEvent 1.0 in structured JSON mode. Readers ignore attributes and fields that they do not know."},
		{"type", "object"}, {"properties", p}, {"required", append(required, "data")},
	}
}

// Patterns of ids. A lone underscore stands for "no task" on subjects.
const (
	tokenPattern = "^[A-Za-z0-9_-]{1,64}$"
	idPattern    = "^([A-Za-z0-9-]|[A-Za-z0-9_-]{2,64})$"
)

func (g *generator) ids(t reflect.Type) object {
	s := object{{"type", "string"}}
	switch t {
	case of[contract.TaskID](), of[contract.RunID](), of[contract.Tenant]():
		s.set("pattern", idPattern)
	case of[contract.Pool]():
		s.set("pattern", tokenPattern)
	case of[contract.ThreadID]():
		s.set("minLength", 1)
		s.set("maxLength", contract.MaxThreadID)
	}
	return s
}

// vocabulary are the words of the types that are a list of words, and whether the
// list may grow.
func vocabulary(t reflect.Type) (list []string, open bool) {
	switch t {
	case of[contract.State]():
		return words(contract.States()), false
	case of[contract.TaskStatus]():
		return words(contract.TaskStatuses()), false
	case of[contract.RunStatus]():
		return words(contract.RunStatuses()), false
	case of[contract.ErrorCode]():
		return words(contract.ErrorCodes()), true
	case of[contract.StopReason]():
		return words(contract.StopReasons()), true
	}
	return nil, false
}

func (g *generator) ref(t reflect.Type) object {
	if _, ok := g.defs[t.Name()]; !ok {
		g.defs[t.Name()] = nil // a type may hold itself
		g.defs[t.Name()] = g.structure(t)
	}
	return object{{"$ref", "#/$defs/" + t.Name()}}
}

// structure is the schema of a struct, in place.
func (g *generator) structure(t reflect.Type) object {
	s := object{}
	if d := g.comments[t.PkgPath()+"."+t.Name()]; d != "" {
		s.set("description", d)
	}
	s.set("type", "object")
	props := object{}
	required := []string{}
	g.fields(t, t, &props, &required)
	s.set("properties", props)
	if len(required) > 0 {
		s.set("required", required)
	}
	if t == of[contract.Step]() {
		// An assistant step always has tool_calls, a tool step always tool_name.
		s.set("if", object{{"properties", object{{"kind", object{{"const", contract.StepTool}}}}}})
		s.set("then", object{{"required", []string{"tool_name"}}})
		s.set("else", object{{"required", []string{"tool_calls"}}})
	}
	return s
}

// fields adds the fields of t, embedded ones as well, as fields of owner.
func (g *generator) fields(owner, t reflect.Type, props *object, required *[]string) {
	for f := range t.Fields() {
		if f.Anonymous {
			g.fields(owner, f.Type, props, required)
			continue
		}
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.IsExported() || tag == "-" {
			continue
		}
		if tag == "" {
			g.faults = append(g.faults, fmt.Errorf("%s.%s has no JSON name", t.Name(), f.Name))
			continue
		}
		r := g.rules[owner.Name()+"."+tag]
		g.used[owner.Name()+"."+tag] = true
		omit := strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero")
		v := g.value(f.Type, r, omit)
		d := f.Tag.Get("doc")
		if d == "" {
			d = g.comments[t.PkgPath()+"."+t.Name()+"."+f.Name]
		}
		if d != "" {
			v = append(object{{"description", d}}, v...)
		}
		props.set(tag, v)
		if (!omit || r.required) && !r.optional {
			*required = append(*required, tag)
		}
	}
}

// value is the schema of a field of type t. omitted: an empty value is not written.
func (g *generator) value(t reflect.Type, r rule, omitted bool) object {
	nullable := r.nullable
	if t.Kind() == reflect.Pointer {
		nullable = nullable || !omitted
		t = t.Elem()
	}
	switch t {
	case of[time.Time]():
		return orNull(object{{"type", "string"}, {"format", "date-time"}}, nullable)
	case of[json.RawMessage]():
		if r.object {
			return object{{"type", "object"}}
		}
		return object{}
	}
	switch t.Kind() {
	case reflect.Struct:
		s := g.ref(t)
		if nullable {
			return object{{"anyOf", []any{s, object{{"type", "null"}}}}}
		}
		return s
	case reflect.Slice:
		var of rule
		if r.items != nil {
			of = *r.items
		}
		s := object{{"type", "array"}, {"items", g.value(t.Elem(), of, true)}}
		if r.maxItems > 0 {
			s.set("maxItems", r.maxItems)
		}
		return orNull(s, nullable || !omitted && !r.never)
	case reflect.Map:
		return orNull(object{{"type", "object"}, {"additionalProperties", g.value(t.Elem(), rule{}, true)}}, nullable || !omitted)
	case reflect.Bool:
		return object{{"type", "boolean"}}
	case reflect.Int, reflect.Int64, reflect.Uint64, reflect.Float64:
		s := object{{"type", "integer"}, {"minimum", r.minimum}}
		if t.Kind() == reflect.Float64 {
			s.replace("type", "number")
		}
		if r.maximum > 0 {
			s.set("maximum", r.maximum)
		}
		return orNull(s, nullable)
	case reflect.String:
		return orNull(g.text(t, r), nullable)
	}
	g.faults = append(g.faults, fmt.Errorf("no schema for the Go type %s", t))
	return nil
}

func (g *generator) text(t reflect.Type, r rule) object {
	list, open := vocabulary(t)
	if r.words != nil {
		list, open = r.words, r.open
	}
	s := g.ids(t)
	limit := r.maxLength
	switch {
	case r.constant != "":
		return object{{"const", r.constant}}
	case list != nil && !open:
		s.set("enum", list)
	case list != nil:
		// The known words, and any that a later version adds.
		s.set("anyOf", []any{object{{"enum", list}}, object{{"pattern", "^[a-z0-9_.]+$"}}})
		if limit == 0 {
			limit = 64
		}
	}
	if r.format != "" {
		s.set("format", r.format)
	}
	if r.pattern != "" {
		s.set("pattern", r.pattern)
	}
	if r.minLength > 0 {
		s.set("minLength", r.minLength)
	}
	if limit > 0 {
		s.set("maxLength", limit)
	}
	return s
}

func orNull(s object, nullable bool) object {
	if nullable {
		s.replace("type", []string{s.get("type").(string), "null"})
	}
	return s
}

// sources are the folders whose comments describe fields.
var sources = []string{"pkg/contract", "internal/eventapi", "internal/admissionapi", "internal/agentapi", "internal/client/wire", "services/lead"}

// readComments returns the comments of types and fields, by "package.Type" and
// "package.Type.Field".
func readComments(root string) (map[string]string, error) {
	out := map[string]string{}
	for _, dir := range sources {
		paths, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
			if err != nil {
				return nil, err
			}
			pkg := "github.com/herdgate/herdgate/" + dir + "."
			for _, d := range f.Decls {
				g, ok := d.(*ast.GenDecl)
				if !ok || g.Tok != token.TYPE {
					continue
				}
				for _, s := range g.Specs {
					typ := s.(*ast.TypeSpec)
					doc := typ.Doc
					if doc == nil {
						doc = g.Doc
					}
					out[pkg+typ.Name.Name] = plain(doc)
					st, ok := typ.Type.(*ast.StructType)
					if !ok {
						continue
					}
					for _, field := range st.Fields.List {
						doc := field.Doc
						if doc == nil {
							doc = field.Comment
						}
						for _, n := range field.Names {
							out[pkg+typ.Name.Name+"."+n.Name] = plain(doc)
						}
					}
				}
			}
		}
	}
	return out, nil
}

// plain is a comment on one line, without the marks of links.
func plain(c *ast.CommentGroup) string {
	if c == nil {
		return ""
	}
	return strings.NewReplacer("[]", "[]", "[", "", "]", "").Replace(strings.Join(strings.Fields(c.Text()), " "))
}

// Vocabulary is the file of all words.
func Vocabulary() ([]byte, error) {
	type eventType struct {
		Type       string `json:"type"`
		DataSchema string `json:"dataschema"`
		Record     string `json:"record"`
		Category   string `json:"category"`
		Terminal   bool   `json:"terminal"`
	}
	var events []eventType
	for _, t := range contract.EventTypes() {
		events = append(events, eventType{string(t), envelope.DataSchema(t), t.Record(), t.Category(), t.Terminal()})
	}
	var ofTasks, ofRuns []string
	for _, r := range contract.StopReasons() {
		if ofRuns = append(ofRuns, string(r)); r.ValidForTask() {
			ofTasks = append(ofTasks, string(r))
		}
	}
	return prettyJSON(object{
		{"contract_version", contract.Version},
		{"event_types", events},
		{"states", contract.States()},
		{"task_statuses", contract.TaskStatuses()},
		{"tool_statuses", contract.ToolStatuses()},
		{"run_statuses", contract.RunStatuses()},
		{"task_stop_reasons", ofTasks},
		{"run_stop_reasons", ofRuns},
		{"error_codes", contract.ErrorCodes()},
		{"problem_codes", problemCodes()},
		{"step_kinds", []string{contract.StepAI, contract.StepTool}},
	})
}
