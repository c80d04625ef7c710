package config

import (
	"fmt"
	"slices"
	"strings"
)

// suggest returns `; did you mean "x"?` for the candidate nearest to name, or ""
// when none is near.
func suggest(name string, candidates []string) string {
	slices.Sort(candidates) // so that a tie has one answer
	best, dist := "", 1+max(1, len(name)/3)
	for _, c := range candidates {
		if d := distance(name, c, dist); d < dist {
			best, dist = c, d
		}
	}
	if best == "" && len(name) > 2 {
		// The beginning of a longer word, or a word with too much at its end.
		for _, c := range candidates {
			if strings.HasPrefix(c, name) || len(c) > 2 && strings.HasPrefix(name, c) {
				best = c
				break
			}
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", best)
}

// distance is the number of inserted, removed, changed or swapped bytes between
// a and b, or limit when it is not below that.
func distance(a, b string, limit int) int {
	if abs(len(a)-len(b)) >= limit || len(a) > 200 {
		return limit
	}
	before, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, prev, row = prev, row, before
	}
	return prev[len(b)]
}

func abs(n int) int { return max(n, -n) }
