package contract

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"testing"
)

// STATUS-19: each word of a vocabulary stands in its list, so that nobody keeps
// a list of their own.
func TestVocabularyIsComplete(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "status.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string][]string{}
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			typ, ok := v.Type.(*ast.Ident)
			if !ok {
				t.Fatalf("a constant without a type: %v", v.Names)
			}
			for _, e := range v.Values {
				word, err := strconv.Unquote(e.(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				declared[typ.Name] = append(declared[typ.Name], word)
			}
		}
	}
	lists := map[string][]string{
		"State": words(States()), "TaskStatus": words(TaskStatuses()), "ToolStatus": words(ToolStatuses()), "RunStatus": words(RunStatuses()),
		"StopReason": words(StopReasons()), "ErrorCode": words(ErrorCodes()), "EventType": words(EventTypes()),
	}
	for typ, want := range declared {
		if got := lists[typ]; !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want))) {
			t.Errorf("the list of %s has %q, its constants are %q", typ, got, want)
		}
	}
	if len(declared) != len(lists) {
		t.Errorf("constants of %d types, lists of %d", len(declared), len(lists))
	}
}

// EVT-06, EVT-10: every event type is stored under a short name, in one of two
// short categories.
func TestRecordsOfEventTypes(t *testing.T) {
	t.Parallel()
	for _, typ := range EventTypes() {
		rec, category := typ.Record(), typ.Category()
		if rec == "" || len(rec) > 32 {
			t.Errorf("%s is stored as %q; want 1 to 32 characters", typ, rec)
		}
		want := CategoryRun
		if typ[:5] == "task_" {
			want = CategorySubagent
		}
		if category != want || len(category) > 16 {
			t.Errorf("%s has the category %q; want %q, of at most 16 characters", typ, category, want)
		}
	}
	if unknown := EventType("task_paused"); unknown.Record() != "" || unknown.Category() != "" {
		t.Errorf("%s is stored as %q in %q; want nothing", unknown, unknown.Record(), unknown.Category())
	}
}

func words[T ~string](list []T) []string {
	out := make([]string, len(list))
	for i, w := range list {
		out[i] = string(w)
	}
	return out
}
