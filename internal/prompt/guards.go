package prompt

import "fmt"

// What the model, and whoever reads the result, are told when a guard ends the work.
const (
	LoopNotice = "[Stopped: the same tool calls were made again and again, so they were not run any more. This work is not finished.]"
	FreqNotice = "[Stopped: one tool was called too often, so it was not run any more. This work is not finished.]"
	// TokenNotice is also the whole answer of a model that had none.
	TokenNotice   = "[Stopped: the token budget of this work is used up, so no further tool was run. It is not finished.]"
	SafetyFailure = "The model's provider refused the answer for safety reasons."
	SafetyNotice  = "[The model's provider cut this answer for safety reasons, so the tool calls in it were not run.]"
)

// LoopWarning warns of calls that were made several times.
func LoopWarning(times int) string {
	return fmt.Sprintf("[System note] You have made the very same tool calls %d times. Do not make them again: what they give is known. Try another way, or answer now with what you have.", times)
}

// FreqWarning warns of a tool that is called often.
func FreqWarning(tool string, times int) string {
	return fmt.Sprintf("[System note] You have called %s %d times lately. Go on only if each call brings you further; else answer now with what you have.", tool, times)
}

// TokenWarning warns of a budget that comes to its end.
func TokenWarning(percent int) string {
	return fmt.Sprintf("[System note] %d %% of this work's token budget is used. Come to an end: finish what matters most and answer.", percent)
}
