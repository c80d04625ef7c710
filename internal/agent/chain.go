package agent

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Piece is one part of what stands around a loop's model and tools. Each part that
// it has is optional. Pieces hold the state of one conversation and are made anew
// for each (EXEC-09).
type Piece struct {
	// Name is one of [Order].
	Name string
	// Model and Tool wrap calls.
	Model ModelMiddleware
	Tool  ToolMiddleware
	// BeforeModel may shorten the stored conversation before the model is asked. The
	// outermost piece comes first.
	BeforeModel Before
	// Spent is told what the pieces' own work costs, such as a summary, before the
	// next answer.
	Spent func(*contract.Usage)
	// AfterModel changes an answer before it is recorded.
	AfterModel Hook
	// AfterTool changes a result before it is recorded, whether its tool was run or
	// the call was refused, and after everything that wraps tools.
	AfterTool ResultHook
}

// Order is the order of all pieces, the outermost first (EXEC-10). Hooks after the
// model and tools run in the reverse order: the innermost piece hears an answer first.
var Order = []string{
	"receipts", // around tools, outside of everything
	"input_sanitising", "tool_output_budget", "remote_result_sanitising", "thread_data", "sandbox",
	"dangling_calls", "provider_errors", "authorisation", "guardrail", "shell_audit", "read_before_write",
	"tool_progress", "tool_errors", "skill_activation", "skill_policy", "images", "routing_promotion",
	"deferred_filter", "loop_guard", "token_guard", "extensions", "safety_guard", "durable_context",
	"summarisation", "date_context", "system_coalescing",
}

// Chain puts pieces into their order. A name that is not in [Order], or is there
// twice, is a fault of the program.
func Chain(pieces ...Piece) ([]Piece, error) {
	seen := map[string]bool{}
	for _, p := range pieces {
		if !slices.Contains(Order, p.Name) {
			return nil, fmt.Errorf("agent: %q is no piece of the chain", p.Name)
		}
		if seen[p.Name] {
			return nil, fmt.Errorf("agent: %q is twice in the chain", p.Name)
		}
		seen[p.Name] = true
	}
	return slices.SortedFunc(slices.Values(pieces), func(a, b Piece) int {
		return cmp.Compare(slices.Index(Order, a.Name), slices.Index(Order, b.Name))
	}), nil
}
