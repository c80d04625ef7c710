package outcome

// With returns e with the usage and model of used where e has none of its own:
// what was spent stays told, however the work ended (CANCEL-03).
func (e End) With(used End) End {
	if e.Usage == nil {
		e.Usage = used.Usage
	}
	if e.ModelName == "" {
		e.ModelName = used.ModelName
	}
	return e
}
