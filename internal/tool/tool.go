// Package tool holds what agents can do: an interface, the file tools and the
// shell, all confined to the workspace of one thread.
package tool

import (
	"context"
	"encoding/json"

	"github.com/herdgate/herdgate/internal/model"
)

// Result is what a tool gives back to the model.
type Result struct {
	// Text is what the model reads.
	Text string
	// IsError marks a failure that the model should read and may act on.
	IsError bool
	// Metadata is for the program; no model sees it.
	Metadata map[string]any
}

// Tool is something an agent can call. It is safe for concurrent use.
type Tool interface {
	Spec() model.ToolSpec
	// Call runs the tool with args, a JSON object. What the model did wrong or
	// can react to is a Result with IsError; an error is a fault of ours. It
	// returns promptly once ctx is done, having stopped all it started.
	Call(ctx context.Context, call Call) (Result, error)
}

// Call is one invocation.
type Call struct {
	// ID is unique within the conversation.
	ID   string
	Args json.RawMessage
	// Message and Position tell where the call stands: in the assistant's
	// message number Message (from 0), as its call number Position (from 0).
	Message, Position int
}

// Failure is a Result that tells the model what went wrong and what to do.
func Failure(text string) Result { return Result{Text: text, IsError: true} }
