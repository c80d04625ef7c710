package receipt

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/herdgate/herdgate/pkg/contract"
)

// The format of citations has its one home here: the example in the prompt, the
// ids in the ledger and the parser of reports are made from these (RECEIPT-04).
const (
	prefix = "r"
	// maxDigits is how long a cited number may be (RECEIPT-05).
	maxDigits = 10
	// word is what names consist of, in any script.
	word      = `\p{L}\p{Nd}_`
	labelRule = `[A-Za-z_][` + word + `.\-]*`
)

var (
	citationRule = regexp.MustCompile(`\[` + prefix + `([0-9]+)(?:[\s\x0b\x{85}\p{Z}]+(` + labelRule + `))?\]`)
	wholeLabel   = regexp.MustCompile(`^` + labelRule + `$`)
)

func id(n int) string { return prefix + strconv.Itoa(n) }

// number is the number in an id that is written as [id] writes it, or 0.
func number(s string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(s, prefix))
	if err != nil || n < 1 || s != id(n) {
		return 0
	}
	return n
}

// Cite writes the citation of a receipt.
func Cite(id, toolName string) string {
	if !wholeLabel.MatchString(toolName) {
		return "[" + id + "]"
	}
	return "[" + id + " " + toolName + "]"
}

// Example tells a model how to cite.
func Example() string {
	return fmt.Sprintf("%s or %s", Cite(id(1), ""), Cite(id(1), "write_file"))
}

// Citation is a mention of a receipt in a report.
type Citation struct {
	ID string
	// Anchor is the name of the tool that the report gives, or "".
	Anchor string
}

// Parse returns the citations of a report in their order, the same one once.
func Parse(report string) []Citation {
	var out []Citation
	seen := map[Citation]bool{}
	for _, m := range citationRule.FindAllStringSubmatch(report, -1) {
		if len(m[1]) > maxDigits {
			continue
		}
		number := strings.TrimLeft(m[1], "0")
		if number == "" {
			number = "0"
		}
		c := Citation{ID: prefix + number, Anchor: m[2]}
		if !seen[c] {
			seen[c] = true
			out = append(out, c)
		}
	}
	return out
}

// Judge compares the citations of a report with the receipts that its author
// was shown (RECEIPT-06, RECEIPT-07). Each list of the verdict holds at most
// [contract.MaxVerdictEntries]; the flags are about all citations.
func Judge(report string, shown []contract.Receipt) contract.ReceiptVerdict {
	v := contract.ReceiptVerdict{Resolved: []string{}, Failed: []contract.FailedCitation{}, Unknown: []string{}}
	known := make(map[string]contract.Receipt, len(shown))
	for _, r := range shown {
		known[r.ID] = r
	}
	cited := Parse(report)
	if len(cited) == 0 {
		v.NoCitationClaims = claims(report, len(shown) > 0)
		v.CitationResolved = !v.NoCitationClaims
		return v
	}
	v.CitationResolved = true
	for _, c := range cited {
		r, ok := known[c.ID]
		switch {
		case !ok:
			v.CitationResolved = false
			v.Unknown = bounded(v.Unknown, c.ID)
		case r.Status != success:
			v.CitationResolved = false
			v.Failed = bounded(v.Failed, contract.FailedCitation{ID: c.ID, Reason: contract.CitationStatus})
		case c.Anchor != "" && c.Anchor != r.ToolName:
			v.CitationResolved = false
			v.Failed = bounded(v.Failed, contract.FailedCitation{ID: c.ID, Reason: contract.CitationAnchor})
		default:
			v.Resolved = bounded(v.Resolved, c.ID)
		}
	}
	return v
}

func bounded[T any](list []T, v T) []T {
	if len(list) >= contract.MaxVerdictEntries {
		return list
	}
	return append(list, v)
}

// Limitation is what the counts of a verdict do not say.
const Limitation = "whether calls happened, not whether claims are right"

// Counts tells a verdict in a few words, which accept and refuse nothing
// (RECEIPT-12). They go with [Limitation].
func Counts(v contract.ReceiptVerdict) string {
	switch {
	case v.NoCitationClaims:
		return "UNVERIFIED: tells of actions, cites none"
	case len(v.Resolved)+len(v.Failed)+len(v.Unknown) == 0:
		return "none"
	}
	return fmt.Sprintf("%d resolved, %d failed, %d unknown", len(v.Resolved), len(v.Failed), len(v.Unknown))
}

func summary(v contract.ReceiptVerdict) string {
	return fmt.Sprintf("citations of its report: %s (%s)", Counts(v), Limitation)
}
