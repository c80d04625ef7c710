package eventsink

import (
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// verdict is what becomes of a message.
type verdict int

const (
	// store: the message is an event and has a record.
	store verdict = iota
	// skip: an event of a type that this program does not know.
	skip
	// dead: not an event that could ever be stored.
	dead
)

// item is a message that was read.
type item struct {
	msg         jetstream.Msg
	subject     string
	seq         uint64
	delivery    uint64 // the server's number of this delivery
	deliveries  uint64
	broken      error // the delivery cannot be understood
	verdict     verdict
	reason      string // why it is dead or skipped
	record      contract.EventRecord
	traceParent string
	traceState  string
	// terminal: somebody waits for this one, so it is stored at once.
	terminal bool
}

// maxPanics is how many panics the reading of one message may cause.
const maxPanics = 2

// judge reads a message with f. One that makes it panic, the second time as well,
// can never be stored; the others go on.
func (s *Service) judge(subject string, data []byte, seq uint64, f func(contract.Names, string, []byte, uint64) item) item {
	it := item{subject: subject, seq: seq}
	for range maxPanics {
		err := fault.Catch(func() error { it = f(s.bus.Names, subject, data, seq); return nil })
		p := fault.As(err)
		if p == nil {
			return it
		}
		p.Log(s.log.Error()).Str("subject", clip(subject, 300)).Uint64("seq", seq).Msg("the reading of an event panicked")
		it = it.refuse("reading it panicked: " + p.Error())
	}
	return it
}

// read judges a message. It does no I/O.
func read(names contract.Names, subject string, data []byte, seq uint64) item {
	it := item{subject: subject, seq: seq}
	at, err := names.ParseEvent(subject)
	if err != nil {
		return it.refuse(err.Error())
	}
	it.terminal = at.Type.Terminal()
	ev, err := envelope.Decode(data)
	if err != nil {
		return it.refuse(err.Error())
	}
	if err := event.Complete(&ev, at); err != nil {
		return it.refuse(err.Error())
	}
	if !slices.Contains(known, ev.Type) {
		it.verdict, it.reason = skip, "unknown event type "+string(ev.Type)
		return it
	}
	rec, ok := event.Record(ev, seq)
	if !ok {
		return it.refuse(fmt.Sprintf("ids or data do not have the shape of %s", ev.Type))
	}
	it.record = rec
	if envelope.ValidTraceParent(ev.TraceParent) {
		it.traceParent, it.traceState = ev.TraceParent, ev.TraceState
	}
	return it
}

func (it item) refuse(reason string) item {
	it.verdict, it.reason = dead, reason
	return it
}

var known = contract.EventTypes()

func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}
