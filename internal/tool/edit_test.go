package tool_test

import (
	"fmt"
	"strings"
	"testing"
)

// TOOL-07: an edit that does not fit tells what comes nearest, so that the next
// one does.
func TestReplaceTellsWhatIsNear(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("f.go", "package f\n\nfunc Alpha(a int) int {\n\tif a > 1 {\n\t\treturn a\n\t}\n\treturn 0\n}\n\nfunc Beta() {\n\treturn 0\n}\n")
	for old, want := range map[string]string{
		"func Alpha(a int) int {\n    if a > 1 {\n":                   `lines 3 to 4 differ from it in white space only: line 4 is "\tif a > 1 {", where old_str has "    if a > 1 {"`,
		"func Alpha(a int) int {\n\tif a > 2 {\n":                     `it begins like line 3, but line 4 is "\tif a > 1 {", where old_str has "\tif a > 2 {"`,
		"func Beta() {\n\treturn 0\n}\n\nfunc Gamma() {":              "it begins like line 10, but the file ends after line 1",
		"func Alpa(a int) int {":                                      `the nearest is line 3, "func Alpha(a int) int {"`,
		"     3\tfunc Alpha(a int) int {":                             "leave out the line numbers",
		"something else entirely":                                     "read the file and copy",
		strings.Repeat("\n", 5):                                       "read the file and copy",
		"func Beta() {\n\treturn 0\n}\n" + strings.Repeat("x\n", 100): "it begins like line 10, but",
	} {
		b.fails("str_replace", m{"path": "f.go", "old_str": old, "new_str": "x"}, want)
	}
	b.fails("str_replace", m{"path": "f.go", "old_str": "return 0", "new_str": "return 1"}, "occurs 2 times in \"f.go\", at lines 7, 11;")
	b.put("many", strings.Repeat("x\n", 30))
	b.fails("str_replace", m{"path": "many", "old_str": "x", "new_str": "y"}, "at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and more;")
	if got := readAll(t, b.dir, "f.go"); strings.Contains(got, "x\n") {
		t.Errorf("a refused edit changed the file: %q", got)
	}
	// Large texts are compared within bounds.
	b.put("large", strings.Repeat(strings.Repeat("word ", 60)+"\n", 20_000))
	b.fails("str_replace", m{"path": "large", "old_str": strings.Repeat("werd ", 60), "new_str": "y"}, "does not occur")
}

// An edit keeps a file's line ends, and all bytes that it does not touch.
func TestReplaceKeepsBytes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ content, old, repl, want string }{
		{"a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", "x\r\ny\r\nz\r\nc\r\n"},
		{"a\r\nb\r\n", "b", "b\nbb", "a\r\nb\r\nbb\r\n"},
		{"a\r\nb\r\n", "a\r\nb", "c\r\nd", "c\r\nd\r\n"},
		{"a\nb\n", "a\r\nb", "c\r\nd", "c\nd\n"},
		{"a\r\nb\nc\r\n", "a\r\nb", "x", "x\nc\r\n"}, // mixed: as it stands
		{"\xff\xfea \x80b\n", "a ", "c", "\xff\xfec\x80b\n"},
		{"\xEF\xBB\xBFone\n", "one", "two", "\xEF\xBB\xBFtwo\n"},
	} {
		b := newBench(t)
		b.put("f", c.content)
		b.ok("str_replace", m{"path": "f", "old_str": c.old, "new_str": c.repl})
		if got := readAll(t, b.dir, "f"); got != c.want {
			t.Errorf("%q: %q in place of %q gives %q, want %q", c.content, c.repl, c.old, got, c.want)
		}
	}
	b := newBench(t)
	b.put("crlf", "a\r\nb\r\n")
	b.fails("str_replace", m{"path": "crlf", "old_str": "a\r\n", "new_str": "a\n"}, "line ends only")
	b.put("latin", "caf\xe9 au lait\n")
	b.fails("str_replace", m{"path": "latin", "old_str": "caf\uFFFD au", "new_str": "x"}, "no UTF-8")
}

