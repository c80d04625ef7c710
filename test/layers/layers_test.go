package layers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// root is the top folder of the workspace.
var root = sync.OnceValues(func() (string, error) {
	out, err := run("", "go", "env", "GOWORK")
	if err != nil {
		return "", err
	}
	file := strings.TrimSpace(string(out))
	if file == "" || file == "off" {
		return "", errors.New("not in a workspace: these tests need go.work")
	}
	return filepath.Dir(file), nil
})

// workspace is every package of ours, tests included in Imports.
var workspace = sync.OnceValues(func() ([]Package, error) {
	dir, err := root()
	if err != nil {
		return nil, err
	}
	out, err := run(dir, "go", "list", "-e", "-json=ImportPath,Standard,Imports,TestImports,XTestImports,Deps", "work")
	if err != nil {
		return nil, err
	}
	var pkgs []Package
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Package
			TestImports, XTestImports []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			if !slices.Contains(p.Package.Imports, imp) {
				p.Package.Imports, p.Tests = append(p.Package.Imports, imp), append(p.Tests, imp)
			}
		}
		pkgs = append(pkgs, p.Package)
	}
})

// standard is the set of packages of the standard library.
var standard = sync.OnceValues(func() (map[string]bool, error) {
	out, err := run("", "go", "list", "std")
	set := map[string]bool{"C": true, "unsafe": true}
	for _, p := range strings.Fields(string(out)) {
		set[p] = true
	}
	return set, err
})

func run(dir, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, errors.Join(err, errors.New(stderr.String()))
	}
	return out, nil
}

func packages(t *testing.T) []Package {
	t.Helper()
	pkgs, err := workspace()
	if err != nil {
		t.Fatal(err)
	}
	if len(pkgs) < 20 {
		t.Fatalf("the workspace has %d packages; want at least 20, or nothing is proven", len(pkgs))
	}
	return pkgs
}

func complain(t *testing.T, bad []string) {
	t.Helper()
	for _, b := range bad {
		t.Error(b)
	}
}

// ARCH-01: each role is a program of its own, with the tool between lead and
// sub-agent as the only bridge.
func TestArrowsPointOneWay(t *testing.T) {
	t.Parallel()
	complain(t, Arrows(packages(t)))
}

func TestPublicModulesNeedTheStandardLibraryOnly(t *testing.T) {
	t.Parallel()
	std, err := standard()
	if err != nil {
		t.Fatal(err)
	}
	complain(t, Strangers(packages(t), func(p string) bool { return std[p] }))
}

// ARCH-07: every role works when it is started alone, so each has a binary, and
// none of them drags in what only another one needs.
func TestServiceBinariesLinkOnlyWhatTheyNeed(t *testing.T) {
	t.Parallel()
	sql := []string{"modernc.org/sqlite", "github.com/jackc/pgx", "github.com/lib/pq", "github.com/mattn/go-sqlite3", "github.com/pressly/goose"}
	models := []string{"github.com/openai/openai-go", "github.com/anthropics/anthropic-sdk-go"}
	server := []string{"github.com/nats-io/nats-server"}
	never := map[string][]string{
		"lead":      slices.Concat(server, sql),
		"admission": slices.Concat(server, sql, models),
		"executor":  slices.Concat(server, sql),
		"eventsink": slices.Concat(server, models),
	}
	found := 0
	for _, p := range packages(t) {
		for service, prefixes := range never {
			if p.ImportPath == Module+"/services/"+service+"/cmd/"+service {
				found++
				complain(t, Links(p, prefixes...))
			}
		}
	}
	if found != len(never) {
		t.Errorf("found %d service binaries at services/NAME/cmd/NAME; want %d", found, len(never))
	}
}

func TestOnlyTheSinkHasADatabase(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		at, err := where(p.ImportPath)
		if err != nil || at.unit == "services/eventsink" || at.unit == "test" {
			continue
		}
		// The tests of the command line look into the database of a whole system.
		if slices.Contains(p.Imports, "database/sql") && !(strings.HasPrefix(at.unit, "cmd") && slices.Contains(p.Tests, "database/sql")) {
			t.Errorf("%s imports database/sql; only services/eventsink may", p.ImportPath)
		}
	}
}

// EVT-21: what decides is pure; it neither talks nor waits nor runs anything.
func TestPurePackagesHaveNoInputOrOutput(t *testing.T) {
	t.Parallel()
	pure := []string{"internal/event", "internal/delegation", "internal/outcome", "internal/subagent", "services/admission/gate"}
	found := 0
	for _, p := range packages(t) {
		if !slices.Contains(pure, strings.TrimPrefix(p.ImportPath, Module+"/")) {
			continue
		}
		found++
		complain(t, Links(p, "github.com/nats-io", "net", "os/exec", "database/sql", "github.com/rs/zerolog"))
	}
	if found != len(pure) {
		t.Errorf("found %d of the pure packages %v", found, pure)
	}
}

