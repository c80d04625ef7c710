package eventsink

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// EVT-21: judging a message is pure. Whatever comes, it is stored, passed over or
// dead with a reason; what is stored belongs to its subject and is JSON.
func FuzzRead(f *testing.F) {
	names := contract.MustNames(contract.DefaultPrefix)
	subject := "hg.v1.event.default.t.run-1.task-1.task_running"
	for _, data := range []string{
		`{"specversion":"1.0","id":"1","source":"s","type":"task_running","tenant":"default","threadid":"t","runid":"run-1","taskid":"task-1","data":{"task_id":"task-1","message_index":1,"message":{"kind":"ai","text":"a\u0000b"}}}`,
		`{"specversion":"1.0","id":"1","source":"s","type":"task_running","data":{"task_id":"task-1","message_index":1,"message":{}}}`,
		`{"specversion":"1.0","id":"1","source":"s","type":"task_running","tenant":"other"}`,
		`{"specversion":"1.0","id":"\r\n","source":"s","type":"task_running"}`,
		`[]`, ``, "\xff", `{"specversion":"1.0"`,
	} {
		f.Add(subject, []byte(data))
	}
	f.Add("hg.v1.event.default.h_00000000000000000000000000.run-1._.run_started", []byte(`{"specversion":"1.0","id":"1","source":"s","type":"run_started","data":{}}`))
	f.Add("hg.v1.event.>", []byte(`{}`))
	f.Fuzz(func(t *testing.T, subject string, data []byte) {
		it := read(names, subject, data, 42)
		if it.seq != 42 {
			t.Errorf("seq = %d", it.seq)
		}
		if it.verdict != store {
			if it.reason == "" {
				t.Error("no reason")
			}
			if line := bus.HeaderText(it.reason); strings.ContainsFunc(line, unicode.IsControl) || len(line) > 1000+len("…") {
				t.Errorf("the reason does not fit into a header: %q", line)
			}
			return
		}
		at, err := names.ParseEvent(subject)
		if err != nil {
			t.Fatalf("stored from subject %q: %v", subject, err)
		}
		r := it.record
		if r.Seq != 42 || r.Tenant != at.Tenant || r.RunID != at.Run || r.TaskID != at.Task || r.ThreadID.Token() != at.Thread {
			t.Errorf("record %+v does not belong to %+v", r, at)
		}
		if !json.Valid(r.Content) || !json.Valid(r.Metadata) || r.EventType == "" || len(r.EventType) > 32 {
			t.Errorf("record %+v", r)
		}
	})
}

// What an event leaves out is taken from its subject, where the subject says it.
func TestReadFillsFromSubject(t *testing.T) {
	t.Parallel()
	names := contract.MustNames(contract.DefaultPrefix)
	data := []byte(`{"specversion":"1.0","id":"1","source":"s","type":"task_started","data":{"task_id":"task-1","description":"d"}}`)
	it := read(names, "hg.v1.event.acme.t.run-1.task-1.task_started", data, 7)
	if r := it.record; it.verdict != store || r.Tenant != "acme" || r.ThreadID != "t" || r.RunID != "run-1" || r.TaskID != "task-1" || r.Seq != 7 {
		t.Errorf("read = %v %q %+v", it.verdict, it.reason, it.record)
	}
	hashed := contract.ThreadID("two words").Token()
	if it := read(names, "hg.v1.event.acme."+hashed+".run-1.task-1.task_started", data, 7); it.verdict != dead {
		t.Errorf("an event without a thread on a digest of it: verdict %v, want dead", it.verdict)
	}
}

// F-058: an event that makes its reader panic is read once more, then it goes to the
// dead letters like any other that cannot be stored.
func TestReadingPanics(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		panics int
		want   verdict
	}{{0, store}, {1, store}, {2, dead}, {1000, dead}} {
		n := 0
		s := &Service{bus: &bus.Conn{Names: contract.MustNames("hg.v1")}}
		it := s.judge("hg.v1.event.x", []byte("{}"), 7, func(_ contract.Names, subject string, _ []byte, seq uint64) item {
			if n++; n <= c.panics {
				panic("password=hunter2")
			}
			return item{subject: subject, seq: seq, verdict: store}
		})
		if it.verdict != c.want || it.seq != 7 || it.subject != "hg.v1.event.x" || n > 2 || strings.Contains(it.reason, "hunter2") {
			t.Errorf("after %d panics: %+v, read %d times", c.panics, it, n)
		}
	}
}
