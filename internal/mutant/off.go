//go:build !herdgate_mutant

// Package mutant breaks promises of the protocol on purpose, so that tests can show
// that they would notice. Only a build with the tag herdgate_mutant can do that: there
// the environment variable MUTANT names one of the errors. In every other
// build, each of them is a constant false, and the compiler leaves it out.
package mutant

// The errors; see docs/admission.md for what they break.
const (
	// SkipFence lets first writes of records go without the leader's revision.
	SkipFence = false
	// AckEarly acknowledges a grant before its task is claimed.
	AckEarly = false
	// Requeue puts the head of the queue at its end when its first write got no
	// answer and did not land.
	Requeue = false
)
