package contract

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
)

// I11, STATUS-20: what any released version promised still holds.
func TestReleasedPromisesHold(t *testing.T) {
	t.Parallel()
	released, err := Released(root)
	if err != nil || released["v1.0"] == nil {
		t.Fatalf("the schemas of v1.0 are not there: %v", err)
	}
	for version, schemas := range released {
		breaks, err := Breaks(schemas, published(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range breaks {
			t.Errorf("%s promised something else: %s", version, b)
		}
	}
}

// change is one change of a schema. Path leads to an object in it.
type change struct {
	schema, path string
	do           func(o map[string]any)
}

func put(key string, v any) func(map[string]any) { return func(o map[string]any) { o[key] = v } }
func drop(keys ...string) func(map[string]any) {
	return func(o map[string]any) {
		for _, k := range keys {
			delete(o, k)
		}
	}
}

func rename(from, to string) func(map[string]any) {
	return func(o map[string]any) { o[to] = o[from]; delete(o, from) }
}

func without(word string) func(map[string]any) {
	return func(o map[string]any) {
		for _, key := range []string{"required", "enum"} {
			var left []any
			list, _ := o[key].([]any)
			for _, w := range list {
				if w != word {
					left = append(left, w)
				}
			}
			if list != nil {
				o[key] = left
			}
		}
	}
}

func with(key, word string) func(map[string]any) {
	return func(o map[string]any) { list, _ := o[key].([]any); o[key] = append(list, word) }
}

func changed(t *testing.T, c change) map[string][]byte {
	t.Helper()
	out := maps.Clone(published(t))
	if c.do == nil {
		delete(out, c.schema)
		return out
	}
	var s map[string]any
	if err := json.Unmarshal(out[c.schema], &s); err != nil {
		t.Fatal(err)
	}
	at := any(s)
	for _, step := range strings.FieldsFunc(c.path, func(r rune) bool { return r == '/' }) {
		switch v := at.(type) {
		case map[string]any:
			at = v[step]
		case []any:
			at = v[step[0]-'0']
		}
	}
	o, ok := at.(map[string]any)
	if !ok {
		t.Fatalf("%s has no %s", c.schema, c.path)
	}
	c.do(o)
	out[c.schema] = encoded(s)
	return out
}

// The check finds every kind of broken promise, and calls no addition one.
func TestBreaksFindsBrokenPromises(t *testing.T) {
	t.Parallel()
	const end, running = "event.task_failed", "event.task_running"
	text := map[string]any{"type": "string"}
	bad := map[string]change{
		"schema removed":                     {running, "", nil},
		"field renamed":                      {end, "$defs/TaskEndData/properties", rename("error", "failure")},
		"field removed":                      {end, "$defs/TaskEndData/properties", drop("queue_ms")},
		"attribute removed":                  {end, "properties", drop("traceparent")},
		"field deep in a type removed":       {running, "$defs/StepCall/properties", drop("args_truncated")},
		"type changed":                       {running, "$defs/TaskRunningData/properties/message_index", put("type", "string")},
		"type opened":                        {running, "$defs/TaskRunningData/properties/message_index", drop("type")},
		"null is written":                    {running, "$defs/Step/properties/text", put("type", []any{"string", "null"})},
		"null is written for a list":         {running, "$defs/Step/properties/tool_calls", put("type", []any{"array", "null"})},
		"not always there any more":          {end, "$defs/TaskEndData", without("status")},
		"attribute not always there":         {end, "", without("subject")},
		"longer than promised":               {running, "$defs/Step/properties/text", put("maxLength", 10000)},
		"no bound any more":                  {running, "$defs/Step/properties/text", drop("maxLength")},
		"negative":                           {running, "$defs/Usage/properties/input_tokens", drop("minimum")},
		"status that nobody knows":           {"task.get.response", "properties/status", with("enum", "paused")},
		"status removed":                     {"task.get.response", "properties/status", without("timed_out")},
		"code removed":                       {end, "$defs/TaskEndData/properties/error_code/anyOf/0", without("queue_full")},
		"codes of another form":              {end, "$defs/TaskEndData/properties/error_code/anyOf/1", put("pattern", "^[A-Z ]+$")},
		"any text as status":                 {"task.get.response", "properties/status", drop("enum")},
		"constant changed":                   {end, "properties/type", put("const", "task_fail")},
		"form changed":                       {end, "properties/runid", put("pattern", ".*")},
		"format dropped":                     {end, "properties/time", drop("format")},
		"entries changed":                    {"task.get.response", "$defs/ReceiptVerdict/properties/unknown/items", put("type", "integer")},
		"values of a map changed":            {"admission.status.response", "$defs/Totals/properties/refusals/additionalProperties", put("type", "string")},
		"condition changed":                  {running, "$defs/Step", drop("else")},
		"unknown keyword":                    {running, "", put("not", map[string]any{"required": []any{"data"}})},
		"request asks for more":              {"task.submit.request", "", with("required", "model")},
		"request asks for a new field":       {"events.list.request", "", put("required", []any{"order"})},
		"request takes less text":            {"task.submit.request", "properties/description", put("maxLength", 10)},
		"request has a bound now":            {"task.submit.request", "properties/user_id", put("maxLength", 1000)},
		"request takes fewer types":          {"events.list.request", "properties/types", put("maxItems", 1)},
		"request takes a smaller page":       {"events.list.request", "properties/limit", put("maximum", 100)},
		"request has a form now":             {"task.submit.request", "properties/model", put("pattern", "^x")},
		"request: null is not fine any more": {"task_request", "properties/offered_tools", put("type", "array")},
		"request field removed":              {"events.list.request", "properties", drop("after_seq")},
		"record: asks for more":              {"task_record", "", with("required", "executor")},
		"record: state of tomorrow":          {"task_record", "properties/state", with("enum", "paused")},
		"record: words of a list are fewer":  {"limits", "properties/admission_policy", without("reject")},
		"grant: field of its record gone":    {"grant", "$defs/TaskRecord/properties", drop("epoch")},
	}
	for name, c := range bad {
		breaks, err := Breaks(published(t), changed(t, c))
		if err != nil || len(breaks) == 0 {
			t.Errorf("%s: nothing was found, %v", name, err)
		}
		for _, b := range breaks {
			if !strings.HasPrefix(b, c.schema) || len(breaks) > 2 {
				t.Errorf("%s: %q", name, breaks)
			}
		}
	}
	good := map[string]change{
		"nothing":   {running, "", func(map[string]any) {}},
		"new field": {running, "$defs/TaskRunningData/properties", put("thoughts", text)},
		"new field, always there": {running, "$defs/TaskRunningData", func(o map[string]any) {
			put("thoughts", text)(o["properties"].(map[string]any))
			with("required", "thoughts")(o)
		}},
		"always there now":        {running, "$defs/TaskRunningData", with("required", "usage")},
		"new attribute":           {running, "properties", put("thoughtid", text)},
		"new code":                {end, "$defs/TaskEndData/properties/error_code/anyOf/0", with("enum", "quota_spent")},
		"other words for people":  {running, "", put("description", "tells of a step")},
		"shorter than promised":   {running, "$defs/Step/properties/text", put("maxLength", 100)},
		"request asks for less":   {"task.submit.request", "", without("prompt")},
		"request takes more text": {"task.submit.request", "properties/description", put("maxLength", 5000)},
		"request: new option":     {"events.list.request", "properties", put("order", text)},
		"request: null is fine":   {"events.list.request", "properties/limit", put("type", []any{"integer", "null"})},
		"record: new field":       {"task_record", "properties", put("priority", map[string]any{"type": "integer"})},
	}
	for name, c := range good {
		if breaks, err := Breaks(published(t), changed(t, c)); err != nil || len(breaks) > 0 {
			t.Errorf("%s: %q, %v", name, breaks, err)
		}
	}
	more := maps.Clone(published(t))
	more["event.task_paused"] = []byte(`{"type":"object"}`)
	if breaks, err := Breaks(published(t), more); err != nil || len(breaks) > 0 {
		t.Errorf("new schema: %q, %v", breaks, err)
	}
}

// Released schemas are never written again, and their names are those of versions.
func TestReleaseIsKept(t *testing.T) {
	t.Parallel()
	for _, release := range []string{"v1.0", "1.1", "v2.0", "../x"} {
		if err := Write(root, release); err == nil {
			t.Errorf("release %q was written", release)
		}
	}
	if fmt.Sprint(releaseName.MatchString("v1.1")) != "true" {
		t.Error("v1.1 is no name of a release")
	}
}
