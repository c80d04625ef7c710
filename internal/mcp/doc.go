// Package mcp makes the tools of MCP servers tools of our agents.
//
// A [Manager] has the servers of a configuration: processes that it starts (stdio) and
// addresses (streamable HTTP, SSE). One is shared by all tasks of a service. It
// connects when tools are first asked for, and again, with growing pauses, when a
// server is gone. No task's context reaches beyond its own call: a server outlives the
// task that happened to connect it.
//
// A server is a stranger. What it sends is bounded and checked: one bad tool costs that
// tool, one bad answer that call, and a server that is gone its tools, each with words
// that a model or an operator can read; never a run. Values of env and headers appear
// in no log, no message and, where they were taken from our environment, no result.
package mcp
