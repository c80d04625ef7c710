package event

import (
	"strings"
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// EVT-21: what an event says of itself is completed from its subject, never in spite of it.
func TestComplete(t *testing.T) {
	t.Parallel()
	at := contract.EventSubject{Tenant: "acme", Thread: "th", Run: "r_1", Task: "t_1", Type: contract.EventTaskStarted}
	whole := envelope.Event{Tenant: "acme", ThreadID: "th", RunID: "r_1", TaskID: "t_1", Type: contract.EventTaskStarted}
	hashed := at
	hashed.Thread = contract.ThreadID("two words").Token()
	for name, tc := range map[string]struct {
		at   contract.EventSubject
		ev   envelope.Event
		diff string // "" is well
	}{
		"whole":               {at, whole, ""},
		"nothing but a type":  {at, envelope.Event{Type: whole.Type}, ""},
		"another tenant":      {at, envelope.Event{Tenant: "rival", Type: whole.Type}, "tenant"},
		"another thread":      {at, envelope.Event{ThreadID: "else", Type: whole.Type}, "thread"},
		"another run":         {at, envelope.Event{RunID: "r_2", Type: whole.Type}, "run"},
		"another task":        {at, envelope.Event{TaskID: "t_2", Type: whole.Type}, "task"},
		"another type":        {at, envelope.Event{Type: contract.EventTaskFailed}, "type"},
		"a thread's digest":   {hashed, envelope.Event{ThreadID: "two words", Type: whole.Type}, ""},
		"no thread for that":  {hashed, envelope.Event{Type: whole.Type}, "thread"},
		"the digest as an id": {hashed, envelope.Event{ThreadID: contract.ThreadID(hashed.Thread), Type: whole.Type}, "thread"},
	} {
		err := Complete(&tc.ev, tc.at)
		switch {
		case tc.diff == "" && (err != nil || tc.ev.Tenant != "acme" || tc.ev.RunID != "r_1" || tc.ev.TaskID != "t_1" || tc.ev.ThreadID.Token() != tc.at.Thread):
			t.Errorf("%s: %+v, %v", name, tc.ev, err)
		case tc.diff != "" && (err == nil || !strings.Contains(err.Error(), tc.diff+" is")):
			t.Errorf("%s: %v; want an error about the %s", name, err, tc.diff)
		}
	}
}
