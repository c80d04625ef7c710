package agent

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
)

// EXEC-10: the order of the chain is the rule's, however it was put together.
func TestChainOrder(t *testing.T) {
	t.Parallel()
	want := strings.Fields(`receipts input_sanitising tool_output_budget remote_result_sanitising thread_data sandbox
		dangling_calls provider_errors authorisation guardrail shell_audit read_before_write tool_progress tool_errors
		skill_activation skill_policy images routing_promotion deferred_filter loop_guard token_guard extensions
		safety_guard durable_context summarisation date_context system_coalescing`)
	if !slices.Equal(Order, want) {
		t.Errorf("order = %v", Order)
	}
	chain, err := Chain(Piece{Name: "date_context"}, Piece{Name: "receipts"}, Piece{Name: "loop_guard"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range chain {
		names = append(names, p.Name)
	}
	if !slices.Equal(names, []string{"receipts", "loop_guard", "date_context"}) {
		t.Errorf("chain = %v", names)
	}
	if _, err := Chain(Piece{Name: "nothing"}); err == nil {
		t.Error("a piece without a place was taken")
	}
	if _, err := Chain(Piece{Name: "receipts"}, Piece{Name: "receipts"}); err == nil {
		t.Error("a piece was taken twice")
	}
}

// EXEC-10: calls go through the pieces from the outermost one, hooks from the
// innermost.
func TestChainDirection(t *testing.T) {
	t.Parallel()
	var told []string
	piece := func(name string) Piece {
		return Piece{
			Name: name,
			Model: func(next Generate) Generate {
				return func(ctx context.Context, req model.Request, d func(model.Delta)) (model.Response, error) {
					told = append(told, "model "+name)
					return next(ctx, req, d)
				}
			},
			Tool: func(next Invoke) Invoke {
				return func(ctx context.Context, tl tool.Tool, c tool.Call) (tool.Result, error) {
					told = append(told, "tool "+name)
					return next(ctx, tl, c)
				}
			},
			AfterModel: func(_ context.Context, m model.Message) model.Message {
				told = append(told, "after "+name)
				return m
			},
			AfterTool: func(c model.ToolCall, r tool.Result) tool.Result {
				told = append(told, "result "+name+" "+c.ID)
				r.Text += " " + name
				return r
			},
		}
	}
	chain, err := Chain(piece("loop_guard"), piece("receipts"))
	if err != nil {
		t.Fatal(err)
	}
	run(t, Config{Model: says(calls(call("1", "echo", "{}")), calls(call("2", "nope", "{}")), text("done")), Tools: []tool.Tool{&fakeTool{name: "echo"}}, Chain: chain})
	want := []string{
		"model receipts", "model loop_guard", "after loop_guard", "after receipts", "tool receipts", "tool loop_guard", "result loop_guard 1", "result receipts 1",
		// A call that is refused has a result as well.
		"model receipts", "model loop_guard", "after loop_guard", "after receipts", "result loop_guard 2", "result receipts 2",
		"model receipts", "model loop_guard", "after loop_guard", "after receipts",
	}
	if !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}
