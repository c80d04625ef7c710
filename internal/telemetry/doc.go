// Package telemetry is how Herdgate is watched: one log format, one trace over
// every hop, one registry of metrics, one answer to "are you ready?".
//
// Nothing here is global. A service gets its tracer provider, registry and
// logger from its caller, so several services can live in one process and tests
// can look at what each of them did. A collector that is slow, dead or wrong
// costs spans, never work: exports run beside it, are bounded, and are cut off
// when the process leaves.
package telemetry
