package eventsink

import (
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// RecordOf is the record that the sink stores for ev.
func RecordOf(t testing.TB, ev envelope.Event, seq uint64) contract.EventRecord {
	t.Helper()
	names := contract.MustNames(contract.DefaultPrefix)
	data, err := envelope.Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	it := read(names, ev.NATSSubject(names), data, seq)
	if it.verdict != store {
		t.Fatalf("event is not stored: %s", it.reason)
	}
	return it.record
}