// What read_file shows can be given to str_replace as it is, and the ways of
// other tools to name lines are understood.
func TestReadForms(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("crlf", "\xEF\xBB\xBFone\r\ntwo\r\nthree")
	if got := b.ok("read_file", m{"path": "crlf"}); got != "     1\tone\n     2\ttwo\n     3\tthree\n" {
		t.Errorf("read_file = %q", got)
	}
	b.put("latin", "caf\xe9\n")
	if got := b.ok("read_file", m{"path": "latin"}); got != "     1\tcaf\uFFFD\n" {
		t.Errorf("read_file = %q", got)
	}
	var lines strings.Builder
	for i := range 9 {
		fmt.Fprintf(&lines, "%d\n", i+1)
	}
	b.put("n", lines.String())
	for want, args := range map[string]m{
		"345": {"offset": 3, "limit": 3}, "34": {"view_range": []int{3, 4}}, "89": {"view_range": []int{8, -1}},
		"12": {"limit": 2}, "567": {"start_line": 5, "limit": 3}, "9": {"offset": 9}, "1": {"offset": 0, "limit": 1},
	} {
		args["path"] = "n"
		got := ""
		for l := range strings.Lines(b.ok("read_file", args)) {
			got += strings.TrimSpace(l[strings.IndexByte(l, '\t'):])
		}
		if got != want {
			t.Errorf("read_file(%v) shows lines %s, want %s", args, got, want)
		}
	}
	b.fails("read_file", m{"path": "n", "view_range": []int{5, 2}}, "before start_line")
	b.fails("read_file", m{"path": "n", "view_range": "all"}, "want [first line, last line]")
}

// Searches leave out what .gitignore files name, say so when they find nothing,
// and look there when asked to.
func TestSearchIgnores(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put(".gitignore", "# built\n/build\n*.log\r\n!keep.log\nnode_modules/\ndoc/**/*.tmp\nodd{1}\n[bad\ntrail   \n")
	for _, f := range []string{
		"a.go", "build/a.go", "sub/build/a.go", "x.log", "keep.log", "node_modules/p/i.js", "sub/node_modules/i.js", "file/node_modules",
		"doc/x.tmp", "doc/a/b/x.tmp", "sub/doc/x.tmp", "odd{1}", "odd1", "trail", "sub/inner/y.txt", "sub/inner/z.txt", "other/y.txt", "gen/one", "gen/two",
	} {
		b.put(f, "needle\n")
	}
	b.put("sub/inner/.gitignore", "y.txt\n!x.log\n")
	b.put("sub/inner/x.log", "needle\n")
	b.put("gen/.gitignore", "*\n!two\n")
	want := "a.go\nfile/node_modules\ngen/two\nkeep.log\nodd1\nother/y.txt\nsub/build/a.go\nsub/doc/x.tmp\nsub/inner/x.log\nsub/inner/z.txt"
	got := b.ok("glob", m{"pattern": "**/[!.]*"})
	if got != want {
		t.Errorf("glob = %q, want %q", got, want)
	}
	if got = b.ok("grep", m{"pattern": "needle"}); got != strings.ReplaceAll(want, "\n", ":1: needle\n")+":1: needle" {
		t.Errorf("grep = %q", got)
	}
	// Rules from above hold further down; a place that is named is searched.
	if got = b.ok("glob", m{"pattern": "*", "path": "sub/inner"}); got != "sub/inner/.gitignore\nsub/inner/x.log\nsub/inner/z.txt" {
		t.Errorf("glob = %q", got)
	}
	if got = b.ok("grep", m{"pattern": "needle", "path": "build"}); got != "build/a.go:1: needle" {
		t.Errorf("grep = %q", got)
	}
	if got = b.ok("grep", m{"pattern": "needle", "path": "x.log"}); got != "x.log:1: needle" {
		t.Errorf("grep = %q", got)
	}
	if got = b.ok("glob", m{"pattern": "**/i.js"}); !strings.Contains(got, "No file matches") || !strings.Contains(got, "include_ignored") {
		t.Errorf("glob = %q", got)
	}
	if got = b.ok("grep", m{"pattern": "needle", "glob": "*.js", "include_ignored": true}); got != "node_modules/p/i.js:1: needle\nsub/node_modules/i.js:1: needle" {
		t.Errorf("grep = %q", got)
	}
}

// What grep could not search is told, not passed over.
func TestGrepTellsWhatItLeftOut(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.put("line", strings.Repeat("x", 1<<20)+"\nneedle\n")
	b.put("size", strings.Repeat(strings.Repeat("y", 1023)+"\n", 16<<10)+"needle\n")
	b.put("latin", "\xe9t\xe9 needle\n")
	if got := b.ok("grep", m{"pattern": "needle"}); got != "latin:1: \uFFFDt\uFFFD needle\n(2 files were not searched to their end: larger than 16 MiB, or with a line above 1 MiB)" {
		t.Errorf("grep = %q", got)
	}
}
