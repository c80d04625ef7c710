package eventwrite_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventwrite"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// I4, I6, F-140: a real server takes every end and every step, whatever its payload
// limit, with all that a writer expects of the stream in the headers.
func TestServersTakeEveryEvent(t *testing.T) {
	t.Parallel()
	at := time.Unix(1, 0)
	long := strings.Repeat("<\x01\"", 500_000)
	rec := contract.TaskRecord{
		TaskID: "t_1", RunID: "r_1", ThreadID: contract.ThreadID(strings.Repeat("t", contract.MaxThreadID)), Tenant: "default", State: contract.StateCompleted, Attempt: 1,
		Result: long, Error: long, QueuedAt: at, GrantedAt: &at, FinishedAt: &at, ModelName: strings.Repeat("<", 300),
		TraceParent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", TraceState: strings.Repeat("<", envelope.MaxTraceState),
	}
	step := contract.Step{Kind: contract.StepAI, Text: long}
	for range 300 {
		step.ToolCalls = append(step.ToolCalls, contract.StepCall{Name: strings.Repeat("<", 300), Args: []byte(`"` + strings.Repeat("<", 9000) + `"`)})
	}
	end, err := event.Terminal(rec, "/herdgate/executor/ex-1")
	if err != nil {
		t.Fatal(err)
	}
	failed := rec
	failed.TaskID, failed.State = "t_2", contract.StateFailed
	bad, err := event.Terminal(failed, "/herdgate/executor/ex-1")
	if err != nil {
		t.Fatal(err)
	}
	whole, err := event.RunEnd(contract.RunRecord{
		RunID: rec.RunID, ThreadID: rec.ThreadID, Tenant: rec.Tenant, Status: contract.RunFailed, Output: long, Error: long, Model: rec.ModelName, TraceParent: rec.TraceParent, CreatedAt: at, FinishedAt: &at,
	}, "/herdgate/lead/lead-1")
	if err != nil {
		t.Fatal(err)
	}
	for name, limit := range map[string]int32{"16 KiB": event.MinPayload, "64 KiB": 64 << 10, "1 MiB": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, c := natstest.New(t, natstest.MaxPayload(limit))
			ctx, cancel := context.WithTimeout(context.Background(), natstest.Timeout)
			defer cancel()
			for _, ev := range []envelope.Event{event.Running(rec, 1, step, rec.ModelName, nil, "/herdgate/executor/ex-1", at), end, bad, whole} {
				w, err := eventwrite.Of(c, ev)
				if err != nil {
					t.Fatal(err)
				}
				w.Expect, w.ExpectSubject = bus.Seq(0), c.Names.TaskEvents(ev.Tenant, ev.ThreadID, ev.RunID, ev.TaskID)
				if ev.ID == end.ID {
					w.ExpectSubject = ""
				}
				if _, err := c.Publish(ctx, w); err != nil {
					t.Fatalf("%s: %v", ev.ID, err)
				}
				m, err := c.Last(ctx, c.Names.EventStream(), w.Subject)
				if err != nil {
					t.Fatal(err)
				}
				if back, err := envelope.Decode(m.Data); err != nil || back.ID != ev.ID || m.Header.Get(envelope.HeaderMsgID) != ev.ID {
					t.Errorf("stored as %.200s, %v", m.Data, err)
				}
			}
		})
	}
}

// What is no event is refused, and trying again is of no use.
func TestOfRefuses(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	if _, err := eventwrite.Of(c, envelope.Event{ID: "a\r\nb"}); !errors.Is(err, eventwrite.ErrImpossible) || !errors.Is(err, envelope.ErrInvalid) {
		t.Errorf("err = %v", err)
	}
}
