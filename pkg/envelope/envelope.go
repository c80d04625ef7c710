// Package envelope writes and reads Herdgate's events: CloudEvents 1.0 in
// structured JSON mode, with W3C trace context as extension attributes.
//
// Writing is strict: an event that breaks the contract is refused before it
// reaches the wire. Reading is tolerant: unknown attributes and event types are
// kept out of the way, so that a consumer written today reads tomorrow's
// events.
//
// The package needs contract and the standard library alone. [Carrier] fits
// OpenTelemetry's propagation.TextMapCarrier without importing it.
package envelope

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ContentType is the value of the Content-Type header of an event.
const ContentType = "application/cloudevents+json"

// SpecVersion is the version of CloudEvents.
const SpecVersion = "1.0"

// MaxBytes bounds an encoded event, so that with its headers it stays below the
// default payload limit of a NATS server (1 MiB).
const MaxBytes = 900 << 10

// Header names of a message. NATS header names are case-sensitive.
const (
	HeaderContentType = "Content-Type"
	HeaderMsgID       = "Nats-Msg-Id"
	HeaderTraceParent = "traceparent"
	HeaderTraceState  = "tracestate"
)

// ErrInvalid is returned when an event breaks the contract.
var ErrInvalid = errors.New("invalid event")

// ErrTooLarge is the [ErrInvalid] of an event with more than [MaxBytes].
var ErrTooLarge = fmt.Errorf("%w: too large", ErrInvalid)

// Event is one event. Data holds the JSON of the type's data.
type Event struct {
	ID          string
	Source      string // /herdgate/<service>/<process>
	Type        contract.EventType
	Subject     string // the task id, or the run id for events of a run
	Time        time.Time
	DataSchema  string
	TraceParent string
	TraceState  string
	Tenant      contract.Tenant
	ThreadID    contract.ThreadID
	RunID       contract.RunID
	TaskID      contract.TaskID // empty for events of a run
	Attempt     int             // 0 where no attempt is meant
	Data        json.RawMessage
}

// wire is the JSON form. CloudEvents allows only lower-case letters and digits
// in the names of extension attributes.
type wire struct {
	SpecVersion     string          `json:"specversion"`
	ID              string          `json:"id"`
	Source          string          `json:"source"`
	Type            string          `json:"type"`
	Subject         string          `json:"subject,omitempty"`
	Time            string          `json:"time,omitempty"`
	DataContentType string          `json:"datacontenttype,omitempty"`
	DataSchema      string          `json:"dataschema,omitempty"`
	TraceParent     string          `json:"traceparent,omitempty"`
	TraceState      string          `json:"tracestate,omitempty"`
	Tenant          string          `json:"tenant,omitempty"`
	ThreadID        string          `json:"threadid,omitempty"`
	RunID           string          `json:"runid,omitempty"`
	TaskID          string          `json:"taskid,omitempty"`
	Attempt         int             `json:"attempt,omitempty"`
	Data            json.RawMessage `json:"data,omitempty"`
}

// DataSchema is the name of the schema of an event type's data.
func DataSchema(t contract.EventType) string {
	return "urn:herdgate:event:" + string(t) + ":" + contract.Version
}

// New returns an event with data encoded as its type's data. Time, ids and
// trace context are the caller's to fill.
func New(t contract.EventType, data any) (Event, error) {
	b, err := json.Marshal(data)
	if err != nil {
		return Event{}, fmt.Errorf("%w: data of %s: %w", ErrInvalid, t, err)
	}
	return Event{Type: t, DataSchema: DataSchema(t), Data: b}, nil
}

