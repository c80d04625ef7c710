// Package history records what really happened, as far as anybody can see it from
// outside of the services: what the streams hold, every message that the task
// bucket ever stored, and what went over the connections of clients. Package
// invariant and the models of this package judge it.
package history

import (
	"context"
	"errors"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/stored"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Read returns the whole event stream, from the stream itself and past every
// service. An event that could not be stored is an error.
func Read(ctx context.Context, conn *bus.Conn) ([]contract.EventRecord, error) {
	var out []contract.EventRecord
	err := stored.Each(ctx, conn, bus.Watch{Stream: conn.Names.EventStream(), StartSeq: 1, Subjects: []string{conn.Names.AllEvents()}}, func(m bus.Message) error {
		rec, known, err := stored.Event(conn.Names, m)
		if err != nil {
			return err
		}
		if !known {
			return errors.New("an event of a type that nobody knows: " + m.Subject)
		}
		out = append(out, rec)
		return nil
	})
	return out, err
}

// Check judges everything that there is: the events, the bucket, the grants, the
// queue, and all that was recorded.
func (r *Recorder) Check(ctx context.Context, o invariant.Options) ([]invariant.Violation, error) {
	// What was recorded is older than what is read then, so that everything in it has
	// left its traces there.
	grants := r.Grants()
	revs, err := r.Revisions(ctx)
	if err != nil {
		return nil, err
	}
	v, err := stored.NewReader(stored.Config{Bus: r.conn}).Read(ctx)
	if err != nil {
		return nil, err
	}
	if v.UnreadableCount > 0 {
		return nil, errors.New("what cannot be read: " + v.Unreadable[0])
	}
	v.History.Bucket = append(v.History.Bucket, revs...)
	v.History.Grants = append(v.History.Grants, grants...)
	return v.History.Check(o), nil
}
