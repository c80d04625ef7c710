package guard

import (
	"context"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Safety keeps the calls of an answer from running that the provider's safety
// system has cut: they may be half of what was meant. It hears an answer first, so
// that the other guards see what is left (GUARD-20). Its reason is one of leads
// only (GUARD-21).
type Safety struct{ reason }

// Piece implements Guard.
func (s *Safety) Piece() agent.Piece {
	return agent.Piece{Name: "safety_guard", AfterModel: func(_ context.Context, m model.Message) model.Message {
		s.stop = Stop{} // an earlier answer is not what ends the work
		if m.Role != model.RoleAssistant || !m.CutForSafety() {
			return m
		}
		s.stop = Stop{Reason: contract.StopSafetyCapped, NoText: blank(m.Text)}
		if s.stop.NoText && !m.ErrorFallback {
			// Nothing was answered at all: for whoever asked that is a failure of the
			// provider's, and told as one (STATUS-05).
			m.ErrorFallback, m.ErrorDetail = true, "the answer ended with "+m.FinishReason
			return strip(m, safetyFailure)
		}
		if len(m.ToolCalls) > 0 {
			m = strip(m, safetyNotice)
		}
		return m
	}}
}

// Replay implements Guard.
func (*Safety) Replay([]model.Message, *contract.Usage) {}
