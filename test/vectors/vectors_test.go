// Package vectors runs the behaviour vectors: cases for the pure functions, as
// JSON files, with the values that count. Another folder of such files can be
// fed to the same test without touching code:
//
//	HERDGATE_VECTORS=/some/dir go test github.com/herdgate/herdgate/test/vectors -run TestVectors
package vectors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// runners holds one runner for each file name.
var runners = map[string]func(t *testing.T, c vectorCase){
	"concurrency_clamp":   runConcurrencyClamp,
	"total_cap":           runTotalCap,
	"ledger_merge":        runLedgerMerge,
	"limit_trim":          runLimitTrim,
	"tool_filter":         runToolFilter,
	"skill_merge":         runSkillMerge,
	"result_message":      runResultMessage,
	"status_stop_reason":  runStatusStopReason,
	"step_truncation":     runStepTruncation,
	"step_capture":        runStepCapture,
	"lifecycle_events":    runLifecycleEvents,
	"terminal_cas":        runTerminalCAS,
	"admission_queue":     runAdmissionQueue,
	"acceptance_criteria": runAcceptanceCriteria,
	"loop_detection":      runLoopDetection,
	"token_budget":        runTokenBudget,
	"status_metadata":     runStatusMetadata,
	"receipt_citations":   runReceiptCitations,
	"registry_precedence": runRegistryPrecedence,
	"allowed_subagents":   runAllowedSubagents,
}

// vectorCase is one case with its repetitions written out.
type vectorCase struct {
	inputs   any
	expected any
	// redesign: expected is the value for a design that may do better than the
	// original, and may leave out what the original alone has.
	redesign bool
}

func TestVectors(t *testing.T) {
	dir := os.Getenv("HERDGATE_VECTORS")
	if dir == "" {
		dir = filepath.Join("..", "..", "testdata", "vectors")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("no vector files in %s", dir)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		t.Run(name, func(t *testing.T) {
			run, ok := runners[name]
			if !ok {
				t.Fatalf("no runner knows %s", file)
			}
			cases, err := load(file)
			if err != nil {
				t.Fatal(err)
			}
			for id, c := range cases {
				t.Run(id, func(t *testing.T) { run(t, c) })
			}
		})
	}
}

// load reads a file's cases by id. A case that it does not understand whole is
// an error.
func load(file string) (map[string]vectorCase, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	v, err := decodeAny(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	doc, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s: not an object", file)
	}
	list, ok := doc["cases"].([]any)
	if !ok || len(list) == 0 {
		return nil, fmt.Errorf("%s: no cases", file)
	}
	cases := map[string]vectorCase{}
	for i, e := range list {
		m, ok := e.(map[string]any)
		if !ok {
			return nil, fmt.Errorf("%s: case %d is not an object", file, i)
		}
		id, _ := m["id"].(string)
		if _, dup := cases[id]; id == "" || dup {
			return nil, fmt.Errorf("%s: case %d: id %q is missing or used twice", file, i, id)
		}
		c, err := newCase(m)
		if err != nil {
			return nil, fmt.Errorf("%s: case %s: %w", file, id, err)
		}
		cases[id] = c
	}
	return cases, nil
}

func newCase(m map[string]any) (vectorCase, error) {
	var c vectorCase
	var err error
	inputs, ok := m["inputs"]
	if !ok {
		return c, errors.New("no inputs")
	}
	if c.inputs, err = expand(inputs); err != nil {
		return c, err
	}
	counts := "" // the key whose value counts
	for key := range m {
		switch key {
		case "id", "inputs", "note", "source":
		case "expected":
			if counts == "" {
				counts = key
			}
		case "expected_strict", "expected_redesign":
			if strings.HasPrefix(counts, "expected_") {
				return c, errors.New("both expected_strict and expected_redesign")
			}
			counts = key
		default:
			return c, fmt.Errorf("unknown key %q", key)
		}
	}
	if counts == "" {
		return c, errors.New("no expected value")
	}
	c.redesign = counts == "expected_redesign"
	c.expected, err = expand(m[counts])
	return c, err
}

// expand writes out {"$repeat": [s, n]} and {"$concat": [...]}.
func expand(v any) (any, error) {
	switch v := v.(type) {
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			var err error
			if out[i], err = expand(e); err != nil {
				return nil, err
			}
		}
		return out, nil
	case map[string]any:
		for key := range v {
			if strings.HasPrefix(key, "$") {
				return expandMacro(v)
			}
		}
		out := map[string]any{}
		for k, e := range v {
			var err error
			if out[k], err = expand(e); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	return v, nil
}

const maxExpanded = 16 << 20

func expandMacro(m map[string]any) (string, error) {
	if args, ok := m["$repeat"].([]any); ok && len(m) == 1 && len(args) == 2 {
		s, isText := args[0].(string)
		n, isNumber := args[1].(json.Number)
		count, err := n.Int64()
		if isText && isNumber && err == nil && count >= 0 && count*int64(len(s)) <= maxExpanded {
			return strings.Repeat(s, int(count)), nil
		}
	}
	if parts, ok := m["$concat"].([]any); ok && len(m) == 1 {
		var b strings.Builder
		for _, p := range parts {
			e, err := expand(p)
			s, isText := e.(string)
			if err != nil || !isText {
				return "", fmt.Errorf("$concat of %v: want texts", p)
			}
			b.WriteString(s)
		}
		return b.String(), nil
	}
	return "", fmt.Errorf("cannot expand %v", m)
}

func decodeAny(b []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return v, nil
}

// into decodes v strictly: a key that T does not have, or a value of another
// type, fails the case.
func into[T any](t *testing.T, v any) T {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	d.DisallowUnknownFields()
	var out T
	if err := d.Decode(&out); err != nil {
		t.Fatalf("cannot decode the case: %v", err)
	}
	return out
}

// plain turns any value into what decoding its JSON gives.
func plain(t *testing.T, v any) any {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	out, err := decodeAny(b)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// equal compares values by their JSON.
func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if g, w := plain(t, got), plain(t, want); !reflect.DeepEqual(g, w) {
		t.Errorf("%s = %s, want %s", what, short(g), short(w))
	}
}

func short(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	if len(b) > 400 {
		return string(b[:400]) + "…"
	}
	return string(b)
}

// object returns the expected object, whose keys must be among known: an
// expectation that nothing checks is a failure.
func (c vectorCase) object(t *testing.T, known ...string) map[string]any {
	t.Helper()
	m, ok := c.expected.(map[string]any)
	if !ok {
		t.Fatalf("expected is %s; want an object", short(c.expected))
	}
	for key := range m {
		found := false
		for _, k := range known {
			found = found || k == key
		}
		if !found {
			t.Fatalf("expected has key %q, which nothing checks", key)
		}
	}
	return m
}

// orNull is nil for the empty string: how the files write "none".
func orNull[S ~string](s S) any {
	if s == "" {
		return nil
	}
	return string(s)
}
