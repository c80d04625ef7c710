// Package run is the engine that drives the runs of a lead agent.
//
// # What it owns
//
// A run is a record in the run bucket. It is written after every step by
// compare-and-set, before the step has any effect: the assistant's message, cut
// to what the limits allow, and the ledger of delegations stand in the record
// before the first tool of that message runs. That one write is the reservation
// of the run's allowance; whoever is refused stops.
//
//	Start ──▶ record + lease ──▶ loop: model → trim → record → tools ─┐
//	            ▲      │                    ▲_________________________│
//	            │      └ lease gone: any replica takes over          end
//	            └────────────────────────────────────────────────┘    │
//	   thread pointer ──▶ terminal record ──▶ last event ──▶ lease closed
//
// # What always holds
//
//   - One process at most drives a run: each write to the record or its lease
//     expects the record's revision, and the driver stops by its own clock a
//     little before its lease runs out.
//   - A replayed step delegates nothing twice: task ids derive from run, message
//     and position, and a request that is there or has ended is only awaited.
//   - What a task says while it runs never enters the lead's conversation: only
//     its final text and metadata do, read from the task's record.
//   - Each run has one terminal record and one last event. The lease key is
//     closed only after that event is stored, so that whoever finds a run that
//     has ended but is not closed finishes the rest.
//
// # When things fail
//
// A driver that dies leaves its lease to expire; the replica that hears of it
// first takes the record over and goes on from the stored messages. Open `task`
// calls are awaited, open calls of other tools are answered with an error,
// because nobody knows whether they had an effect. A driver that is asked to
// stop closes its lease, so that another one takes over at once.
package run
