package doctor

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/invariant"
)

// What is under way at one look and gone at the next is no violation; what stays
// is one, whatever comes beside it. Without a suspect one look is enough.
func TestJudgeLooksAgain(t *testing.T) {
	t.Parallel()
	v := func(subject string, seq uint64, text string) invariant.Violation {
		return invariant.Violation{Rule: invariant.OneEnd, Subject: subject, Text: text, Proof: []invariant.Evidence{{Source: invariant.FromEvents, Seq: seq}}}
	}
	cases := []struct {
		name  string
		looks [][]invariant.Violation
		read  int
		found string
	}{
		{"nothing", [][]invariant.Violation{nil}, 1, ""},
		{"gone at the second look", [][]invariant.Violation{{v("a", 1, "")}, nil}, 2, ""},
		{"others each time", [][]invariant.Violation{{v("a", 1, "")}, {v("b", 2, "")}}, 2, ""},
		{"the same task for another reason", [][]invariant.Violation{{v("a", 1, "")}, {v("a", 2, "")}}, 2, ""},
		{"it stays", [][]invariant.Violation{{v("a", 1, "for 1 s")}, {v("b", 2, ""), v("a", 1, "for 2 s")}, {v("a", 1, "for 3 s"), v("b", 2, "")}}, 3, "a"},
	}
	for _, c := range cases {
		n := 0
		h, err := judge(t.Context(), Past{Looks: 3, Pause: time.Millisecond}, func(context.Context) (*History, error) {
			n++
			return &History{Violations: append([]invariant.Violation(nil), c.looks[n-1]...)}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		found := ""
		for _, v := range h.Violations {
			found += v.Subject
		}
		if found != c.found || n != c.read {
			t.Errorf("%s: found %q in %d looks, want %q in %d", c.name, found, n, c.found, c.read)
		}
	}
	broken := errors.New("broken")
	if _, err := judge(t.Context(), Past{Looks: 3}, func(context.Context) (*History, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
}
