package system

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/lead"
)

// What a tenant of the test has: a run that has ended, with one task, and a task that
// is held.
type owner struct {
	token  string
	api    *client.Client
	thread contract.ThreadID
	run    wire.Run
	held   wire.TaskAccepted
	events []contract.EventRecord
}

// secrets are what nobody else may read.
func (o owner) secrets() []string {
	out := []string{string(o.thread), string(o.run.RunID), string(o.held.TaskID), string(o.held.RunID), o.run.TraceID, "CONFIDENTIAL", "confidential", "acme"}
	for _, d := range o.run.Delegations {
		out = append(out, string(d.TaskID))
	}
	return out
}

// Over HTTP a tenant sees nothing of another one: not by id, filter, cursor or
// position, not in what is counted, and not by a difference between what the other one
// has and what nobody has. ADM-03, EVT-17, EVT-18.
func TestTenantsOverHTTP(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Model: fates{}})
	s.Sink("sink-1", t.TempDir())
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	tokens := map[string]string{"ACME": "acme-token", "RIVAL": "rival-token"}
	_, addr := s.LeadOf("lead-1", t.TempDir(), lead.HTTPConfig{
		AuthMode: "tokens", KeepAlive: 50 * time.Millisecond, Getenv: func(name string) string { return tokens[name] },
		Tokens: []lead.Token{{Name: "a", TokenEnv: "ACME", Tenant: "acme"}, {Name: "b", TokenEnv: "RIVAL", Tenant: "rival"}},
	})
	work := func(token, thread, word string) owner {
		t.Helper()
		o := owner{token: token, api: s.client(addr, token), thread: contract.ThreadID(thread)}
		var err error
		if o.run, err = o.api.RunToEnd(timeout(t), wire.RunRequest{Input: "find " + word, ThreadID: thread}); err != nil {
			t.Fatal(err)
		}
		if o.held, err = o.api.SubmitTask(timeout(t), wire.TaskRequest{SubagentType: "general-purpose", Prompt: "hold " + word, ThreadID: thread}); err != nil {
			t.Fatal(err)
		}
		natstest.Eventually(t, Timeout, func() (bool, string) {
			// The run's end, and the start of the task that is held.
			o.events = listed(t, o.api, client.EventQuery{})
			has := func(run contract.RunID, kind string) bool {
				return slices.ContainsFunc(o.events, func(r contract.EventRecord) bool { return r.RunID == run && r.EventType == kind })
			}
			return has(o.run.RunID, contract.RecordRunCompleted) && has(o.held.RunID, contract.RecordStart), fmt.Sprint(len(o.events), " events")
		})
		return o
	}
	acme := work("acme-token", "confidential-thread", "confidential")
	rival := work("rival-token", "rival-thread", "nothing")
	acmeSeq := acme.events[len(acme.events)-1].Seq
	acmePage, err := acme.api.ListEvents(timeout(t), client.EventQuery{Limit: 2}, 0)
	if err != nil || !acmePage.HasMore {
		t.Fatal(acmePage, err)
	}

	ask := func(method, path string, header ...string) (int, string) {
		t.Helper()
		resp, err := send(timeout(t), method, addr, path, append(header, "Authorization", "Bearer "+rival.token)...)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	mustNotTell := func(what, body string) {
		t.Helper()
		for _, secret := range acme.secrets() {
			if secret != "" && strings.Contains(body, secret) {
				t.Errorf("%s tells %q: %.500s", what, secret, body)
			}
		}
	}
	// Each of these is asked with what acme has and with what nobody has; both answers
	// must be the same. {run}, {task}, {held}, {thread} stand for the ids.
	task := acme.run.Delegations[0].TaskID
	real := strings.NewReplacer("{run}", string(acme.run.RunID), "{task}", string(task), "{held}", string(acme.held.TaskID), "{thread}", string(acme.thread))
	none := Request("none")
	made := strings.NewReplacer("{run}", string(none.RunID), "{task}", string(none.TaskID), "{held}", string(none.TaskID), "{thread}", string(none.ThreadID))
	same := strings.NewReplacer(
		string(acme.run.RunID), "ID", string(none.RunID), "ID", string(task), "ID", string(acme.held.TaskID), "ID", string(none.TaskID), "ID",
		string(acme.thread), "ID", string(none.ThreadID), "ID")
	covered := map[string]bool{"POST /v1/runs": true, "POST /v1/tasks": true, "GET /v1/events": true}
	for _, tc := range []struct {
		route, method, path string
		status              int
	}{
		{"", "GET", "/v1/events?run_id={run}", 200},
		{"", "GET", "/v1/events?task_id={task}", 200},
		{"", "GET", "/v1/events?task_id={task}&attempts=all", 200},
		{"", "GET", "/v1/events?thread_id={thread}", 200},
		{"", "GET", "/v1/events?thread_id={thread}&run_id={run}&task_id={task}&type=subagent.end", 200},
		{"", "GET", "/v1/events?run_id={run}&type=run.completed,subagent.end&limit=1", 200},
		{"", "GET", "/v1/events?run_id={run}&after_seq=" + strconv.FormatUint(acmePage.NextAfterSeq, 10), 200},
		{"", "GET", "/v1/events?task_id={held}&limit=2000", 200},
		{"/v1/runs", "GET", "/v1/runs?thread_id={thread}", 200},
		{"", "GET", "/v1/runs?thread_id={thread}&status=completed", 200},
		{"/v1/runs/{run_id}", "GET", "/v1/runs/{run}", 404},
		{"/v1/runs/{run_id}/cancel", "POST", "/v1/runs/{run}/cancel", 404},
		{"/v1/tasks", "GET", "/v1/tasks?run_id={run}", 200},
		{"", "GET", "/v1/tasks?run_id={run}&status=completed", 200},
		{"/v1/tasks/{task_id}", "GET", "/v1/tasks/{task}", 404},
		{"", "GET", "/v1/tasks/{held}", 404},
		{"/v1/tasks/{task_id}/cancel", "POST", "/v1/tasks/{held}/cancel", 404},
		{"", "POST", "/v1/tasks/{task}/cancel", 404}, // it has ended: not 409
	} {
		covered[tc.method+" "+tc.route] = true
		status, body := ask(tc.method, real.Replace(tc.path))
		other, want := ask(tc.method, made.Replace(tc.path))
		if status != tc.status || other != tc.status || same.Replace(body) != same.Replace(want) {
			t.Errorf("%s %s: %d %.300s; for ids that nobody has %d %.300s; want %d and the same", tc.method, tc.path, status, body, other, want, tc.status)
		}
		mustNotTell(tc.path, same.Replace(body))
	}

	// Without a filter, and from any position, come the tenant's own events alone, all of
	// them, each once.
	for _, after := range []uint64{0, acmePage.NextAfterSeq, acmeSeq, rival.events[0].Seq} {
		for _, limit := range []int{1, 2, 500} {
			var got, want []uint64
			for _, r := range rival.events {
				if r.Seq > after {
					want = append(want, r.Seq)
				}
			}
			for next, more := after, true; more; {
				_, body := ask("GET", fmt.Sprintf("/v1/events?limit=%d&after_seq=%d", limit, next))
				mustNotTell("a page", body)
				var page wire.EventPage
				if err := json.Unmarshal([]byte(body), &page); err != nil {
					t.Fatal(err, body)
				}
				for _, r := range page.Events {
					got = append(got, r.Seq)
				}
				if page.PrunedSeq != 0 || page.HasMore && len(page.Events) != limit {
					t.Errorf("limit %d after %d: %d events, more %v, pruned %d", limit, next, len(page.Events), page.HasMore, page.PrunedSeq)
				}
				next, more = page.NextAfterSeq, page.HasMore
			}
			if !slices.Equal(got, want) {
				t.Errorf("after %d by %d: %v, want %v", after, limit, got, want)
			}
		}
	}
	for path, want := range map[string]int{
		"/v1/runs?limit=200":                                1,
		"/v1/tasks?limit=200":                               2,
		"/v1/runs?limit=1&cursor=" + string(acme.run.RunID): -1, // a position like any other
		"/v1/tasks?limit=1&cursor=zz":                       -1,
		"/v1/tasks?status=running":                          1,
		"/v1/admission":                                     -1,
	} {
		status, body := ask("GET", path)
		mustNotTell(path, body)
		var page struct{ Runs, Tasks []json.RawMessage }
		if err := json.Unmarshal([]byte(body), &page); err != nil || status != 200 || want >= 0 && len(page.Runs)+len(page.Tasks) != want {
			t.Errorf("%s: %d %.300s, %v; want %d entries", path, status, body, err, want)
		}
	}

	// Streams: acme's held task ends while rival listens for it. Rival's stream of a run
	// that has ended for acme is open, as it is for a run that nobody has.
	streams := map[string]*rawStream{}
	for _, path := range []string{
		"/v1/events?run_id={run}", "/v1/events?task_id={held}", "/v1/events?thread_id={thread}", "/v1/events?thread_id={thread}&type=subagent.end",
		"/v1/events?run_id={run}&after_seq=1", "/v1/events?task_id={task}&attempts=all",
	} {
		for _, position := range []string{"", "1", strconv.FormatUint(acmeSeq, 10)} {
			st := openStream(t, addr, real.Replace(path), "Authorization", "Bearer "+rival.token, "Last-Event-ID", position)
			if st.resp.StatusCode != 200 {
				t.Errorf("stream of %s from %q: %d, want 200", path, position, st.resp.StatusCode)
				continue
			}
			streams[path+" from "+position] = st
		}
	}
	all := openStream(t, addr, "/v1/events", "Authorization", "Bearer "+rival.token)
	own := openStream(t, addr, real.Replace("/v1/events?task_id={held}"), "Authorization", "Bearer "+acme.token)
	if err := acme.api.CancelTask(timeout(t), acme.held.TaskID); err != nil {
		t.Fatal(err)
	}
	until := func(st *rawStream, ok func(contract.EventRecord) bool) []uint64 {
		t.Helper()
		var seqs []uint64
		for {
			b, more := st.next()
			if !more {
				t.Fatal("a stream has ended")
			}
			if b.data == "" {
				continue
			}
			var rec contract.EventRecord
			if err := json.Unmarshal([]byte(b.data), &rec); err != nil || b.event == wire.EventGap {
				t.Fatal(b, err)
			}
			seqs = append(seqs, rec.Seq)
			if ok(rec) {
				return seqs
			}
			if st == all {
				mustNotTell("rival's stream", b.data)
			}
		}
	}
	until(own, func(r contract.EventRecord) bool { return r.EventType == contract.RecordEnd })
	if err := rival.api.CancelTask(timeout(t), rival.held.TaskID); err != nil {
		t.Fatal(err)
	}
	// Before acme's stream of the same lead told it, all others could have.
	got := until(all, func(r contract.EventRecord) bool {
		return r.TaskID == rival.held.TaskID && r.EventType == contract.RecordEnd
	})
	if want := len(rival.events) + 1; len(got) < want || !slices.IsSorted(got) {
		t.Errorf("rival's stream has %v, want %d events or more", got, want)
	}
	for what, st := range streams {
		for beats := 0; beats < 2; {
			b, more := st.next()
			if !more {
				t.Errorf("%s: the stream has ended", what)
				break
			}
			if b.data != "" || b.event != "" || b.id != "" {
				t.Errorf("%s: rival is told %+v", what, b)
			}
			if b.comment == "keep-alive" {
				beats++
			}
		}
	}
	// What rival tried has changed nothing: acme's own cancellation ended the task.
	if view, err := acme.api.GetTask(timeout(t), acme.held.TaskID); err != nil || view.Status != contract.TaskCancelled {
		t.Errorf("acme's task: %+v, %v", view, err)
	}

	// A position that never was is told back in the same way to everybody.
	beyond := openStream(t, addr, "/v1/events", "Authorization", "Bearer "+rival.token, "Last-Event-ID", "1000000")
	for {
		b, more := beyond.next()
		if !more {
			t.Fatal("no gap was told")
		}
		if b.event == "" {
			continue
		}
		var gap wire.Gap
		if err := json.Unmarshal([]byte(b.data), &gap); err != nil || b.event != wire.EventGap || gap.ToSeq != 1000000 {
			t.Errorf("a position that never was: %+v, %v", b, err)
		}
		break
	}

	// Whatever else these routes get must be asked above as well.
	_, doc := ask("GET", "/openapi.json")
	var api struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal([]byte(doc), &api); err != nil {
		t.Fatal(err)
	}
	for path, methods := range api.Paths {
		for method := range methods {
			for _, of := range []string{"/v1/runs", "/v1/tasks", "/v1/events", "/v1/threads", "/v1/artifacts"} {
				if op := strings.ToUpper(method) + " " + path; strings.HasPrefix(path, of) && !covered[op] {
					t.Errorf("%s is served, and nobody tries here what it tells of other tenants", op)
				}
			}
		}
	}
	if len(api.Paths) == 0 {
		t.Error("the OpenAPI document has no paths")
	}
}
