package contract

import (
	"errors"
	"fmt"
	"strings"
)

// MaxVerdictEntries bounds each list of a verdict. What is above it shows in the
// flags alone.
const MaxVerdictEntries = 100

// ReceiptVerdict is what a comparison of a report's citations with the receipts
// gave. It is advice about evidence: whether the cited calls happened, never
// whether what the report says of them is right.
type ReceiptVerdict struct {
	// Resolved, Failed and Unknown hold one entry for each different citation.
	Resolved []string         `json:"resolved"`
	Failed   []FailedCitation `json:"failed"`
	Unknown  []string         `json:"unknown"`
	// CitationResolved: all citations are resolved; without any, that the report
	// does not seem to tell of actions.
	CitationResolved bool `json:"citation_resolved"`
	// NoCitationClaims: the report seems to tell of actions and cites nothing.
	NoCitationClaims bool `json:"no_citation_claims"`
}

// FailedCitation is a citation of a receipt that does not carry it.
type FailedCitation struct {
	ID     string `json:"id"`
	Reason string `json:"reason"` // [CitationStatus] or [CitationAnchor]
}

// The reasons for which a citation fails.
const (
	// CitationStatus: the call was not a success.
	CitationStatus = "status"
	// CitationAnchor: the call was one of another tool.
	CitationAnchor = "anchor"
)

// Validate reports what is wrong with the shape of a verdict. Readers use none
// that is not valid.
func (v ReceiptVerdict) Validate() error {
	var errs []error
	ids := append(append([]string(nil), v.Resolved...), v.Unknown...)
	for _, f := range v.Failed {
		ids = append(ids, f.ID)
		if f.Reason != CitationStatus && f.Reason != CitationAnchor {
			errs = append(errs, fmt.Errorf("failed: reason %.40q; want %q or %q", f.Reason, CitationStatus, CitationAnchor))
		}
	}
	for _, id := range ids {
		digits := strings.TrimPrefix(id, "r")
		if digits == id || digits == "" || len(digits) > 10 || strings.Trim(digits, "0123456789") != "" {
			errs = append(errs, fmt.Errorf("id %.40q; want r and at most 10 digits", id))
			break
		}
	}
	if n := max(len(v.Resolved), len(v.Failed), len(v.Unknown)); n > MaxVerdictEntries {
		errs = append(errs, fmt.Errorf("a list has %d entries; want at most %d", n, MaxVerdictEntries))
	}
	if v.CitationResolved && (v.NoCitationClaims || len(v.Failed)+len(v.Unknown) > 0) {
		errs = append(errs, errors.New("citation_resolved is true beside what is not resolved"))
	}
	if v.NoCitationClaims && len(ids) > 0 {
		errs = append(errs, errors.New("no_citation_claims is true beside citations"))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: receipt verdict: %w", ErrInvalidMessage, err)
	}
	return nil
}
