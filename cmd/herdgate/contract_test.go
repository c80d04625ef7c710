package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
)

// STATUS-19: the words that are printed are those of the contract, with a schema for
// each event type.
func TestContractWords(t *testing.T) {
	t.Parallel()
	var d description
	if err := json.Unmarshal([]byte(herdgate(t, t.TempDir(), nil, "contract").want(t, 0).stdout), &d); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(d.ErrorCodes, texts(contract.ErrorCodes())) || !slices.Equal(d.StopReasons, texts(contract.StopReasons())) ||
		!slices.Equal(d.TaskStatuses, texts(contract.TaskStatuses())) || !slices.Equal(d.RunStatuses, texts(contract.RunStatuses())) {
		t.Errorf("other words than the contract's: %+v", d)
	}
	if len(d.EventTypes) != len(contract.EventTypes()) {
		t.Errorf("%d event types, want %d", len(d.EventTypes), len(contract.EventTypes()))
	}
	for _, e := range d.EventTypes {
		var s struct {
			ID string `json:"$id"`
		}
		b, err := schema.Get("event." + e.Type + ".data")
		if err == nil {
			err = json.Unmarshal(b, &s)
		}
		if err != nil || s.ID != e.DataSchema || e.Stored == "" {
			t.Errorf("%+v: the schema of its data is %q, %v", e, s.ID, err)
		}
	}
}

func herdgateIn(t *testing.T, args ...string) string {
	t.Helper()
	return herdgate(t, t.TempDir(), nil, args...).want(t, 0).stdout
}

func TestContractSchemas(t *testing.T) {
	t.Parallel()
	if got := strings.Fields(herdgateIn(t, "contract", "schemas")); !slices.Equal(got, schema.Names()) || !slices.Contains(got, "task_request") {
		t.Errorf("listed: %q", got)
	}
	var list []string
	if err := json.Unmarshal([]byte(herdgateIn(t, "contract", "schemas", "--output", "json")), &list); err != nil || !slices.Equal(list, schema.Names()) {
		t.Errorf("listed as JSON: %q, %v", list, err)
	}
	want, err := schema.Get("grant")
	if err != nil {
		t.Fatal(err)
	}
	if got := herdgateIn(t, "contract", "schemas", "grant"); got != string(want) {
		t.Errorf("printed: %.200q", got)
	}
	r := herdgate(t, t.TempDir(), nil, "contract", "schemas", "../asyncapi.yaml").want(t, 1)
	contains(t, "stderr", r.stderr, "no such schema", "contract schemas")
	dir := filepath.Join(t.TempDir(), "a", "b")
	herdgateIn(t, "contract", "schemas", "--output-dir", dir)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(schema.Names()) {
		t.Errorf("%d files, %v; want %d", len(entries), err, len(schema.Names()))
	}
	r = herdgate(t, t.TempDir(), nil, "contract", "schemas", "grant", "--output-dir", dir).want(t, 1)
	contains(t, "stderr", r.stderr, "leave out \"grant\"")
}

func TestContractAsyncAPI(t *testing.T) {
	t.Parallel()
	if got := herdgateIn(t, "contract", "asyncapi"); got != string(schema.AsyncAPI()) || !strings.Contains(got, "asyncapi: 3.") {
		t.Errorf("printed: %.200q", got)
	}
	dir := t.TempDir()
	herdgateIn(t, "contract", "asyncapi", "--output-dir", dir)
	doc, err := os.ReadFile(filepath.Join(dir, "asyncapi.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	refs := 0
	for line := range strings.Lines(string(doc)) {
		_, ref, ok := strings.Cut(strings.TrimSpace(line), "$ref: ./")
		if !ok {
			continue
		}
		refs++
		if _, err := os.Stat(filepath.Join(dir, ref)); err != nil {
			t.Errorf("the document refers to %s: %v", ref, err)
		}
	}
	if refs < len(contract.EventTypes()) {
		t.Errorf("%d references; want one for each message", refs)
	}
}
