// Package eventwrite is where events become messages. Every event of every service
// goes through [Of]: it validates the event, bounds it to what the server takes,
// headers included, and gives it its subject, headers and id. A test of package
// test/layers refuses any other way onto the event stream.
//
// What the event expects of the stream (docs/adr/0004) is for its writer to add.
package eventwrite

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// ErrImpossible: the event cannot be written, now or later.
var ErrImpossible = errors.New("cannot be encoded")

// Of is the write of an event on c.
func Of(c *bus.Conn, ev envelope.Event) (bus.Write, error) {
	data, err := event.Encode(ev, int(c.NC.MaxPayload()))
	if err != nil {
		if errors.Is(err, event.ErrTooLarge) {
			err = fmt.Errorf("%w: %w", bus.ErrTooLarge, err)
		}
		return bus.Write{}, fmt.Errorf("event %.80s: %w: %w", ev.ID, ErrImpossible, err)
	}
	return bus.Write{Subject: ev.NATSSubject(c.Names), Data: data, Header: nats.Header(ev.Headers()), MsgID: ev.ID}, nil
}
