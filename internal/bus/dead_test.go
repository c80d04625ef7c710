package bus_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
)

// F-058: a dead letter is the message as it came, with where it came from and
// why it cannot be used, in headers that the protocol can carry.
func TestBury(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx := testContext(t)
	m := bus.Message{Subject: "hg.v1.x", Seq: 7, Data: []byte("body"), Header: nats.Header{
		"traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, bus.HeaderDeliveries: {"3"}, "Nats-Msg-Id": {"x"}, "X-Other": {"y"},
	}}
	for range 2 {
		if err := c.Bury(ctx, "admission", "HG_WORK", m, errors.New("no\r\nobject\x00\xff "+strings.Repeat("界", 1000))); err != nil {
			t.Fatal(err)
		}
	}
	got, err := c.Last(ctx, c.Names.DeadStream(), c.Names.Dead("admission"))
	if err != nil {
		t.Fatal(err)
	}
	if got.Seq != 1 || string(got.Data) != "body" {
		t.Errorf("letter %d = %q", got.Seq, got.Data)
	}
	reason := got.Header.Get(bus.HeaderReason)
	if !strings.HasPrefix(reason, "no  object \ufffd 界") || len(reason) > 1010 || !strings.HasSuffix(reason, "界…") {
		t.Errorf("reason = %q", reason)
	}
	for h, want := range map[string]string{bus.HeaderOriginSubject: "hg.v1.x", bus.HeaderOriginStream: "HG_WORK", bus.HeaderOriginSeq: "7",
		"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", bus.HeaderDeliveries: "3", "X-Other": ""} {
		if v := got.Header.Get(h); v != want {
			t.Errorf("%s = %q, want %q", h, v, want)
		}
	}
}

// F-058: what is too large with its headers is kept without its body.
func TestBuryTooLarge(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t, natstest.MaxPayload(8<<10))
	ctx := testContext(t)
	m := bus.Message{Subject: "s", Seq: 1, Data: make([]byte, 8<<10), Header: nats.Header{"tracestate": {strings.Repeat("x", 8<<10)}}}
	if err := c.Bury(ctx, "executor", "HG_GRANTS", m, errors.New("x")); err != nil {
		t.Fatal(err)
	}
	got, err := c.Last(ctx, c.Names.DeadStream(), c.Names.Dead("executor"))
	if err != nil || len(got.Data) != 0 || got.Header.Get(bus.HeaderOmitted) != "8192" {
		t.Errorf("letter = %+v, %v", got, err)
	}
}
