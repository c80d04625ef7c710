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

// Read reads an event as the sink does and fails the test if it is not one to store.
func Read(t testing.TB, subject string, data []byte, seq uint64) {
	if it := read(contract.MustNames(contract.DefaultPrefix), subject, data, seq); it.verdict != store {
		t.Fatalf("event is not stored: %s", it.reason)
	}
}
