package envelope

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func event(t testing.TB) Event {
	ev, err := New(contract.EventTaskRunning, map[string]any{"task_id": "t1", "message_index": 1})
	if err != nil {
		t.Fatal(err)
	}
	ev.ID, ev.Source, ev.Subject, ev.Time = "t1.1.task_running.1", "/herdgate/executor/ex-1", "t1", time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC)
	ev.TraceParent, ev.TraceState = parent, "v=1"
	ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID, ev.Attempt = "default", "a thread / 界", "r1", "t1", 2
	return ev
}

// The encoding, byte by byte: others read it.
func TestEncodeGolden(t *testing.T) {
	t.Parallel()
	b, err := Encode(event(t))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"specversion":"1.0","id":"t1.1.task_running.1","source":"/herdgate/executor/ex-1","type":"task_running","subject":"t1",` +
		`"time":"2026-01-02T03:04:05.123456Z","datacontenttype":"application/json","dataschema":"urn:herdgate:event:task_running:1",` +
		`"traceparent":"` + parent + `","tracestate":"v=1","tenant":"default","threadid":"a thread / 界","runid":"r1","taskid":"t1","attempt":1,` +
		`"data":{"message_index":1,"task_id":"t1"}}`
	want = strings.Replace(want, `"attempt":1`, `"attempt":2`, 1)
	if string(b) != want {
		t.Errorf("got\n%s\nwant\n%s", b, want)
	}
	back, err := Decode(b)
	if err != nil || !reflect.DeepEqual(back, event(t)) {
		t.Errorf("back = %+v, %v", back, err)
	}
}

// Empty attributes are left out: CloudEvents forbids empty ones.
func TestEncodeMinimal(t *testing.T) {
	t.Parallel()
	ev := Event{ID: "r1.end", Source: "/s", Type: contract.EventRunCompleted, Time: time.Unix(0, 0), Tenant: "default", ThreadID: "th", RunID: "r1", Data: json.RawMessage(`{}`)}
	b, err := Encode(ev)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]any{}
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	if want := []string{"data", "datacontenttype", "id", "runid", "source", "specversion", "tenant", "threadid", "time", "type"}; !slices.Equal(slices.Sorted(slices.Values(keys)), want) {
		t.Errorf("keys = %q", keys)
	}
}

// EVT-08: a producer refuses what no reader should have to judge.
func TestEncodeRefuses(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Event){
		"id is empty":                 func(e *Event) { e.ID = " " },
		"id has 257 bytes":            func(e *Event) { e.ID = strings.Repeat("x", 257) },
		"id has a control character":  func(e *Event) { e.ID = "a\r\nb" },
		"source is not valid UTF-8":   func(e *Event) { e.Source = "\xff" },
		"type is empty":               func(e *Event) { e.Type = "" },
		"type has":                    func(e *Event) { e.Type = "task.done" },
		"has no task id":              func(e *Event) { e.TaskID = "" },
		"task id has":                 func(e *Event) { e.TaskID = " " },
		"tenant is empty":             func(e *Event) { e.Tenant = "" },
		"run id is empty":             func(e *Event) { e.RunID = "" },
		"thread id is empty":          func(e *Event) { e.ThreadID = "" },
		"time is missing":             func(e *Event) { e.Time = time.Time{} },
		"attempt is -1":               func(e *Event) { e.Attempt = -1 },
		"data is not a JSON object":   func(e *Event) { e.Data = json.RawMessage(`[]`) },
		"data is not a JSON object ":  func(e *Event) { e.Data = json.RawMessage(`{`) },
		"data is not a JSON object  ": func(e *Event) { e.Data = nil },
		"traceparent":                 func(e *Event) { e.TraceParent = "00-x" },
		"tracestate":                  func(e *Event) { e.TraceState = "a=1\r\nPUB x 0\r\n" },
		"want at most 921600":         func(e *Event) { e.Data = json.RawMessage(`{"x":"` + strings.Repeat("x", MaxBytes) + `"}`) },
	} {
		ev := event(t)
		change(&ev)
		if _, err := Encode(ev); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), strings.TrimSpace(name)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(contract.EventTaskStarted, func() {}); !errors.Is(err, ErrInvalid) {
		t.Errorf("New with what is no JSON: %v", err)
	}
}

// A reader accepts what it can understand and no less.
func TestDecodeIsTolerant(t *testing.T) {
	t.Parallel()
	ev, err := Decode([]byte(`{"specversion":"1.1","id":"i","source":"s","type":"task_dreaming","time":"2026-01-02T04:04:05+01:00","newattr":"x","data":[1],"traceparent":"odd"}`))
	if err != nil || ev.Type != "task_dreaming" || !ev.Time.Equal(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)) || string(ev.Data) != `[1]` {
		t.Errorf("event = %+v, %v", ev, err)
	}
	if ev, err = Decode([]byte(`{"specversion":"1.0","id":"i","source":"s","type":"t"}`)); err != nil || !ev.Time.IsZero() {
		t.Errorf("without time: %+v, %v", ev, err)
	}
	for name, b := range map[string]string{
		"other major version": `{"specversion":"2.0","id":"i","source":"s","type":"t"}`,
		"no id":               `{"specversion":"1.0","source":"s","type":"t"}`,
		"no type":             `{"specversion":"1.0","id":"i","source":"s"}`,
		"bad time":            `{"specversion":"1.0","id":"i","source":"s","type":"t","time":"yesterday"}`,
		"id of another type":  `{"specversion":"1.0","id":1,"source":"s","type":"t"}`,
		"no object":           `[]`, "no json": `{`, "empty": ``, "null": `null`,
		"too deep":  `{"data":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
		"too large": strings.Repeat(" ", 8<<20+1),
	} {
		if _, err := Decode([]byte(b)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}

func TestSubjectAndHeaders(t *testing.T) {
	t.Parallel()
	ev := event(t)
	n := contract.MustNames(contract.DefaultPrefix)
	want := "hg.v1.event.default." + ev.ThreadID.Token() + ".r1.t1.task_running"
	if got := ev.NATSSubject(n); got != want {
		t.Errorf("subject = %q, want %q", got, want)
	}
	if h := ev.Headers(); !reflect.DeepEqual(h, map[string][]string{
		"Content-Type": {"application/cloudevents+json"}, "Nats-Msg-Id": {ev.ID}, "traceparent": {parent}, "tracestate": {"v=1"},
	}) {
		t.Errorf("headers = %v", h)
	}
	ev.TraceState = ""
	if h := ev.Headers(); len(h) != 3 || h["tracestate"] != nil {
		t.Errorf("headers without a state = %v", h)
	}
	ev.TraceParent = ""
	if h := ev.Headers(); len(h) != 2 {
		t.Errorf("headers without a trace = %v", h)
	}
}

func FuzzDecodeEvent(f *testing.F) {
	b, err := Encode(event(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"specversion":"1.1","id":"i","source":"s","type":"t","data":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		ev, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("error of no known kind: %v", err)
			}
			return
		}
		out, err := Encode(ev)
		if err != nil {
			return // read tolerantly, but not ours to write
		}
		back, err := Decode(out)
		if err != nil {
			t.Fatalf("own encoding is refused: %v\n%s", err, out)
		}
		if out2, err := Encode(back); err != nil || string(out2) != string(out) {
			t.Fatalf("does not settle: %v\n%s\n%s", err, out, out2)
		}
	})
}

// CTX-06: the trace context that every hop carries.
func TestValidTraceParent(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]bool{
		parent: true,
		"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00":                  true,
		"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02":                  true,
		"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes-later": true,
		"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01x":                 false,
		parent + "-x": false,
		"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01": false,
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": false,
		"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01": false,
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01": false,
		"00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01":  false,
		"00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01": false,
		" " + parent: false, "": false, parent[:54]: false,
		"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-" + strings.Repeat("x", 4096): false,
	} {
		if got := ValidTraceParent(s); got != want {
			t.Errorf("ValidTraceParent(%.70q) = %v, want %v", s, got, want)
		}
	}
}

