// Package prompt holds what agents are told by the framework, in one place: the
// texts themselves, how the first messages of a sub-agent are put together, and
// how text that others wrote is kept from speaking with the framework's voice.
//
// Two channels are kept apart. The system message is the framework's and the
// definition's alone. Whatever a model or a user wrote (the task, its acceptance
// criteria, reports of sub-agents) is material: tags of ours are escaped in it,
// and a task is framed by markers that it cannot contain itself.
//
// Everything here is a pure function. Functions that take messages return new
// ones where something changes, and never change those they were given.
package prompt

//go:generate go run ./gen
