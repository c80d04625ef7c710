package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// words reads the constants of package contract: by type, the words with their names.
func words(t *testing.T, dir string) map[string]map[string]string {
	t.Helper()
	pkgs, err := parser.ParseDir(token.NewFileSet(), filepath.Join(dir, "pkg", "contract"), func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0) //nolint:staticcheck // a handful of files without build tags
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string]string{}
	for _, f := range pkgs["contract"].Files {
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			typ, isNamed := spec.Type.(*ast.Ident)
			lit, isText := spec.Values[0].(*ast.BasicLit)
			if !isNamed || !isText || lit.Kind != token.STRING {
				return true
			}
			word, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Fatal(err)
			}
			if all[typ.Name] == nil {
				all[typ.Name] = map[string]string{}
			}
			all[typ.Name][word] = spec.Names[0].Name
			return true
		})
	}
	return all
}

// STATUS-19: statuses, stop reasons, error codes and types of events have one home,
// package contract. Whoever lists them — the HTTP API in what it declares, the page on
// events — lists all of them and no others. STATUS-20: and they are those of before, or more.
func TestOneVocabulary(t *testing.T) {
	t.Parallel()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	home := words(t, dir)
	// What there was once stays: a word that goes breaks its readers.
	for typ, want := range map[string]string{
		"State":      "cancelled completed failed granted released running timed_out",
		"TaskStatus": "cancelled completed failed queued running timed_out",
		"ToolStatus": "cancelled completed failed polling_timed_out timed_out",
		"RunStatus":  "cancelled completed failed running",
		"StopReason": "loop_capped model_length_capped safety_capped subagent_limit_capped token_capped turn_capped",
		"ErrorCode":  "executor_lost executor_stalled internal invalid_request llm_error policy_denied queue_full queue_timeout tool_error",
		"EventType":  "run_cancelled run_completed run_failed run_message run_started task_admitted task_cancelled task_completed task_failed task_queued task_running task_started task_timed_out",
	} {
		for _, w := range strings.Fields(want) {
			if home[typ][w] == "" {
				t.Errorf("contract.%s has no %q any more", typ, w)
			}
		}
	}

	// Lists in struct tags are those of their type, which the field names, or the folder.
	tag := regexp.MustCompile("`[^`]*enum:\"[^\"]*completed[^`]*`")
	lists := 0
	for _, file := range []string{"internal/client/wire/wire.go", "services/lead/internal/httpapi/runs.go", "services/lead/internal/httpapi/tasks.go"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range tag.FindAllString(string(b), -1) {
			lists++
			got := strings.Split(reflect.StructTag(strings.Trim(found, "`")).Get("enum"), ",")
			typ := "RunStatus"
			if slices.Contains(got, "queued") {
				typ = "TaskStatus"
			}
			if slices.Sort(got); !slices.Equal(got, slices.Sorted(maps.Keys(home[typ]))) {
				t.Errorf("%s declares %q, contract.%s is %q", file, got, typ, slices.Sorted(maps.Keys(home[typ])))
			}
		}
	}
	if lists < 4 {
		t.Errorf("%d lists of statuses were found in the HTTP API, want at least 4", lists)
	}

	b, err := os.ReadFile(filepath.Join(dir, "docs", "events.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, typ := range []string{"ErrorCode", "EventType"} {
		for word := range home[typ] {
			if !strings.Contains(string(b), "`"+word+"`") {
				t.Errorf("docs/events.md does not list %q of contract.%s", word, typ)
			}
		}
	}
}
