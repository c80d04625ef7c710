package endpoint

import (
	"errors"
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
)

// What a caller was allowed decides whom it speaks for, not what it says.
func TestTenantOf(t *testing.T) {
	t.Parallel()
	const base = "hg.v1.svc.events.list"
	for _, tc := range []struct {
		subject string
		asked   contract.Tenant
		want    contract.Tenant
		refused bool
	}{
		{base, "acme", "acme", false},
		{base, "", "", false},
		{Bound(base, "acme"), "", "acme", false},
		{Bound(base, "acme"), "acme", "acme", false},
		{Bound(base, "acme"), "other", "", true},
		{Bound(base, "*"), "", "", true},
		{base + ".acme.other", "", "", true},
	} {
		got, err := TenantOf(base, tc.subject, tc.asked)
		if got != tc.want || (err != nil) != tc.refused {
			t.Errorf("TenantOf(%s, asked %q) = %q, %v; want %q, refused %v", tc.subject, tc.asked, got, err, tc.want, tc.refused)
		}
	}
}

func TestDescribe(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"task.submit", "task.get", "task.cancel", "events.list", "admission.status"} {
		if _, err := Describe(name, "text"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Describe("no.such", ""); !errors.Is(err, schema.ErrUnknown) {
		t.Errorf("an endpoint without schemas: %v", err)
	}
}

// An answer goes into an inbox, as clients and servers name them, and nowhere else.
func TestIsInbox(t *testing.T) {
	t.Parallel()
	for reply, want := range map[string]bool{
		"_INBOX.a.b": true, "_INBOX_team.a": true, "_R_.a.b": true,
		"$KV.HG_TASKS.task.t_1": false, "hg.v1.event.a.b.c.d.e": false, "x._INBOX.a": false, "_inbox.a": false, "_R_": false,
	} {
		if isInbox(reply) != want {
			t.Errorf("isInbox(%q) = %v", reply, !want)
		}
	}
}
