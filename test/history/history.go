// Package history reads what the event stream holds, as it would be stored, for
// tests that judge it with package invariant.
package history

import (
	"context"
	"errors"
	"fmt"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// Read returns the whole event stream, from the stream itself and past every
// service. An event that could not be stored is an error.
func Read(ctx context.Context, conn *bus.Conn) ([]contract.EventRecord, error) {
	name := conn.Names.EventStream()
	s, err := conn.JS.Stream(ctx, name)
	if err != nil {
		return nil, err
	}
	var out []contract.EventRecord
	state := s.CachedInfo().State
	for seq := max(state.FirstSeq, 1); seq <= state.LastSeq; seq++ {
		m, err := conn.Get(ctx, name, seq)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		ev, err := envelope.Decode(m.Data)
		if err != nil {
			return nil, fmt.Errorf("event %d: %w", seq, err)
		}
		rec, ok := event.Record(ev, seq)
		if !ok {
			return nil, fmt.Errorf("event %d, %s, cannot be stored", seq, ev.ID)
		}
		out = append(out, rec)
	}
	return out, nil
}
