// Package contract is what Herdgate's processes, and everybody who talks to
// them over NATS, agree on: subjects, streams and keys, typed ids, the words
// for states and reasons, and the messages themselves.
//
// It needs the standard library alone, so that any program can import it.
// Everything in it is append-only: a name that was released is never renamed,
// a field never removed, because consumers written against an older version
// must keep working. Readers ignore fields and event types that they do not
// know.
//
// Character counts are Unicode code points, times are RFC 3339 in UTC, and
// durations carry their unit in the name (`_ms`, `_seconds`).
package contract

// Version is the version of the messages in this package. It travels in the
// field contract_version of a task request; a reader refuses a request whose
// version it does not know, because acting on half-understood work is worse
// than refusing it.
const Version = "1"
