package outcome

// With returns e with the usage, model and receipts of used where e has none of
// its own: what was spent and done stays told, however the work ended (CANCEL-03,
// RECEIPT-14).
func (e End) With(used End) End {
	if e.Usage == nil {
		e.Usage = used.Usage
	}
	if e.ModelName == "" {
		e.ModelName = used.ModelName
	}
	if e.Receipts == nil {
		e.Receipts = used.Receipts
	}
	return e
}
