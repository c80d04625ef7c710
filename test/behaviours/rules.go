package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Chapters are the chapters of the rulebook, in its order.
var Chapters = []string{
	"ARCH", "REG", "ROUTE", "CONFIG", "CAP", "ADM", "EXEC", "CTX", "ISO", "TOOL", "SKILL", "PROMPT", "DATE", "DEFER",
	"GUARD", "COMPACT", "STATUS", "RESULT", "STEP", "EVT", "USAGE", "RECEIPT", "REPORT", "LEDGER", "CANCEL", "BATCH", "CARD",
}

// Rule is one line of the rulebook.
type Rule struct {
	Number string // ADM-05
	Text   string
}

// Chapter is the part of the number before the hyphen.
func (r Rule) Chapter() string {
	chapter, _, _ := strings.Cut(r.Number, "-")
	return chapter
}

var ruleLine = regexp.MustCompile(`^- \*\*([A-Z]+-\d\d)\*\* (\S.*)$`)

// readRulebook returns the rules in the order of the file.
func readRulebook(file string) ([]Rule, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var rules []Rule
	for n, line := range strings.Split(string(data), "\n") {
		if !strings.HasPrefix(line, "- **") {
			continue
		}
		m := ruleLine.FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("%s:%d: want `- **CHAPTER-NN** text`, got %q", file, n+1, line)
		}
		rules = append(rules, Rule{Number: m[1], Text: m[2]})
	}
	return rules, nil
}

var (
	chapterPattern = strings.Join(Chapters, "|")
	// A number, then further numbers or ranges of the same chapter.
	mention = regexp.MustCompile(`\b(` + chapterPattern + `)-\d\d(?:\s*(?:,|and|to|\.\.|…|–)\s*(?:(?:` + chapterPattern + `)-)?\d\d\b)*`)
	part    = regexp.MustCompile(`(,|and|to|\.\.|…|–)?\s*(?:(` + chapterPattern + `)-)?(\d\d)\b`)
)

// numbers returns the rule numbers that text names, lists and ranges written out.
func numbers(text string) []string {
	var found []string
	for _, m := range mention.FindAllString(text, -1) {
		chapter, last := "", 0
		for _, p := range part.FindAllStringSubmatch(m, -1) {
			n, err := strconv.Atoi(p[3])
			if err != nil {
				continue
			}
			from := n
			if p[1] != "" && p[1] != "," && p[1] != "and" && (p[2] == "" || p[2] == chapter) {
				from = last + 1
			}
			if p[2] != "" {
				chapter = p[2]
			}
			for i := from; i <= n; i++ {
				found = append(found, fmt.Sprintf("%s-%02d", chapter, i))
			}
			last = n
		}
	}
	return found
}

// scan returns for each rule the tests below dir that name it, as
// folder.TestName, sorted.
func scan(dir string) (map[string][]string, error) {
	tests := map[string][]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != dir && (name == "testdata" || strings.HasPrefix(name, "_") || strings.HasPrefix(name, ".")) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		// What speaks about numbers here are examples, no tests of rules.
		if strings.HasPrefix(filepath.ToSlash(rel), "test/behaviours/") {
			return nil
		}
		return scanFile(path, filepath.ToSlash(rel), tests)
	})
	for number := range tests {
		slices.Sort(tests[number])
		tests[number] = slices.Compact(tests[number])
	}
	return tests, err
}

func scanFile(path, rel string, tests map[string][]string) error {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	folder := filepath.ToSlash(filepath.Dir(rel))
	// at names the test that pos stands in, or the file.
	at := func(pos token.Pos) string {
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !isTest(f.Name.Name) {
				continue
			}
			from := f.Pos()
			if f.Doc != nil {
				from = f.Doc.Pos()
			}
			if from <= pos && pos < f.End() {
				return folder + "." + f.Name.Name
			}
		}
		return rel
	}
	add := func(pos token.Pos, text string) {
		for _, number := range numbers(text) {
			tests[number] = append(tests[number], at(pos))
		}
	}
	for _, group := range file.Comments {
		add(group.Pos(), group.Text())
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			add(lit.Pos(), lit.Value)
		}
		return true
	})
	return nil
}

func isTest(name string) bool {
	for _, prefix := range []string{"Test", "Fuzz", "Benchmark", "Example"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

func sorted(tests map[string][]string) []string {
	var keys []string
	for k := range tests {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
