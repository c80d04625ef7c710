package tool_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
)

type bench struct {
	t     *testing.T
	dir   string
	ws    *tool.Workspace
	tools map[string]tool.Tool
}

func newBench(t *testing.T, change ...func(*tool.Options)) *bench {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ws")
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ws.Close() })
	o := tool.Options{Bash: true, Sandbox: sandbox.New(sandbox.Landlock, nil)}
	for _, c := range change {
		c(&o)
	}
	b := &bench{t: t, dir: dir, ws: ws, tools: map[string]tool.Tool{}}
	for _, tl := range tool.Tools(ws, o) {
		b.tools[tl.Spec().Name] = tl
	}
	return b
}

func (b *bench) raw(name, args string) tool.Result {
	b.t.Helper()
	res, err := b.tools[name].Call(b.t.Context(), tool.Call{ID: "c", Args: json.RawMessage(args)})
	if err != nil {
		b.t.Fatalf("%s(%s): %v", name, args, err)
	}
	if !utf8.ValidString(res.Text) || strings.ContainsRune(res.Text, 0) {
		b.t.Errorf("%s: the result is no clean text: %q", name, res.Text)
	}
	return res
}

func (b *bench) call(name string, args map[string]any) tool.Result {
	b.t.Helper()
	j, err := json.Marshal(args)
	if err != nil {
		b.t.Fatal(err)
	}
	return b.raw(name, string(j))
}

type m = map[string]any

func (b *bench) ok(name string, args m) string {
	b.t.Helper()
	res := b.call(name, args)
	if res.IsError {
		b.t.Fatalf("%s(%v) failed: %s", name, args, res.Text)
	}
	return res.Text
}

func (b *bench) fails(name string, args m, want string) {
	b.t.Helper()
	res := b.call(name, args)
	if !res.IsError || !strings.Contains(res.Text, want) {
		b.t.Errorf("%s(%v) = %q, error %v; want an error with %q", name, args, res.Text, res.IsError, want)
	}
}