// Validate checks what every event that we write must have.
func (e Event) Validate() error {
	var errs []error
	need := func(name, v string, limit int) {
		switch {
		case strings.TrimSpace(v) == "":
			errs = append(errs, fmt.Errorf("%s is empty", name))
		case len(v) > limit:
			errs = append(errs, fmt.Errorf("%s has %d bytes; want at most %d", name, len(v), limit))
		case !utf8.ValidString(v):
			errs = append(errs, fmt.Errorf("%s is not valid UTF-8", name))
		case strings.IndexFunc(v, unicode.IsControl) >= 0:
			// It becomes a header: a line break would begin a header of its own.
			errs = append(errs, fmt.Errorf("%s has a control character", name))
		}
	}
	need("id", e.ID, 256)
	need("source", e.Source, 256)
	need("type", string(e.Type), 64)
	errs = append(errs, contract.ValidateToken("type", string(e.Type)), e.Tenant.Validate(), e.ThreadID.Validate(), e.RunID.Validate())
	if e.TaskID != "" {
		errs = append(errs, e.TaskID.Validate())
	} else if strings.HasPrefix(string(e.Type), "task_") {
		errs = append(errs, fmt.Errorf("%s has no task id", e.Type))
	}
	if e.Time.IsZero() {
		errs = append(errs, errors.New("time is missing"))
	}
	if e.Attempt < 0 {
		errs = append(errs, fmt.Errorf("attempt is %d; want 0 or more", e.Attempt))
	}
	if len(e.Data) == 0 || !json.Valid(e.Data) || e.Data[0] != '{' {
		errs = append(errs, errors.New("data is not a JSON object"))
	}
	if e.TraceParent != "" && !ValidTraceParent(e.TraceParent) {
		errs = append(errs, fmt.Errorf("traceparent %q is malformed", cut(e.TraceParent, 80)))
	}
	if e.TraceState != "" && !ValidTraceState(e.TraceState) {
		errs = append(errs, fmt.Errorf("tracestate %q is malformed; want at most %d printable characters", cut(e.TraceState, 80), MaxTraceState))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// Encode validates and writes an event. The result has no line breaks.
func Encode(e Event) ([]byte, error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(wire{
		SpecVersion: SpecVersion, ID: e.ID, Source: e.Source, Type: string(e.Type), Subject: e.Subject,
		Time: e.Time.UTC().Format("2006-01-02T15:04:05.000000Z"), DataContentType: "application/json", DataSchema: e.DataSchema,
		TraceParent: e.TraceParent, TraceState: e.TraceState,
		Tenant: string(e.Tenant), ThreadID: string(e.ThreadID), RunID: string(e.RunID), TaskID: string(e.TaskID),
		Attempt: e.Attempt, Data: e.Data,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("%w: %s has %d bytes; want at most %d", ErrTooLarge, e.Type, len(b), MaxBytes)
	}
	return b, nil
}

// Decode reads an event. It refuses what cannot be understood at all — not a
// JSON object, another major version of CloudEvents, no id, source or type —
// and leaves everything else to the reader of the data.
func Decode(b []byte) (Event, error) {
	if len(b) > 8<<20 {
		return Event{}, fmt.Errorf("%w: %d bytes; want at most %d", ErrInvalid, len(b), 8<<20)
	}
	if err := contract.CheckDepth(b, contract.MaxDepth); err != nil {
		return Event{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	var w wire
	if err := json.Unmarshal(b, &w); err != nil {
		return Event{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if !strings.HasPrefix(w.SpecVersion, "1.") {
		return Event{}, fmt.Errorf("%w: specversion is %q; this program reads 1.x", ErrInvalid, cut(w.SpecVersion, 20))
	}
	if w.ID == "" || w.Source == "" || w.Type == "" {
		return Event{}, fmt.Errorf("%w: id, source and type must not be empty", ErrInvalid)
	}
	var at time.Time
	if w.Time != "" {
		var err error
		if at, err = time.Parse(time.RFC3339Nano, w.Time); err != nil {
			return Event{}, fmt.Errorf("%w: time %q is not RFC 3339", ErrInvalid, cut(w.Time, 40))
		}
	}
	return Event{
		ID: w.ID, Source: w.Source, Type: contract.EventType(w.Type), Subject: w.Subject, Time: at.UTC(), DataSchema: w.DataSchema,
		TraceParent: w.TraceParent, TraceState: w.TraceState,
		Tenant: contract.Tenant(w.Tenant), ThreadID: contract.ThreadID(w.ThreadID), RunID: contract.RunID(w.RunID), TaskID: contract.TaskID(w.TaskID),
		Attempt: w.Attempt, Data: w.Data,
	}, nil
}

// NATSSubject is the subject on which the event is published.
func (e Event) NATSSubject(n contract.Names) string {
	return n.Event(contract.EventSubject{Tenant: e.Tenant, Thread: e.ThreadID.Token(), Run: e.RunID, Task: e.TaskID, Type: e.Type})
}

// Headers returns the headers that the event is published with.
func (e Event) Headers() map[string][]string {
	h := map[string][]string{HeaderContentType: {ContentType}, HeaderMsgID: {e.ID}}
	if e.TraceParent != "" {
		h[HeaderTraceParent] = []string{e.TraceParent}
		if e.TraceState != "" {
			h[HeaderTraceState] = []string{e.TraceState}
		}
	}
	return h
}

func cut(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}