func TestEveryModuleIsLinked(t *testing.T) {
	t.Parallel()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	out, err := run(dir, "go", "list", "-m", "-f", "{{.GoMod}}")
	if err != nil {
		t.Fatal(err)
	}
	var mods []Mod
	for _, file := range strings.Fields(string(out)) {
		m, err := readMod(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(m.Path, Module+"/pkg/") {
			for _, dep := range m.Requires {
				if !strings.HasPrefix(dep, Module+"/pkg/") {
					t.Errorf("%s requires %s; whoever imports it would get it too", m.Path, dep)
				}
			}
		}
		mods = append(mods, m)
	}
	if len(mods) < 9 {
		t.Errorf("go.work uses %d modules; want at least 9", len(mods))
	}
	complain(t, MissingLinks(mods))
}

func readMod(file string) (Mod, error) {
	out, err := run("", "go", "mod", "edit", "-json", file)
	if err != nil {
		return Mod{}, err
	}
	var f struct {
		Module  struct{ Path string }
		Require []struct{ Path string }
		Replace []struct{ Old struct{ Path string } }
	}
	if err := json.Unmarshal(out, &f); err != nil {
		return Mod{}, err
	}
	m := Mod{Path: f.Module.Path}
	for _, r := range f.Require {
		m.Requires = append(m.Requires, r.Path)
	}
	for _, r := range f.Replace {
		m.Replaces = append(m.Replaces, r.Old.Path)
	}
	return m, nil
}

// The rules themselves: each must refuse what it is there for.

func TestArrowsRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		from, to string
		bad      bool
	}{
		{"cmd/herdgate", "services/lead", false},
		{"services/lead", "services/lead/internal/run", false},
		{"internal/bus", "internal/natstest", false},
		{"pkg/envelope", "pkg/contract", false},
		{"test/e2e", "internal/natstest", false},
		{"pkg/contract", "pkg/envelope", true},
		{"internal/bus", "services/lead", true},
		{"services/lead", "services/admission", true},
		{"services/lead/internal/run", "services/executor", true},
		{"services/lead", "cmd/herdgate", true},
		{"internal/bus", "test/e2e", true},
		{"elsewhere", "pkg/contract", true},
		{"services/lead", "elsewhere", true},
	}
	for _, tt := range tests {
		got := Arrows([]Package{{ImportPath: Module + "/" + tt.from, Imports: []string{Module + "/" + tt.to, "context"}}})
		if (len(got) > 0) != tt.bad {
			t.Errorf("Arrows(%s → %s) = %q, want a complaint: %v", tt.from, tt.to, got, tt.bad)
		}
	}
}

func TestStrangersRefuses(t *testing.T) {
	t.Parallel()
	std := func(p string) bool { return p == "context" }
	p := Package{ImportPath: Module + "/pkg/contract", Imports: []string{"context", "github.com/nats-io/nats.go", Module + "/internal/bus"}}
	if got := Strangers([]Package{p}, std); len(got) != 2 {
		t.Errorf("Strangers = %q, want two complaints", got)
	}
	p.ImportPath = Module + "/internal/bus"
	if got := Strangers([]Package{p}, std); got != nil {
		t.Errorf("Strangers = %q outside of pkg/, want none", got)
	}
}

func TestLinksRefuses(t *testing.T) {
	t.Parallel()
	p := Package{ImportPath: "x", Deps: []string{"net", "netip", "net/http", "github.com/nats-io/nats-server/v2/server", "github.com/nats-io/nats.go"}}
	want := []string{"x links 2 packages of net: net …", "x links 1 packages of github.com/nats-io/nats-server: github.com/nats-io/nats-server/v2/server …"}
	if got := Links(p, "net", "github.com/nats-io/nats-server", "database/sql"); !slices.Equal(got, want) {
		t.Errorf("Links = %q, want %q", got, want)
	}
}

func TestMissingLinksRefuses(t *testing.T) {
	t.Parallel()
	a, b, c := Module+"/a", Module+"/b", Module+"/c"
	mods := []Mod{
		{Path: a, Requires: []string{b, "golang.org/x/sync"}, Replaces: []string{b}},
		{Path: b, Requires: []string{c}, Replaces: []string{c}},
		{Path: c},
	}
	want := []string{a + " reaches " + c + " without a require line", a + " reaches " + c + " without a replace line"}
	if got := MissingLinks(mods); !slices.Equal(got, want) {
		t.Errorf("MissingLinks = %q, want %q", got, want)
	}
	mods[0] = Mod{Path: a, Requires: []string{b, c}, Replaces: []string{b, c}}
	if got := MissingLinks(mods); got != nil {
		t.Errorf("MissingLinks = %q for linked modules, want none", got)
	}
	if got := MissingLinks([]Mod{mods[0], mods[1]}); len(got) == 0 {
		t.Error("MissingLinks accepts a module that go.work does not use")
	}
}
