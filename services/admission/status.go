package admission

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/micro"

	"github.com/herdgate/herdgate/internal/admissionapi"
	"github.com/herdgate/herdgate/internal/endpoint"
)

// serveStatus answers on the status endpoint while this process leads: the
// leader alone knows the queue. It stands in no queue group: a leader that was
// frozen and replaced still has its subscription, and every question that went to
// it alone would get no answer.
func (r *reign) serveStatus(ctx context.Context) error {
	described, err := endpoint.Describe("admission.status", "Leader, slots in use, queue; with task_id the place of a waiting task.")
	if err != nil {
		return err
	}
	svc, err := micro.AddService(r.s.bus.NC, micro.Config{
		Name: "herdgate-admission", Version: "1.0.0", Description: "state of the admission gate",
	})
	if err != nil {
		return err
	}
	defer svc.Stop() //nolint:errcheck // the connection goes with it
	err = svc.AddEndpoint("status", endpoint.Handler(r.s.log, func(req micro.Request) { r.answer(ctx, req) }),
		micro.WithEndpointSubject(admissionapi.Subject(r.s.bus.Names)), micro.WithEndpointQueueGroupDisabled(),
		described)
	if err != nil {
		return err
	}
	if err := r.s.bus.NC.Flush(); err != nil {
		r.s.log.Debug().Err(err).Msg("flush after adding the status endpoint")
	}
	<-ctx.Done()
	return nil
}

func (r *reign) answer(ctx context.Context, req micro.Request) {
	var ask admissionapi.StatusRequest
	if len(req.Data()) > 0 {
		if err := json.Unmarshal(req.Data(), &ask); err != nil {
			_ = req.Error("400", "the request is not JSON of the form {\"task_id\": \"…\"}", nil)
			return
		}
	}
	reply := make(chan admissionapi.Status, 1)
	select {
	case r.status <- statusCall{ask, reply}:
		select {
		case st := <-reply:
			_ = req.RespondJSON(st)
		case <-ctx.Done():
			_ = req.Error("503", "not leading any more", nil)
		}
	case <-ctx.Done():
		_ = req.Error("503", "not leading any more", nil)
	case <-time.After(time.Second):
		_ = req.Error("503", "busy", nil)
	}
}

func sortSlots(slots []admissionapi.Slot) {
	slices.SortFunc(slots, func(a, b admissionapi.Slot) int { return cmp.Or(cmp.Compare(a.Pool, b.Pool), a.Slot-b.Slot) })
}

func isKV(subject string) bool { return strings.HasPrefix(subject, "$KV.") }

func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	v := t.UTC()
	return &v
}
