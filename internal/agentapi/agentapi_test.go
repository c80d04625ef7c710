package agentapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/agentapi"
	"github.com/herdgate/herdgate/internal/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A list whose pages are of different revisions is read anew until they are of one, and
// given up when that never comes; answers that make no sense are the store's fault.
func TestAll(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	for name, tt := range map[string]struct {
		// answer gives the n-th answer, whose request is r.
		answer func(n int, r agentapi.AgentsRequest) any
		want   string
		err    error
	}{
		"two pages": {func(_ int, r agentapi.AgentsRequest) any {
			return page(7, r.AfterName == "", map[bool]string{true: "a", false: "b"}[r.AfterName == ""])
		}, "[a b] at 7", nil},
		"changed between": {func(n int, r agentapi.AgentsRequest) any {
			return page(map[bool]uint64{true: 7, false: 8}[n == 1], r.AfterName == "", map[bool]string{true: "a", false: "b"}[r.AfterName == ""])
		}, "[a b] at 8", nil},
		"never the same": {func(n int, r agentapi.AgentsRequest) any { return page(uint64(n), true, "a") }, "", agentapi.ErrUnavailable},
		"unchanged": {func(_ int, r agentapi.AgentsRequest) any {
			return agentapi.AgentsPage{Revision: r.UnlessRevision, Unchanged: true}
		}, "[] at 5", nil},
		"empty and not the last": {func(n int, _ agentapi.AgentsRequest) any { return agentapi.AgentsPage{Revision: 7, HasMore: true} }, "", agentapi.ErrUnavailable},
		"second page empty": {func(n int, _ agentapi.AgentsRequest) any {
			if n == 1 {
				return page(7, true, "a")
			}
			return agentapi.AgentsPage{Revision: 7, HasMore: true}
		}, "", agentapi.ErrUnavailable},
		"no JSON": {func(int, agentapi.AgentsRequest) any { return nil }, "", agentapi.ErrUnavailable},
		"refused": {func(int, agentapi.AgentsRequest) any {
			return agentapi.AgentsPage{Error: &agentapi.Refusal{Code: "of_a_later_version", Message: "m"}}
		}, "", agentapi.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			sub, err := c.NC.Subscribe(agentapi.ListSubject(c.Names), func(m *nats.Msg) {
				n++
				r, err := agentapi.Decode[agentapi.AgentsRequest](m.Data)
				if err != nil {
					t.Error(err)
				}
				b, err := json.Marshal(tt.answer(n, r))
				if string(b) == "null" {
					b = []byte("{")
				}
				if err = errors.Join(err, m.Respond(b)); err != nil {
					t.Error(err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = sub.Unsubscribe() }()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			all, err := agentapi.All(ctx, c, 5)
			var names []string
			for _, a := range all.Agents {
				names = append(names, a.Name)
			}
			got := fmt.Sprintf("%v at %d", names, all.Revision)
			if !errors.Is(err, tt.err) || tt.err == nil && got != tt.want {
				t.Errorf("%s, %v, want %s, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

func page(revision uint64, more bool, name string) agentapi.AgentsPage {
	return agentapi.AgentsPage{Agents: []agentapi.Agent{{Name: name, Revision: 1, Definition: json.RawMessage(`{}`)}}, Revision: revision, HasMore: more}
}

// Nobody there is told apart from no answer: nothing was done then. An answer to a
// change that says nothing leaves it in doubt.
func TestChangesInDoubt(t *testing.T) {
	t.Parallel()
	_, c := natstest.New(t)
	put := agentapi.AgentPut{Name: "coder", Definition: json.RawMessage(`{}`)}
	if _, err := agentapi.Put(t.Context(), c, put); !errors.Is(err, agentapi.ErrUnavailable) || !errors.Is(err, agentapi.ErrNobody) {
		t.Errorf("nobody: %v", err)
	}
	if _, err := agentapi.Put(t.Context(), c, agentapi.AgentPut{Name: "a.b"}); !errors.Is(err, agentapi.ErrInvalid) || !strings.Contains(err.Error(), "definition is missing") {
		t.Errorf("a bad name: %v", err)
	}
	sub, err := c.NC.Subscribe(agentapi.PutSubject(c.Names), func(m *nats.Msg) { _ = m.Respond([]byte(`{}`)) })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if _, err := agentapi.Put(t.Context(), c, put); !errors.Is(err, agentapi.ErrUnavailable) || errors.Is(err, agentapi.ErrNobody) {
		t.Errorf("an empty answer: %v", err)
	}
}
