package guard

import "github.com/herdgate/herdgate/internal/prompt"

// What the model, and whoever reads the result, are told.
const (
	loopNotice    = prompt.LoopNotice
	freqNotice    = prompt.FreqNotice
	tokenNotice   = prompt.TokenNotice
	safetyFailure = prompt.SafetyFailure
	safetyNotice  = prompt.SafetyNotice
)

func loopWarning(times int) string { return prompt.LoopWarning(times) }

func freqWarning(tool string, times int) string { return prompt.FreqWarning(tool, times) }

func tokenWarning(percent int) string { return prompt.TokenWarning(percent) }
