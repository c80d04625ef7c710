// Command behaviours compares the rulebook, docs/behaviours.md, with the tests:
// it lists for every rule the tests that name it, and the rules that no test
// names. A test names a rule by its number in a comment or a string, alone
// (ADM-05), in a list (ADM-05, 07) or as a range (ADM-02 to 09).
//
//	go run ./test/behaviours            everything
//	go run ./test/behaviours -missing   only the rules without a test
//	go run ./test/behaviours ADM CAP    only these chapters
//
// It exits 1 when a test names a rule that the rulebook does not have.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	missing := flag.Bool("missing", false, "list only the rules that no test names")
	dir := flag.String("dir", ".", "top folder of the checkout")
	flag.Parse()
	unknown, err := report(os.Stdout, *dir, *missing, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "behaviours:", err)
		os.Exit(2)
	}
	if unknown {
		os.Exit(1)
	}
}

// report writes the comparison and tells whether a test names an unknown rule.
func report(w io.Writer, dir string, missingOnly bool, chapters []string) (unknown bool, err error) {
	rules, err := readRulebook(filepath.Join(dir, "docs", "behaviours.md"))
	if err != nil {
		return false, err
	}
	tests, err := scan(dir)
	if err != nil {
		return false, err
	}
	wanted := func(r Rule) bool {
		return len(chapters) == 0 || slices.Contains(chapters, r.Chapter())
	}
	total, covered := 0, 0
	for _, r := range rules {
		if !wanted(r) {
			continue
		}
		total++
		names := tests[r.Number]
		if len(names) > 0 {
			covered++
		}
		switch {
		case len(names) > 0 && missingOnly:
		case len(names) > 0:
			fmt.Fprintf(w, "%-11s %s\n", r.Number, strings.Join(names, "\n            "))
		default:
			fmt.Fprintf(w, "%-11s -- no test: %s\n", r.Number, r.Text)
		}
	}
	fmt.Fprintf(w, "\n%d of %d rules are named by a test.\n", covered, total)

	for _, number := range sorted(tests) {
		if !slices.ContainsFunc(rules, func(r Rule) bool { return r.Number == number }) {
			unknown = true
			fmt.Fprintf(w, "%s is not in docs/behaviours.md but named by %s\n", number, strings.Join(tests[number], ", "))
		}
	}
	return unknown, nil
}
