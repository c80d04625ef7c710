// Package eventsink stores events: it reads the event stream through one
// durable consumer, writes batches into a database, and answers who asks for
// stored events.
//
// What it owns: the consumer, the database, and the endpoints events.list and
// agents.*: where managed sub-agent definitions lie in a database it is this one,
// because leads have none.
//
// What always holds:
//
//   - A message is acknowledged only after the transaction with its row was
//     committed. Whatever dies when, it is delivered again, and a row that is
//     there already is left as it is.
//   - Rows are committed in the order of the stream. A reader that has seen
//     sequence n never finds a new row below n later, so a sequence is a cursor.
//   - One process writes to a database. The others stand by.
//   - Nothing that is wrong with one event keeps the others from being stored:
//     such an event goes to the dead letters with the reason.
//
// The order needs care, because after a crash or a broken connection the
// server would deliver new messages first and the unacknowledged ones when
// their time runs out. So reading goes in sessions. A session begins by setting
// the consumer back to what follows the last committed message, which the
// database knows best, and it ends as soon as a delivery is missing: the
// server numbers them.
//
//	open ──▶ bind ──▶ reset ──▶ collect ──▶ dead letters ──▶ commit ──▶ ack
//	  ▲        ▲                   ▲                            │        │
//	  │        └── session over ◀──┴────────────────────────────┴────────┘
//	  └ waits while another process holds the database
//
// When the database is locked, full or unreadable, the sink keeps its batch,
// acknowledges nothing, reports itself as not ready and tries again, ever more
// slowly. When NATS is gone it does the same. When the event stream was made
// anew, its sequences begin at 1 again and would be taken for events that are
// stored already; the sink notices by the stream's time of creation, refuses to
// write, and says what to do.
package eventsink
