package contract

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	cloudevents "github.com/cloudevents/sdk-go/v2/event"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
	"github.com/herdgate/herdgate/pkg/envelope"
)

const root = "../.."

func goldens(t *testing.T) []Golden {
	t.Helper()
	list, err := Goldens()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func published(t *testing.T) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for _, name := range schema.Names() {
		b, err := schema.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = b
	}
	return out
}

// compile makes validators of schemas, which check formats as well.
func compile(t *testing.T, schemas map[string][]byte) map[string]*jsonschema.Schema {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	for name, b := range schemas {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err == nil {
			err = c.AddResource("file:///"+name+".json", doc)
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	out := map[string]*jsonschema.Schema{}
	for name := range schemas {
		s, err := c.Compile("file:///" + name + ".json")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		out[name] = s
	}
	return out
}

func validate(s *jsonschema.Schema, b []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

// What is published is what the code says: neither a field of a Go type nor a
// property of a schema is alone.
func TestGeneratedFilesAreCurrent(t *testing.T) {
	t.Parallel()
	files, err := Files(root)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range files {
		if got, err := os.ReadFile(filepath.Join(root, path)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what the code says (%v); run go generate ./test/contract", path, err)
		}
	}
	stale, err := Stale(root, files)
	if err != nil || len(stale) > 0 {
		t.Errorf("left over: %q, %v; run go generate ./test/contract", stale, err)
	}
}

// Each type of pkg/contract that is a message, or a part of one, has a schema.
func TestEveryMessageHasASchema(t *testing.T) {
	t.Parallel()
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "pkg/contract/messages.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	covered := map[string]bool{}
	for _, m := range Messages() {
		covered[m.Type.Name()] = true
	}
	for name, b := range published(t) {
		var s struct {
			Defs map[string]any `json:"$defs"`
		}
		if err := json.Unmarshal(b, &s); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for def := range s.Defs {
			covered[def] = true
		}
	}
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.TYPE {
			continue
		}
		for _, s := range g.Specs {
			typ := s.(*ast.TypeSpec)
			if _, ok := typ.Type.(*ast.StructType); ok && !covered[typ.Name.Name] {
				t.Errorf("no schema has %s", typ.Name.Name)
			}
		}
	}
	for _, typ := range contract.EventTypes() {
		if eventData(typ) == nil {
			t.Errorf("the data of %s has no Go type", typ)
		}
	}
}

// I11, STATUS-20, EVT-10: what the builders make today is good for today's schemas
// and for those of every released version.
func TestGoldensFitTheirSchemas(t *testing.T) {
	t.Parallel()
	released, err := Released(root)
	if err != nil || len(released) == 0 {
		t.Fatalf("%d released versions, %v; want one at least", len(released), err)
	}
	released["today"] = published(t)
	for version, schemas := range released {
		compiled := compile(t, schemas)
		seen := map[string]bool{}
		for _, g := range goldens(t) {
			s := compiled[g.Name]
			if s == nil {
				continue // a message that the version did not have
			}
			seen[g.Name+"."+g.Variant] = true
			if err := validate(s, g.Body); err != nil {
				t.Errorf("%s: %s.%s: %v\n%.2000s", version, g.Name, g.Variant, err, g.Body)
			}
		}
		for name := range schemas {
			if !seen[name+".min"] || !seen[name+".full"] {
				t.Errorf("%s: %s has no golden min and full", version, name)
			}
		}
	}
}

// EVT-06, EVT-10, STATUS-20: what is stored of every event is a stored event, with
// names that are short enough.
func TestStoredEventsFitTheirSchema(t *testing.T) {
	t.Parallel()
	s := compile(t, published(t))["stored_event"]
	for _, g := range goldens(t) {
		if g.Event == nil {
			continue
		}
		for _, shape := range []func(envelope.Event, uint64) (contract.EventRecord, bool){event.Record, event.Live} {
			rec, ok := shape(*g.Event, 42)
			if !ok {
				t.Fatalf("%s.%s cannot be stored", g.Name, g.Variant)
			}
			if err := validate(s, encoded(rec)); err != nil {
				t.Errorf("%s.%s: %v", g.Name, g.Variant, err)
			}
			if rec.EventType != g.Event.Type.Record() || rec.Category != g.Event.Type.Category() {
				t.Errorf("%s is stored as %s in %s; the vocabulary says %s in %s", g.Event.Type, rec.EventType, rec.Category, g.Event.Type.Record(), g.Event.Type.Category())
			}
		}
	}
}

// A schema refuses what is not the message: without a field that is always there,
// or with one of another type.
func TestSchemasRefuse(t *testing.T) {
	t.Parallel()
	schemas := published(t)
	compiled := compile(t, schemas)
	for _, g := range goldens(t) {
		if g.Variant != "full" {
			continue
		}
		var s map[string]any
		if err := json.Unmarshal(schemas[g.Name], &s); err != nil {
			t.Fatal(err)
		}
		required, _ := s["required"].([]any)
		for _, f := range required {
			bad := decoded(t, g.Body)
			delete(bad, f.(string))
			if compiled[g.Name].Validate(bad) == nil {
				t.Errorf("%s without %s was accepted", g.Name, f)
			}
		}
		for f, p := range s["properties"].(map[string]any) {
			if spec := p.(map[string]any); spec["type"] == nil && spec["const"] == nil && spec["$ref"] == nil && spec["anyOf"] == nil {
				continue // anything goes
			}
			for _, wrong := range []any{true, "no such thing \x7f", json.Number("-1"), json.Number("1.5"), []any{map[string]any{}}} {
				bad := decoded(t, g.Body)
				if bad[f] == nil || reflect.TypeOf(bad[f]) == reflect.TypeOf(wrong) {
					continue
				}
				bad[f] = wrong
				if compiled[g.Name].Validate(bad) == nil {
					t.Errorf("%s with %s = %v was accepted", g.Name, f, wrong)
				}
			}
		}
		more := decoded(t, g.Body)
		more["field_of_a_later_version"] = map[string]any{"x": []any{}}
		if err := compiled[g.Name].Validate(more); err != nil {
			t.Errorf("%s: STATUS-20: an unknown field was refused: %v", g.Name, err)
		}
	}
	for name, list := range map[string][]string{
		"event.task_running": {
			`{"data":{"message":{"kind":"tool","text":"x","truncated":false}}}`,                 // no tool_name
			`{"data":{"message":{"kind":"ai","text":"x","truncated":false}}}`,                   // no tool_calls
			`{"data":{"message":{"kind":"human","text":"","truncated":false,"tool_calls":[]}}}`, // STEP-01
			`{"data":{"message_index":-1}}`, `{"data":{"message_index":true}}`, `{"type":"task_ran"}`, `{"time":"yesterday"}`, `{"taskid":"_"}`,
			`{"data":{"usage":{"input_tokens":1,"output_tokens":1}}}`, `{"specversion":"0.3"}`, `{"tenant":"a.b"}`, `{"traceparent":"00-x"}`,
			`{"data":{"message":{"kind":"ai","tool_calls":[],"truncated":false,"text":"` + strings.Repeat("x", contract.MaxStepChars+1) + `"}}}`, // STEP-06
		},
		"event.task_failed":   {`{"data":{"status":"completed"}}`, `{"data":{"error_code":"Not A Code"}}`},
		"task_record":         {`{"state":"lost"}`, `{"date":"tomorrow"}`, `{"queued_at":null}`},
		"task_request":        {`{"contract_version":"2"}`, `{"prompt":""}`, `{"subagent":{"name":"x"}}`, `{"thread_id":""}`},
		"events.list.request": {`{"limit":2001}`, `{"types":"subagent.end"}`},
		"stored_event":        {`{"seq":0}`, `{"content":"text"}`, `{"event_type":"` + strings.Repeat("x", 33) + `"}`, `{"category":"a.category.too.long"}`},
	} {
		for _, change := range list {
			bad := decoded(t, golden(t, name, "full").Body)
			merge(bad, decoded(t, []byte(change)))
			if compiled[name].Validate(bad) == nil {
				t.Errorf("%s with %.120s was accepted", name, change)
			}
		}
	}
	// A word of a later version is no fault.
	later := decoded(t, golden(t, "event.task_failed", "full").Body)
	merge(later, decoded(t, []byte(`{"data":{"error_code":"quota_spent","stop_reason":"cost_capped"}}`)))
	if err := compiled["event.task_failed"].Validate(later); err != nil {
		t.Errorf("new words were refused: %v", err)
	}
}

func golden(t *testing.T, name, variant string) Golden {
	t.Helper()
	for _, g := range goldens(t) {
		if g.Name == name && g.Variant == variant {
			return g
		}
	}
	t.Fatalf("no golden %s.%s", name, variant)
	return Golden{}
}

func decoded(t *testing.T, b []byte) map[string]any {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return v.(map[string]any)
}

func merge(into, from map[string]any) {
	for k, v := range from {
		a, ok := into[k].(map[string]any)
		b, both := v.(map[string]any)
		if ok && both && k != "subagent" && k != "message" && k != "usage" {
			merge(a, b)
			continue
		}
		into[k] = v
	}
}

// The goldens show, by what the encoders of the services really write, that a
// schema has exactly the fields of its type, and that a field is required just if it
// is always written.
func TestSchemasHaveExactlyWhatIsWritten(t *testing.T) {
	t.Parallel()
	schemas := published(t)
	w := walker{seen: map[string]map[string]int{}, times: map[string]int{}, schemas: map[string]shape{}}
	types := map[string]string{}
	for _, m := range Messages() {
		if types[m.Name] = m.Type.Name(); m.Event != "" && !m.DataOnly {
			types[m.Name] = m.Name
		}
	}
	for _, g := range goldens(t) {
		var s map[string]any
		if err := json.Unmarshal(schemas[g.Name], &s); err != nil {
			t.Fatal(err)
		}
		w.walk(t, s, types[g.Name], s, decoded(t, g.Body))
	}
	takenFrom := []string{"TaskRequest", "Subagent", "Identity"} // their readers take less, see the next test
	for name, s := range w.schemas {
		for f := range s.fields {
			n := w.seen[name][f]
			if n == 0 {
				t.Errorf("%s.%s is in the schema, but nobody writes it", name, f)
			}
			always, required := n == w.times[name], slices.Contains(s.required, f)
			if always != required && !slices.Contains(takenFrom, name) {
				t.Errorf("%s.%s is written %d of %d times; required is %v", name, f, n, w.times[name], required)
			}
		}
	}
}

type walker struct {
	seen    map[string]map[string]int // by type and field
	times   map[string]int
	schemas map[string]shape
}

func (w *walker) walk(t *testing.T, root map[string]any, name string, s map[string]any, v any) {
	if v == nil {
		return
	}
	is, ref := shapeOf(root, s)
	if ref != "" {
		name = ref
	}
	switch v := v.(type) {
	case []any:
		items, _ := is.schema["items"].(map[string]any)
		for _, e := range v {
			if items != nil {
				w.walk(t, root, name+"[]", items, e)
			}
		}
	case map[string]any:
		if is.fields == nil {
			return // free JSON, or a map
		}
		w.schemas[name] = is
		w.times[name]++
		if w.seen[name] == nil {
			w.seen[name] = map[string]int{}
		}
		for f, e := range v {
			w.seen[name][f]++
			p, ok := is.fields[f].(map[string]any)
			if !ok {
				t.Errorf("%s.%s is written, but not in the schema", name, f)
				continue
			}
			w.walk(t, root, name+"."+f, p, e)
		}
	}
}

// What a schema of a request asks for is what its reader asks for: without it the
// request is refused, without anything else it is not.
func TestRequestsRequireWhatTheirReadersDo(t *testing.T) {
	t.Parallel()
	schemas := published(t)
	for name, read := range map[string]func([]byte) error{
		"task_request":          func(b []byte) error { _, err := contract.DecodeTaskRequest(b); return err },
		"events.list.request":   func(b []byte) error { _, err := eventapi.DecodeRequest(b); return err },
		"agents.list.request":   func(b []byte) error { _, err := agentapi.Decode[agentapi.AgentsRequest](b); return err },
		"agents.put.request":    func(b []byte) error { _, err := agentapi.Decode[agentapi.AgentPut](b); return err },
		"agents.delete.request": func(b []byte) error { _, err := agentapi.Decode[agentapi.AgentDelete](b); return err },
	} {
		var s map[string]any
		if err := json.Unmarshal(schemas[name], &s); err != nil {
			t.Fatal(err)
		}
		check := func(where string, is shape, without func(f string) []byte) {
			for f := range is.fields {
				refused := read(without(f)) != nil
				if required := slices.Contains(is.required, f); refused != required {
					t.Errorf("%s without %s%s: refused is %v, required is %v", name, where, f, refused, required)
				}
			}
		}
		whole, _ := shapeOf(s, s)
		check("", whole, func(f string) []byte {
			v := decoded(t, golden(t, name, "full").Body)
			delete(v, f)
			return encoded(v)
		})
		for _, part := range []string{"subagent", "identity"} {
			p, ok := whole.fields[part].(map[string]any)
			if !ok {
				continue
			}
			inner, _ := shapeOf(s, p)
			check(part+".", inner, func(f string) []byte {
				v := decoded(t, golden(t, name, "full").Body)
				delete(v[part].(map[string]any), f)
				return encoded(v)
			})
		}
	}
}

// STATUS-20: whoever reads a golden with the Go types and writes it again gives away
// nothing.
func TestGoldensReadBack(t *testing.T) {
	t.Parallel()
	types := map[string]Message{}
	for _, m := range Messages() {
		types[m.Name] = m
	}
	for _, g := range goldens(t) {
		var again []byte
		if g.Event != nil {
			ev, err := envelope.Decode(g.Body)
			if err != nil {
				t.Fatalf("%s.%s: %v", g.Name, g.Variant, err)
			}
			if again, err = envelope.Encode(ev); err != nil {
				t.Fatalf("%s.%s: %v", g.Name, g.Variant, err)
			}
		} else {
			v := reflect.New(types[g.Name].Type)
			if err := json.Unmarshal(g.Body, v.Interface()); err != nil {
				t.Fatalf("%s.%s: %v", g.Name, g.Variant, err)
			}
			again = encoded(v.Elem().Interface())
		}
		if !bytes.Equal(again, g.Body) {
			t.Errorf("%s.%s came back as\n%.500s\nwas\n%.500s", g.Name, g.Variant, again, g.Body)
		}
	}
}

// STATUS-19: the published words are those of the code.
func TestVocabularyIsPublished(t *testing.T) {
	t.Parallel()
	var v map[string]any
	if err := json.Unmarshal(schema.Vocabulary(), &v); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string][]string{
		"states": words(contract.States()), "task_statuses": words(contract.TaskStatuses()), "tool_statuses": words(contract.ToolStatuses()),
		"run_statuses": words(contract.RunStatuses()), "run_stop_reasons": words(contract.StopReasons()), "error_codes": words(contract.ErrorCodes()),
		"task_stop_reasons": {"token_capped", "turn_capped", "loop_capped"}, // STATUS-03
	} {
		list, _ := v[key].([]any)
		if got := texts(list); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
	}
	events, _ := v["event_types"].([]any)
	var got []string
	for _, e := range events {
		got = append(got, fmt.Sprint(e.(map[string]any)["type"]))
	}
	if !slices.Equal(got, words(contract.EventTypes())) {
		t.Errorf("event types: %q", got)
	}
}

// I11: the official Go SDK of CloudEvents reads every event, finds it valid, and
// every attribute as it was written.
func TestCloudEventsSDKReadsEveryEvent(t *testing.T) {
	t.Parallel()
	n := 0
	for _, g := range goldens(t) {
		if g.Event == nil {
			continue
		}
		n++
		want, got := g.Event, cloudevents.New()
		if err := json.Unmarshal(g.Body, &got); err != nil {
			t.Errorf("%s.%s: %v", g.Name, g.Variant, err)
			continue
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%s.%s: %v", g.Name, g.Variant, err)
		}
		extensions := map[string]any{"tenant": string(want.Tenant), "threadid": string(want.ThreadID), "runid": string(want.RunID)}
		for k, v := range map[string]string{"taskid": string(want.TaskID), "traceparent": want.TraceParent, "tracestate": want.TraceState} {
			if v != "" {
				extensions[k] = v
			}
		}
		if want.Attempt > 0 {
			extensions["attempt"] = int32(want.Attempt)
		}
		if !maps.Equal(got.Extensions(), extensions) {
			t.Errorf("%s.%s: extensions %v, want %v", g.Name, g.Variant, got.Extensions(), extensions)
		}
		for what, pair := range map[string][2]string{
			"specversion": {got.SpecVersion(), "1.0"}, "id": {got.ID(), want.ID}, "source": {got.Source(), want.Source}, "type": {got.Type(), string(want.Type)},
			"subject": {got.Subject(), want.Subject}, "datacontenttype": {got.DataContentType(), "application/json"},
			"dataschema": {got.DataSchema(), envelope.DataSchema(want.Type)}, "data": {string(got.Data()), string(want.Data)},
		} {
			if pair[0] != pair[1] {
				t.Errorf("%s.%s: %s is %.200q, want %.200q", g.Name, g.Variant, what, pair[0], pair[1])
			}
		}
		if !got.Time().Equal(want.Time) {
			t.Errorf("%s.%s: time %v, want %v", g.Name, g.Variant, got.Time(), want.Time)
		}
	}
	if n < 3*len(contract.EventTypes()) {
		t.Errorf("%d events were read; want three of each type at least", n)
	}
}
