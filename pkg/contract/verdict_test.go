package contract

import (
	"errors"
	"slices"
	"testing"
)

// RECEIPT-12: readers check the shape of a verdict.
func TestReceiptVerdictValidate(t *testing.T) {
	t.Parallel()
	for _, v := range []ReceiptVerdict{
		{}, {CitationResolved: true}, {NoCitationClaims: true}, {Resolved: []string{"r1", "r1234567890"}, CitationResolved: true},
		{Failed: []FailedCitation{{"r1", CitationStatus}, {"r1", CitationAnchor}}, Unknown: []string{"r9"}},
		{Resolved: slices.Repeat([]string{"r1"}, MaxVerdictEntries)},
	} {
		if err := v.Validate(); err != nil {
			t.Errorf("%+v: %v", v, err)
		}
	}
	for _, v := range []ReceiptVerdict{
		{CitationResolved: true, NoCitationClaims: true}, {CitationResolved: true, Unknown: []string{"r1"}}, {CitationResolved: true, Failed: []FailedCitation{{"r1", CitationStatus}}},
		{NoCitationClaims: true, Resolved: []string{"r1"}}, {Resolved: []string{""}}, {Resolved: []string{"1"}}, {Unknown: []string{"r"}}, {Unknown: []string{"r12345678901"}}, {Unknown: []string{"r1x"}},
		{Failed: []FailedCitation{{"r1", "mood"}}}, {Failed: []FailedCitation{{"x", CitationStatus}}}, {Resolved: slices.Repeat([]string{"r1"}, MaxVerdictEntries+1)},
	} {
		if err := v.Validate(); !errors.Is(err, ErrInvalidMessage) {
			t.Errorf("%+v: %v", v, err)
		}
	}
}