func TestValidTraceState(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]bool{
		"a=1,b=2": true, strings.Repeat("x", 512): true, strings.Repeat("x", 513): false, "": false, "a=1\r\nx": false, "a=é": false, "a=\x00": false,
	} {
		if got := ValidTraceState(s); got != want {
			t.Errorf("ValidTraceState(%.30q) = %v, want %v", s, got, want)
		}
	}
}

func FuzzValidTraceParent(f *testing.F) {
	f.Add(parent)
	f.Add("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x")
	f.Add("00-é")
	f.Fuzz(func(t *testing.T, s string) {
		if !ValidTraceParent(s) {
			return
		}
		parts := strings.SplitN(s, "-", 5)
		if len(parts) < 4 || len(parts[0]) != 2 || len(parts[1]) != 32 || len(parts[2]) != 16 || len(parts[3]) != 2 || strings.Trim(parts[1], "0") == "" || strings.Trim(parts[2], "0") == "" {
			t.Fatalf("%q is accepted", s)
		}
	})
}

// A header value cannot begin a header of its own.
func TestCarrier(t *testing.T) {
	t.Parallel()
	c := Carrier{}
	c.Set("traceparent", parent)
	c.Set("tracestate", "a=1\r\nX-Evil: 1")
	c.Set("bad\nkey", "x")
	if c.Get("traceparent") != parent || c.Get("tracestate") != "" || c.Get("none") != "" || !slices.Equal(c.Keys(), []string{"traceparent"}) {
		t.Errorf("carrier = %v", c)
	}
	c.Set("traceparent", "y")
	if len(c["traceparent"]) != 1 || c.Get("traceparent") != "y" {
		t.Errorf("carrier = %v, want the value replaced", c)
	}
}
