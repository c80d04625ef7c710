// Package event shapes what a task and a run tell the world. It is pure: no
// I/O, no clock, no randomness, so that the live path and the stored path share
// one definition and every shape can be tested without a broker.
//
//   - [BuildStep] bounds one message for display and storage, [Capture] finds
//     the messages that are new in a growing history.
//   - [Queued], [Admitted], [Started], [Running], [Terminal] and their run
//     counterparts build events from state alone. Their ids are made from the
//     state as well: whoever repeats an event, after a crash or from another
//     process, repeats its id.
//   - [Record] judges an event and turns it into the record that is stored and
//     listed, [Live] into the one that those get who follow along.
//
// All bounds are code points. Text is made storable (see [Sanitize]) before it
// is cut.
package event
