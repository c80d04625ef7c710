package delegation

import (
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
)

// RESULT-07: the verdict goes with a completed result only, and only in its right
// shape.
func TestMetadataHoldsTheVerdict(t *testing.T) {
	t.Parallel()
	good := &contract.ReceiptVerdict{Resolved: []string{"r1"}, CitationResolved: true}
	for _, c := range []struct {
		f    Facts
		want bool
	}{
		{Facts{Status: contract.ToolCompleted, Result: "x", Verdict: good}, true},
		{Facts{Status: contract.ToolCompleted, Result: " ", Verdict: good}, true},
		{Facts{Status: contract.ToolCompleted, Result: "x"}, false},
		{Facts{Status: contract.ToolFailed, Error: "x", Verdict: good}, false},
		{Facts{Status: contract.ToolCompleted, Result: "x", Verdict: &contract.ReceiptVerdict{Resolved: []string{"x"}}}, false},
	} {
		m, err := Metadata(c.f)
		if v := ReadVerdict(m); err != nil || (v != nil) != c.want || v != nil && !v.CitationResolved {
			t.Errorf("%+v: %v, %v", c.f, m, err)
		}
	}
}
