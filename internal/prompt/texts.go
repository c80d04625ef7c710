package prompt

const (
	// Nudge asks again for an answer that was empty.
	Nudge = "Your last reply was empty. Answer now, or call a tool."
	// LostResult stands for the result of a call that was interrupted.
	LostResult = "No result: the call was interrupted, and it is not known whether it had an effect. Check before you repeat it."
	// CutCall answers a call whose arguments may be half of what was meant.
	CutCall = "This call was not run: your reply was cut at the token limit while you were writing it. Send it again, shorter, or split it."
	// ToolHint follows the error of a tool that broke.
	ToolHint = "Go on with what you have, or try another way."
	// CutAnswer follows a report that the model could not finish.
	CutAnswer = "[The model reached its limit of output tokens here: this report is not complete.]"
	// NothingLeft asks a lead for its answer that still tries to delegate.
	NothingLeft = "Nothing is left of this run's delegations. Answer now, from the results that you have; say what is missing."
	// LimitNotice is appended to an answer whose delegations were dropped because the
	// run has none left.
	LimitNotice = "[Delegation limit reached] This run has used all of its delegations, so the task calls above were dropped. " +
		"Go on with the results you have: do small remaining work yourself, or say what is left."

	dateHead = "Current date: "
)
