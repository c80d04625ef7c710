package admissionapi

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// The names are those of GET /v1/admission.
func TestStatusNames(t *testing.T) {
	t.Parallel()
	n := 1
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	b, err := json.Marshal(Status{
		Leader: "a", Epoch: 2, OldestQueuedAt: &at, Slots: []Slot{{Pool: "p", Slot: 1, TaskID: "t", Executor: "e"}}, QueuePosition: &n,
		Pools: []Pool{{Pool: "p", MaxRunning: 1}}, Totals: Totals{Since: at, Refusals: map[contract.ErrorCode]int{contract.ErrQueueTimeout: 1}},
	})
	want := `{"leader":"a","epoch":2,"max_running":0,"running":0,"queued":0,"max_queued":0,"oldest_queued_at":"2026-01-02T03:04:05Z","slots":[{"pool":"p","slot":1,"task_id":"t","executor":"e","expires_at":null}],` +
		`"pools":[{"pool":"p","max_running":1,"running":0,"queued":0,"oldest_queued_at":null}],` +
		`"totals":{"since":"2026-01-02T03:04:05Z","grants":0,"expiries":0,"refusals":{"queue_timeout":1},"fence_rejections":0,"takeovers":0},"queue_position":1}`
	if err != nil || string(b) != want {
		t.Errorf("status = %s, %v; want %s", b, err, want)
	}
}

func TestAskWithoutALeader(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
	defer cancel()
	if _, err := Ask(ctx, c, StatusRequest{}); !errors.Is(err, ErrNoLeader) {
		t.Errorf("Ask = %v, want ErrNoLeader", err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"leader":"a","slots":[{"slot":1}]}`))
	f.Add([]byte(strings.Repeat("[", 200)))
	f.Add([]byte(`{"slots":null,"later":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Decode(&nats.Msg{Data: b})
		if err != nil {
			return
		}
		again, err := json.Marshal(s)
		if err != nil {
			t.Fatalf("what was decoded cannot be written: %v", err)
		}
		if _, err := Decode(&nats.Msg{Data: again}); err != nil {
			t.Fatalf("what was written cannot be decoded: %v", err)
		}
	})
}
