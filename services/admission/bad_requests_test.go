package admission

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// F-058: a message that is no request is put aside. It may be the only one there
// is when a reign begins: the gate opens all the same.
func TestForeignMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.put(bus.Write{Subject: w.bus.Names.Prefix() + ".task.request.default.no$id", Data: []byte("hello")})
	w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	natstest.Eventually(t, patience, func() (bool, string) {
		l := w.letters()
		return len(l) == 1 && strings.Contains(l[0], "no$id") && w.queue() == 0, fmt.Sprintf("%d left, letters %q", w.queue(), l)
	})
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := w.bus.Last(w.ctx, w.bus.TaskStream(), w.bus.KV(contract.LimitsKey)) // written when the gate opens
		return err == nil && len(m.Data) > 0, fmt.Sprint("the gate is shut: ", err)
	})
}

// F-058, STATUS-10, ADM-07: a request that can never be run ends as failed with
// the reason, is kept among the dead letters, leaves the queue, and holds up
// nobody behind it.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	change := func(f func(*contract.TaskRequest)) func(string) []byte {
		return func(id string) []byte {
			r := request(id)
			f(&r)
			return encode(t, r)
		}
	}
	for _, c := range []struct {
		name string
		data func(id string) []byte
		want string
	}{
		{"cut", func(string) []byte { return []byte(`{"contract_version":`) }, "unexpected end"},
		{"empty", func(string) []byte { return nil }, "unexpected end"},
		{"too deep", func(string) []byte { return []byte(strings.Repeat("[", 10_000)) }, "nested too deeply"},
		{"another id", change(func(r *contract.TaskRequest) { r.TaskID = "t_else" }), `"t_else"`},
		{"another tenant", change(func(r *contract.TaskRequest) { r.Tenant = "else" }), `"else"`},
		{"no turns", change(func(r *contract.TaskRequest) { r.Subagent.MaxTurns = 0 }), "max_turns is 0"},
		{"a pool that nobody serves", change(func(r *contract.TaskRequest) { r.Pool = "gpu" }), `pool is "gpu"; this gate has ["default"]`},
		// Nothing else bounds a name, and it stands in the record as well.
		{"a name without end", change(func(r *contract.TaskRequest) { r.Subagent.Name = strings.Repeat("n", 180_000) }), "its grant would have"},
		// In our own encoding each of these characters takes six bytes.
		{"text that grows", func(id string) []byte {
			r := request(id)
			r.Prompt = strings.Repeat("<", 180_000)
			return []byte(strings.ReplaceAll(string(encode(t, r)), `\u003c`, "<"))
		}, "its grant would have"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
			w.store("t_bad", c.data("t_bad"))
			w.submit("t_good")
			rec := w.reaches("t_bad", contract.StateFailed)
			if rec.ErrorCode != contract.ErrInvalidRequest || !strings.Contains(rec.Error, c.want) || rec.Attempt != 0 || rec.AdmissionFailure {
				t.Errorf("record = %.1000s, want %q in its error", fmt.Sprintf("%+v", rec), c.want)
			}
			w.reaches("t_good", contract.StateGranted)
			natstest.Eventually(t, patience, func() (bool, string) {
				l := w.letters()
				return len(l) == 1 && strings.Contains(l[0], c.want) && w.queue() == 1, fmt.Sprintf("%d left, letters %q", w.queue(), l)
			})
		})
	}
}

// F-058: what cannot be kept among the dead letters topples no leader and holds up
// no task.
func TestDeadLettersAreDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	if err := w.bus.JS.DeleteStream(w.ctx, w.bus.Names.DeadStream()); err != nil {
		t.Fatal(err)
	}
	w.store("t_bad", []byte("{"))
	w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	w.submit("t_good")
	w.reaches("t_bad", contract.StateFailed)
	w.reaches("t_good", contract.StateGranted)
	if rec, _ := w.record("t_good"); rec.Epoch != w.status("adm-1").Epoch {
		t.Error("the leader was toppled")
	}
}

// F-058, ADM-09: a grant that the server does not take ends its task; grants are
// sent in order, so those behind it must not wait for one that never goes.
func TestGrantTooLarge(t *testing.T) {
	t.Parallel()
	const limit = 64 << 10
	w := newWorld(t, 1, natstest.MaxPayload(limit))
	big := request("t_big")
	for {
		b := encode(t, big)
		if len(b) >= limit-50 { // it fits; its grant does not
			break
		}
		big.Prompt += strings.Repeat("x", limit-50-len(b))
	}
	w.store("t_big", encode(t, big))
	w.submit("t_good")
	w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
	rec := w.reaches("t_big", contract.StateFailed)
	if rec.ErrorCode != contract.ErrInternal || !strings.Contains(rec.Error, "too large") || rec.Attempt != 1 {
		t.Errorf("record = %+v", rec)
	}
	w.reaches("t_good", contract.StateGranted)
	natstest.Eventually(t, patience, func() (bool, string) {
		m, err := w.bus.Last(w.ctx, w.bus.Names.GrantStream(), w.bus.Names.TaskGrant(contract.DefaultPool, "t_good"))
		var g contract.Grant
		return err == nil && json.Unmarshal(m.Data, &g) == nil && g.TaskID == "t_good", fmt.Sprint("no grant: ", err)
	})
}

// REG-14, REG-15: the gate goes by the copy of the caller's policy that a request
// carries. What it does not permit ends with the reason, told under its own run.
func TestRequestAgainstItsOwnPolicy(t *testing.T) {
	t.Parallel()
	for name, allowed := range map[string][]string{"none": {}, "others": {"coder", "General-Purpose"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			w.run(w.service(w.srv.Conn("adm-1"), "adm-1", nil))
			bad, good := request("t_bad"), request("t_good")
			bad.AllowedSubagents, good.AllowedSubagents = allowed, []string{good.Subagent.Name}
			w.store("t_bad", encode(t, bad))
			w.store("t_good", encode(t, good))
			rec := w.reaches("t_bad", contract.StateFailed)
			if rec.ErrorCode != contract.ErrPolicyDenied || !strings.Contains(rec.Error, "allowed_subagents") || rec.RunID != bad.RunID || rec.Attempt != 0 {
				t.Errorf("record = %+v", rec)
			}
			w.reaches("t_good", contract.StateGranted)
		})
	}
}
