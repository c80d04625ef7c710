// Package script is the offline model: a YAML file of rules answers instead of a
// provider, so that demos, tests and dry runs need no network. It stands behind
// the same interface as the real ones: it streams, reports usage, takes its time
// and fails on request.
//
// # Which turn answers
//
// The model keeps no state about conversations, so any replica answers alike and
// a conversation can be continued anywhere. It replays the conversation instead:
// at each point where a model was asked it looks at the newest message. A user
// message selects the first rule that fits agent and text, and that rule's first
// turn. A tool result goes on with the rule's next turn; when the rule has none
// left, the first rule that fits the result's text, or else the default. All
// results that answer one assistant message are one step. Without a rule and a
// default the answer is a plain text that says so.
//
// # Faults
//
// A turn with a fault fails as a provider would. The next call with the very same
// conversation, which is what a retry is, gets the turn after it; once a call has
// succeeded the conversation's faults are armed again. Faults after which no turn
// is left stay: the last one repeats. Some faults are those of an answer, not
// failures: malformed_tool_args has calls whose arguments are cut in the middle.
//
// # Templates
//
// Text and string arguments are Go templates. They see .LastToolResult (text of
// the newest tool message), .ToolResults (.Name and .Text of those of the newest
// step), .AllToolResults, .Input (the first user message) and .Agent, and the
// functions lines, grep, sort, uniq, indent, trim, join, default, count and json.
// Neither files nor the environment can be reached.
package script