func (b *bench) put(name, content string) {
	b.t.Helper()
	p := filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// calls reads the calls of a scripted conversation.
func calls(t *testing.T, name string) (out []struct{ Name, Args string }) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Turns []struct {
			Message struct {
				ToolCalls []struct {
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
			}
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	for _, turn := range file.Turns {
		for _, c := range turn.Message.ToolCalls {
			out = append(out, struct{ Name, Args string }{c.Function.Name, c.Function.Arguments})
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s holds no calls", name)
	}
	return out
}

// TOOL-07, TOOL-08: every tool describes itself with a schema of an object, and
// what a model gets wrong is a result that it can read.
func TestSpecs(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if len(b.tools) != 7 {
		t.Errorf("tools = %v, want 7", b.tools)
	}
	for name, tl := range b.tools {
		spec := tl.Spec()
		var schema struct {
			Type       string
			Properties map[string]struct{ Type, Description string }
			Required   []string
		}
		if err := json.Unmarshal(spec.Parameters, &schema); err != nil || schema.Type != "object" || len(schema.Properties) == 0 || spec.Description == "" {
			t.Errorf("%s: schema %s: %v", name, spec.Parameters, err)
		}
		for p, v := range schema.Properties {
			if v.Type == "" || v.Description == "" {
				t.Errorf("%s.%s has no type or description", name, p)
			}
		}
		for _, r := range schema.Required {
			if _, ok := schema.Properties[r]; !ok {
				t.Errorf("%s requires %s, which it does not have", name, r)
			}
		}
		for _, bad := range []string{`[]`, `null`, `7`, `"x"`, `{"path":`, `not json ` + strings.Repeat("x", 10000), strings.Repeat(`{"path":`, 100), `{"path":{"a":1},"command":[1],"pattern":{}}`} {
			if res := b.raw(name, bad); !res.IsError || len(res.Text) > 600 {
				t.Errorf("%s(%.40s) = %q, error %v; want a short error", name, bad, res.Text, res.IsError)
			}
		}
	}
	if _, ok := newBench(t, func(o *tool.Options) { o.Bash = false }).tools["bash"]; ok {
		t.Error("bash is offered though it is not allowed")
	}
}

// Harmless mistakes in types are understood.
func TestTolerantArgs(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("f", "a\nb\nc\n")
	if got := b.ok("read_file", m{"file_path": "f", "start_line": "2", "end_line": 2.0}); got != "     2\tb\n" {
		t.Errorf("read_file = %q", got)
	}
	b.ok("write_file", m{"path": "j", "content": m{"a": 1}})
	if got, _ := os.ReadFile(filepath.Join(b.dir, "j")); string(got) != `{"a":1}` {
		t.Errorf("content = %q", got)
	}
	b.ok("str_replace", m{"path": "f", "old_string": "b", "new_string": "bb", "replace_all": "true"})
	b.fails("read_file", m{"path": "f", "start_line": "two"}, "want a number")
	b.fails("read_file", m{"path": "f", "start_line": 0}, "want 1 to")
	b.fails("str_replace", m{"path": "f", "old_str": "a", "new_str": "b", "replace_all": "maybe"}, "true or false")
	b.fails("write_file", m{"path": "f"}, "content is missing")
}

// F-082, ISO-01: a link leads nowhere but inside.
func TestLinks(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	_ = os.Remove("/tmp/qa-escape")
	for i, c := range calls(t, "F-082.json") {
		res := b.raw(c.Name, c.Args)
		wantErr := i == 1 || i == 2
		if res.IsError != wantErr {
			t.Errorf("%s(%s) = %q, error %v, want %v", c.Name, c.Args, res.Text, res.IsError, wantErr)
		}
		if wantErr && !strings.Contains(res.Text, "outside of the workspace") {
			t.Errorf("%s(%s) = %q", c.Name, c.Args, res.Text)
		}
	}
	if _, err := os.Lstat("/tmp/qa-escape"); err == nil {
		t.Error("a file was made outside")
	}
	if got := b.ok("read_file", m{"path": "in/ok.txt"}); !strings.Contains(got, "yes") {
		t.Errorf("read_file = %q", got)
	}
	// Further links: absolute to the inside works, everything else does not.
	for link, target := range map[string]string{
		"abs-in": filepath.Join(b.dir, "in"), "abs-out": outside, "up": "../outside", "chain": "up", "loop": "loop", "file-out": outside + "/f",
	} {
		if err := os.Symlink(target, filepath.Join(b.dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(outside, "f"), []byte("hidden"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := b.ok("read_file", m{"path": "abs-in/ok.txt"}); !strings.Contains(got, "yes") {
		t.Errorf("read_file = %q", got)
	}
	for _, p := range []string{"abs-out/f", "up/f", "chain/f", "file-out"} {
		b.fails("read_file", m{"path": p}, "outside of the workspace")
		b.fails("write_file", m{"path": p, "content": "x"}, "outside of the workspace")
		b.fails("str_replace", m{"path": p, "old_str": "hidden", "new_str": "x"}, "outside of the workspace")
	}
	for _, p := range []string{"abs-out", "up", "chain"} {
		b.fails("ls", m{"path": p}, "outside of the workspace")
		b.fails("grep", m{"path": p, "pattern": "hidden"}, "outside of the workspace")
		b.fails("glob", m{"path": p, "pattern": "*"}, "outside of the workspace")
	}
	b.fails("read_file", m{"path": "loop/x"}, "links")
	for _, name := range []string{"grep", "glob"} {
		if got := b.ok(name, m{"pattern": map[string]string{"grep": "hidden", "glob": "**/f"}[name]}); strings.Contains(got, "out/f") || strings.Contains(got, "hidden\n") {
			t.Errorf("%s goes through links: %q", name, got)
		}
	}
	if got, _ := os.ReadFile(filepath.Join(outside, "f")); string(got) != "hidden" {
		t.Errorf("the file outside became %q", got)
	}
}

// F-084, ISO-01: a path that climbs out, or only looks like the workspace.
func TestPaths(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := b.dir + "-other"
	if err := os.MkdirAll(other, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "x"), []byte("hidden"), 0o644); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove("/tmp/qa-dd")
	for _, c := range calls(t, "F-084.json") {
		res := b.raw(c.Name, strings.ReplaceAll(c.Args, "<workspace>", b.dir))
		if !res.IsError || strings.Contains(res.Text, "hidden") {
			t.Errorf("%s(%s) = %q, want an error", c.Name, c.Args, res.Text)
		}
		if strings.Contains(c.Args, "<workspace>") && !strings.Contains(res.Text, "outside of the workspace") {
			t.Errorf("%s(%s) = %q, want the one message", c.Name, c.Args, res.Text)
		}
	}
	for _, p := range []string{"..", "../ws-other/x", "a/../../ws-other/x", "/etc/passwd", "/", b.dir + "/..", b.dir + "x"} {
		for _, name := range []string{"read_file", "ls", "grep", "glob"} {
			b.fails(name, m{"path": p, "pattern": "x"}, "outside of the workspace")
		}
		b.fails("write_file", m{"path": p, "content": "x"}, "outside of the workspace")
	}
	b.fails("glob", m{"pattern": "../*"}, "outside of the workspace")
	b.fails("glob", m{"pattern": "/etc/*"}, "outside of the workspace")
	if _, err := os.Lstat("/tmp/qa-dd"); err == nil {
		t.Error("a file was made outside")
	}
	// Inside, absolute paths and detours work.
	b.ok("write_file", m{"path": b.dir + "/a/b.txt", "content": "hi\n"})
	for _, p := range []string{"a/b.txt", "./a/../a/b.txt", b.dir + "/a/./b.txt"} {
		if got := b.ok("read_file", m{"path": p}); got != "     1\thi\n" {
			t.Errorf("read_file(%s) = %q", p, got)
		}
	}
	if got := b.ok("glob", m{"pattern": b.dir + "/**/*.txt"}); got != "a/b.txt" {
		t.Errorf("glob = %q", got)
	}
}

// ISO-01: a folder that turns into a link at any moment leads nowhere.
func TestSwappedFolder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	if err := os.MkdirAll(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(outside, "f"), []byte("hidden"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.put("d/f", "fine")
	b.put("real/f", "fine")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		d := filepath.Join(b.dir, "d")
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.RemoveAll(d)
			_ = os.Symlink(outside, d)
			_ = os.Remove(d)
			_ = os.Mkdir(d, 0o755)
		}
	})
	for i := range 300 {
		if res := b.call("read_file", m{"path": "d/f"}); strings.Contains(res.Text, "hidden") {
			t.Fatalf("read_file = %q", res.Text)
		}
		b.call("write_file", m{"path": fmt.Sprintf("d/new%d", i), "content": "x"})
		b.call("str_replace", m{"path": "d/f", "old_str": "hidden", "new_str": "changed"})
	}
	close(stop)
	wg.Wait()
	entries, err := os.ReadDir(outside)
	if err != nil || len(entries) != 1 {
		t.Errorf("outside holds %v, %v; want f alone", entries, err)
	}
	if got, _ := os.ReadFile(filepath.Join(outside, "f")); string(got) != "hidden" {
		t.Errorf("the file outside became %q", got)
	}
}

// F-086: following the hints gives the file, without gap or overlap.
func TestReadInParts(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var long strings.Builder
	for i := 1; i <= 3000; i++ {
		fmt.Fprintf(&long, "line %d has a little text, äöü\n", i)
	}
	huge := "first\n" + strings.Repeat("0123456789é", 20_000) + "\nlast"
	hint := regexp.MustCompile(`go on with start_line=(\d+)(?: start_char=(\d+))?\)$`)
	number := regexp.MustCompile(`^ *\d+\t`)
	for name, c := range map[string]struct {
		content  string
		first    int
		charHint bool
	}{"long": {long.String(), 700, false}, "huge": {huge, 1, true}} {
		b.put(name, c.content)
		want := c.content
		for range c.first - 1 {
			_, want, _ = strings.Cut(want, "\n")
		}
		var got strings.Builder
		args, sawChar := m{"path": name, "start_line": c.first}, false
		for part := 0; ; part++ {
			if part > 100 {
				t.Fatalf("%s: the hints do not end", name)
			}
			text := b.ok("read_file", args)
			if n := utf8.RuneCountInString(text); n > 20000 {
				t.Errorf("%s: a part has %d characters", name, n)
			}
			at := hint.FindStringSubmatchIndex(text)
			body := text
			if at != nil {
				body = text[:strings.LastIndex(text, "\n(")+1]
			}
			partial := at != nil && at[4] >= 0
			for l := range strings.Lines(body) {
				got.WriteString(number.ReplaceAllString(l, ""))
			}
			if at == nil {
				break
			}
			args = m{"path": name, "start_line": text[at[2]:at[3]]}
			if partial {
				sawChar = true
				args["start_char"] = text[at[4]:at[5]]
				s := strings.TrimSuffix(got.String(), "\n") // the line goes on
				got.Reset()
				got.WriteString(s)
			}
		}
		if strings.TrimSuffix(got.String(), "\n") != strings.TrimSuffix(want, "\n") {
			t.Errorf("%s: the parts give %d bytes, want %d", name, got.Len(), len(want))
		}
		if sawChar != c.charHint {
			t.Errorf("%s: hint with a character: %v, want %v", name, sawChar, c.charHint)
		}
	}
	b.fails("read_file", m{"path": "long", "start_line": 4000}, "3000 lines")
	b.put("empty", "")
	if got := b.ok("read_file", m{"path": "empty"}); !strings.Contains(got, "empty") {
		t.Errorf("read_file = %q", got)
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("bin", "ab\x00cd")
	if err := syscall.Mkfifo(filepath.Join(b.dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.put("d/f", "x")
	b.fails("read_file", m{"path": "bin"}, "binary file of 5 bytes")
	b.fails("read_file", m{"path": "pipe"}, "no regular file")
	b.fails("write_file", m{"path": "pipe", "content": "x"}, "no regular file")
	b.fails("read_file", m{"path": "d"}, "is a folder; use ls")
	b.fails("write_file", m{"path": "d", "content": "x"}, "is a folder")
	b.fails("read_file", m{"path": "none"}, "does not exist")
	b.fails("write_file", m{"path": "big", "content": strings.Repeat("x", 8<<20+1)}, "want at most")
	big := filepath.Join(b.dir, "large")
	if err := os.WriteFile(big, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(big, 65<<20); err != nil {
		t.Fatal(err)
	}
	b.fails("read_file", m{"path": "large"}, "want at most")
}

func TestWriteAndReplace(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if got := b.ok("write_file", m{"path": "x/y/z.sh", "content": "one two one"}); !strings.HasPrefix(got, "Created") {
		t.Errorf("write_file = %q", got)
	}
	p := filepath.Join(b.dir, "x/y/z.sh")
	if err := os.Chmod(p, 0o755); err != nil {
		t.Fatal(err)
	}
	b.fails("str_replace", m{"path": "x/y/z.sh", "old_str": "one", "new_str": "1"}, "occurs 2 times")
	b.fails("str_replace", m{"path": "x/y/z.sh", "old_str": "three", "new_str": "3"}, "does not occur")
	b.fails("str_replace", m{"path": "x/y/z.sh", "old_str": "", "new_str": "3"}, "missing or empty")
	b.fails("str_replace", m{"path": "x/y/z.sh", "old_str": "one", "new_str": "one"}, "nothing to do")
	b.ok("str_replace", m{"path": "x/y/z.sh", "old_str": "two", "new_str": ""})
	if got := b.ok("str_replace", m{"path": "x/y/z.sh", "old_str": "one", "new_str": "1", "replace_all": true}); !strings.Contains(got, "2 occ") {
		t.Errorf("str_replace = %q", got)
	}
	got, err := os.ReadFile(p)
	if err != nil || string(got) != "1  1" {
		t.Errorf("content = %q, %v", got, err)
	}
	if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode = %v, %v; want it kept", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(p)); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
}

// ISO-01: edits of one file by two tasks of a thread, each with a workspace of
// its own, do not lose each other.
func TestParallelEdits(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ws, err := tool.NewWorkspace(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	other := &bench{t: t, dir: b.dir, ws: ws, tools: map[string]tool.Tool{}}
	for _, tl := range tool.Tools(ws, tool.Options{}) {
		other.tools[tl.Spec().Name] = tl
	}
	const edits = 40
	var content strings.Builder
	for i := range edits {
		fmt.Fprintf(&content, "<%d>", i)
	}
	b.put("list", content.String())
	var wg sync.WaitGroup
	for i := range edits {
		by := []*bench{b, other}[i%2]
		wg.Go(func() {
			by.call("str_replace", m{"path": "list", "old_str": fmt.Sprintf("<%d>", i), "new_str": fmt.Sprintf("[%d]", i)})
		})
	}
	wg.Wait()
	if got := readAll(t, b.dir, "list"); strings.Contains(got, "<") {
		t.Errorf("edits were lost: %q", got)
	}
}

func readAll(t *testing.T, dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSearch(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("a.go", "package a\n\nfunc Find() {}\r\n")
	b.put("sub/b.go", "func find() {}\n")
	b.put("sub/c.txt", "Find me\n"+strings.Repeat("x", 5000)+"Find"+strings.Repeat("y", 5000)+"\n")
	b.put("sub/bin", "Find\x00")
	b.put(".git/x", "Find")
	b.put(".tmp/x", "Find")
	for _, c := range []struct {
		tool string
		args m
		want string
	}{
		{"ls", m{}, ".git/\na.go  27\nsub/"},
		{"ls", m{"path": "sub"}, "b.go  15\nbin  5\nc.txt  10013"},
		{"glob", m{"pattern": "**/*.go"}, "a.go\nsub/b.go"},
		{"glob", m{"pattern": "*.go", "path": "sub"}, "sub/b.go"},
		{"glob", m{"pattern": "*.{rs,c}"}, `No file matches "*.{rs,c}".`},
		{"grep", m{"pattern": "^func Find"}, "a.go:3: func Find() {}"},
		{"grep", m{"pattern": "func find", "ignore_case": true}, "a.go:3: func Find() {}\nsub/b.go:1: func find() {}"},
		{"grep", m{"pattern": "Find", "glob": "*.go"}, "a.go:3: func Find() {}"},
		{"grep", m{"pattern": "Find me", "path": "sub/c.txt"}, "sub/c.txt:1: Find me"},
		{"grep", m{"pattern": "find", "glob": "sub/**/*.go"}, "sub/b.go:1: func find() {}"},
		{"grep", m{"pattern": "absent"}, "No match."},
	} {
		if got := b.ok(c.tool, c.args); got != c.want {
			t.Errorf("%s(%v) = %q, want %q", c.tool, c.args, got, c.want)
		}
	}
	if got := b.ok("grep", m{"pattern": "xFindy"}); len(got) > 400 || !strings.Contains(got, "xFindy") || !strings.Contains(got, "…") {
		t.Errorf("a long line is shown as %q", got)
	}
	b.fails("grep", m{"pattern": "("}, "missing closing")
	b.fails("glob", m{"pattern": "[a"}, "not valid")
	b.fails("ls", m{"path": "none"}, "does not exist")
	b.fails("grep", m{"pattern": "x", "path": "none"}, "does not exist")
	// Bounds.
	b.put("many", strings.Repeat("hit\n", 5000))
	if got := b.ok("grep", m{"pattern": "hit", "max_results": 10}); strings.Count(got, "many:") != 10 || !strings.Contains(got, "first 10 matches") {
		t.Errorf("grep = %q", got)
	}
	for i := range 1200 {
		b.put(fmt.Sprintf("n/%04d", i), "")
	}
	if got := b.ok("ls", m{"path": "n"}); !strings.Contains(got, "(1000 of 1200 entries are shown") {
		t.Errorf("ls ends with %q", got[len(got)-80:])
	}
	if got := b.ok("glob", m{"pattern": "n/*"}); !strings.Contains(got, "(1000 of 1200 files are shown") {
		t.Errorf("glob ends with %q", got[len(got)-80:])
	}
}

// CANCEL-01: a call ends with its context, with its cause, having changed nothing
// afterwards.
func TestCancelledCalls(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("f", "x")
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(stop)
	for name, tl := range b.tools {
		_, err := tl.Call(ctx, tool.Call{Args: json.RawMessage(`{"path":"f","content":"y","old_str":"x","new_str":"y","pattern":"x","command":"echo y >f"}`)})
		if !errors.Is(err, stop) {
			t.Errorf("%s: error = %v, want the cause", name, err)
		}
	}
	if got := readAll(t, b.dir, "f"); got != "x" {
		t.Errorf("f became %q", got)
	}
}

// CANCEL-01, I7: a running command is dead when the call returns, soon.
func TestCancelBash(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	word := fmt.Sprintf("701.%d", os.Getpid())
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	done := make(chan error, 1)
	go func() {
		_, err := b.tools["bash"].Call(ctx, tool.Call{Args: json.RawMessage(fmt.Sprintf(`{"command":"setsid sleep %s & touch started; sleep %s"}`, word, word))})
		done <- err
	}()
	within(t, "the start", func() bool { _, err := os.Stat(filepath.Join(b.dir, "started")); return err == nil })
	start := time.Now()
	cancel(stop)
	select {
	case err := <-done:
		if !errors.Is(err, stop) {
			t.Errorf("error = %v, want the cause", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the call did not return")
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("stopping took %v", took)
	}
	noneAlive(t, "sleep "+word)
}

func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s did not happen in time", what)
		}
	}
}

func noneAlive(t *testing.T, word string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if c, err := os.ReadFile(f); err == nil && strings.Contains(strings.ReplaceAll(string(c), "\x00", " "), word) {
			t.Errorf("%s is alive: %q", f, c)
		}
	}
}

// F-080: nothing that a command leaves running keeps the call or goes on.
func TestGrandchildren(t *testing.T) {
	t.Parallel()
	const limit = time.Second
	for i, c := range calls(t, "F-080.json") {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, func(o *tool.Options) { o.BashTimeout = limit })
			secs := fmt.Sprintf("71%d.%d", i, os.Getpid())
			args := strings.ReplaceAll(c.Args, "sleep 600", "sleep "+secs)
			start := time.Now()
			res := b.raw(c.Name, args)
			if took := time.Since(start); took > limit+3*time.Second {
				t.Errorf("%s took %v", args, took)
			}
			if strings.Contains(args, "echo ok") && !strings.Contains(res.Text, "ok") {
				t.Errorf("%s = %q, want ok in it", args, res.Text)
			}
			inBackground := strings.Contains(args, "& echo ok")
			if strings.Contains(args, "sleep") && res.IsError == inBackground {
				t.Errorf("%s = %q, error %v", args, res.Text, res.IsError)
			}
			if res.IsError && !strings.Contains(res.Text, "time limit of 1s") {
				t.Errorf("%s = %q, want the time limit", args, res.Text)
			}
			noneAlive(t, "sleep "+secs)
		})
	}
}

// F-088: what comes out is text, and what was none can be seen.
func TestBinaryOutput(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, c := range calls(t, "F-088.json") {
		if got := b.raw(c.Name, c.Args).Text; got != "a␀b\uFFFD\uFFFDcx␀y" {
			t.Errorf("bash = %q", got)
		}
	}
	if got := b.ok("bash", m{"command": `printf '\033[31mred\177'`}); got != "␛[31mred␡" {
		t.Errorf("bash = %q", got)
	}
}

func TestBash(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(o *tool.Options) { o.Env = []string{"EXTRA=1"} })
	if got := b.ok("bash", m{"command": "echo out; echo err >&2; pwd"}); got != "out\nerr\n"+b.ws.Dir()+"\n" {
		t.Errorf("bash = %q", got)
	}
	if got := b.ok("bash", m{"command": "true"}); got != "(no output, exit code 0)" {
		t.Errorf("bash = %q", got)
	}
	res := b.call("bash", m{"command": "echo no; exit 3"})
	if !res.IsError || res.Text != "no\n(exit code 3)" || res.Metadata["exit_code"] != 3 {
		t.Errorf("bash = %+v", res)
	}
	res = b.call("bash", m{"command": "sleep 60", "timeout_seconds": "0.3"})
	if !res.IsError || res.Metadata["timed_out"] != true {
		t.Errorf("bash = %+v", res)
	}
	if got := b.ok("bash", m{"command": "echo $EXTRA $TERM $HOME; echo x >$TMPDIR/y && cat $TMPDIR/y"}); got != "1 dumb "+b.ws.Dir()+"\nx\n" {
		t.Errorf("bash = %q", got)
	}
	b.fails("bash", m{"command": strings.Repeat("x", 100_001)}, "want at most")
	b.fails("bash", m{"command": "a\x00b"}, "NUL")
	b.fails("bash", m{}, "command is missing")
	// A long command arrives whole.
	if got := b.ok("bash", m{"command": "x='" + strings.Repeat("é\"", 30_000) + "'; echo ${#x}"}); got != "60000\n" {
		t.Errorf("bash = %q", got)
	}
}

// Output is bounded, in memory too; its beginning and its end are kept.
func TestBashOutputBound(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(o *tool.Options) { o.OutputMaxChars = 2000 })
	for _, n := range []int{400, 800, 200_000} {
		res := b.call("bash", m{"command": fmt.Sprintf("echo start; seq -f 'é%%08g' %d; echo finish", n)})
		if res.IsError || utf8.RuneCountInString(res.Text) > 2000 || !strings.HasPrefix(res.Text, "start\n") || !strings.Contains(res.Text, "\nfinish\n(the full output is in ") || !strings.Contains(res.Text, "left out here") {
			t.Errorf("%d lines: %d characters, error %v: %.40q", n, utf8.RuneCountInString(res.Text), res.IsError, res.Text)
		}
	}
}

// Nothing of ours is in a command's environment.
func TestBashEnvironment(t *testing.T) {
	t.Setenv("OPENAI_API_KEY", "sk-secret")
	b := newBench(t)
	for l := range strings.Lines(b.ok("bash", m{"command": "env"})) {
		switch name, _, _ := strings.Cut(l, "="); name {
		case "PATH", "HOME", "PWD", "OLDPWD", "TMPDIR", "LANG", "TERM", "GIT_TERMINAL_PROMPT", "PAGER", "HERDGATE_CALL", "SHLVL", "_":
		default:
			t.Errorf("the environment holds %s", l)
		}
	}
	// Without the re-executing sandbox's confinement it still does not hold it.
	if ok, _ := sandbox.Available(); ok {
		res := b.call("bash", m{"command": fmt.Sprintf("tr '\\0' '\\n' </proc/%d/environ", os.Getpid())})
		if strings.Contains(res.Text, "sk-secret") {
			t.Error("a command read our environment")
		}
	}
}

// Whatever the arguments are, a tool answers and nothing leaves the workspace.
func FuzzPath(f *testing.F) {
	for _, p := range []string{"a", "../a", "/etc/passwd", "a/../../b", "esc/x", "in/./x", "a\x00b", "", ".", "//", "in/../esc/x"} {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p string) {
		base := t.TempDir()
		dir := filepath.Join(base, "ws")
		ws, err := tool.NewWorkspace(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer ws.Close()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, "in"), 0o755), os.Symlink("..", filepath.Join(dir, "esc"))); err != nil {
			t.Fatal(err)
		}
		args, err := json.Marshal(m{"path": p, "content": "x"})
		if err != nil {
			t.Skip()
		}
		for _, tl := range tool.Tools(ws, tool.Options{}) {
			if tl.Spec().Name != "write_file" {
				continue
			}
			if _, err := tl.Call(t.Context(), tool.Call{Args: args}); err != nil {
				t.Fatal(err)
			}
		}
		entries, err := os.ReadDir(base)
		if err != nil || len(entries) != 1 {
			t.Errorf("path %q: outside holds %v, %v", p, entries, err)
		}
	})
}

func FuzzArgs(f *testing.F) {
	for _, a := range []string{`{}`, `{"path":"f","start_line":1e9}`, `{"path":7}`, `[`, `{"pattern":"("}`, `{"pattern":"**","path":"."}`, `{"path":"f","old_str":"x","new_str":"y"}`} {
		f.Add(a)
	}
	f.Fuzz(func(t *testing.T, args string) {
		ws, err := tool.NewWorkspace(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer ws.Close()
		if err := os.WriteFile(filepath.Join(ws.Dir(), "f"), []byte("x\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, tl := range tool.Tools(ws, tool.Options{}) {
			res, err := tl.Call(t.Context(), tool.Call{Args: json.RawMessage(args)})
			if err != nil {
				t.Fatalf("%s: %v", tl.Spec().Name, err)
			}
			if !utf8.ValidString(res.Text) || strings.ContainsRune(res.Text, 0) {
				t.Errorf("%s: %q", tl.Spec().Name, res.Text)
			}
		}
	})
}
