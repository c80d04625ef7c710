package doctor

import (
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
)

// users are the users of a server: one whose permissions are given, and one for the rest.
func users(t *testing.T, permissions string) natstest.Option {
	t.Helper()
	var told server.Options
	if err := told.ProcessConfigString(`authorization { users = [ { user: "all", password: "all" }, { user: "me", password: "me", permissions { ` + permissions + ` } } ] }`); err != nil {
		t.Fatal(err)
	}
	return natstest.Tune(func(o *server.Options) {
		o.Users, o.NoAuthUser, o.JetStreamMaxStore = told.Users, "all", 1<<40
	})
}

func withRights(t *testing.T, permissions string) Patient {
	t.Helper()
	s := natstest.Start(t, natstest.Listen(), users(t, permissions))
	s.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64, EventMaxBytes: provision.DefaultEventMaxBytes})
	p := patient(t, lead(t, 200))
	p.Env.Config.NATS.URL = config.Address(strings.Replace(s.URL(), "nats://", "nats://me:me@", 1))
	return p
}

func mendOf(r Report, name string) string {
	for _, c := range r.Checks {
		if c.Name == name {
			return c.Mend
		}
	}
	return ""
}

// A right that is missing is named, with its subject and what to add.
func TestMissingRights(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		permissions string
		missing     []string // what the check says
		add         []string
		streams     bool // are looked at all the same
	}{
		"none is missing": {permissions: `publish { allow: ["$JS.API.>", "hg.v1.svc.>"] }`, streams: true},
		"a question about a stream": {
			permissions: `publish { allow: ["$JS.API.>", "hg.v1.svc.>"], deny: ["$JS.API.STREAM.INFO.HG_WORK", "$JS.API.CONSUMER.INFO.HG_EVENTS.>"] }`,
			missing:     []string{"publish to $JS.API.STREAM.INFO.HG_WORK", "$JS.API.CONSUMER.INFO.HG_EVENTS."},
			add:         []string{`publish { allow: ["$JS.API.STREAM.INFO.HG_WORK", "$JS.API.CONSUMER.INFO.HG_EVENTS.`},
		},
		"the event sink": {
			permissions: `publish { allow: ["$JS.API.>"] }`,
			missing:     []string{"publish to hg.v1.svc.events.list"}, add: []string{`publish { allow: ["hg.v1.svc.events.list"] }`}, streams: true,
		},
		"answers": {
			permissions: `subscribe { allow: ["_INBOX.>"] }`,
			missing:     []string{"subscribe to _INBOX_doctor-test.>"}, add: []string{`subscribe { allow: ["_INBOX_doctor-test.>"] }`},
		},
		"both": {
			permissions: `subscribe { allow: ["hg.v1.event.>"] }, publish { allow: ["hg.v1.event.>"] }`,
			missing:     []string{"publish to $JS.API.INFO, $JS.API.STREAM.INFO.", ", nor subscribe to _INBOX_doctor-test.>"},
			add:         []string{`publish { allow: ["$JS.API.INFO", `, `subscribe { allow: ["_INBOX_doctor-test.>"] }`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := withRights(t, tc.permissions)
			p.Timeout = natstest.Timeout
			r := Examine(t.Context(), p)
			if len(tc.missing) == 0 {
				expect(t, r, "nats rights", OK, "")
			}
			for _, word := range tc.missing {
				expect(t, r, "nats rights", Fail, word)
			}
			for _, word := range tc.add {
				if mend := mendOf(r, "nats rights"); !strings.Contains(mend, word) {
					t.Errorf("it says %q; want %q in it", mend, word)
				}
			}
			if tc.streams {
				expect(t, r, "streams", OK, "as they should be")
			} else {
				// Nothing waits for an answer that cannot come.
				expect(t, r, "event sink", Warn, map[bool]string{true: "may not", false: "no event sink answers"}[strings.Contains(name, "answers") || name == "both"])
				for _, c := range r.Checks {
					if c.Name == "streams" || c.Name == "jetstream" {
						t.Errorf("%+v was found out without the rights for it", c)
					}
				}
			}
		})
	}
}

var toAdd = regexp.MustCompile(`another user: (.*); docs/`)

// What the doctor says to add is enough.
func TestRightsToAddAreEnough(t *testing.T) {
	t.Parallel()
	found := toAdd.FindStringSubmatch(mendOf(Examine(t.Context(), withRights(t, `publish { allow: ["x"] }, subscribe { allow: ["x"] }`)), "nats rights"))
	if found == nil {
		t.Fatal("it does not say what to add")
	}
	r := Examine(t.Context(), withRights(t, found[1]))
	expect(t, r, "nats rights", OK, "")
	expect(t, r, "streams", OK, "as they should be")
}

// The history needs more rights, and says which.
func TestMissingRightsForHistory(t *testing.T) {
	t.Parallel()
	p := withRights(t, `publish { allow: ["$JS.API.>", "hg.v1.svc.>"], deny: ["$JS.API.CONSUMER.CREATE.>"] }`)
	p.Past = &Past{}
	r := Examine(t.Context(), p)
	expect(t, r, "nats rights", OK, "")
	expect(t, r, "history", Fail, "publish to $JS.API.CONSUMER.CREATE.")
	if mend := mendOf(r, "history"); !regexp.MustCompile(`publish \{ allow: \["\$JS\.API\.CONSUMER\.CREATE\.\w+\.>"`).MatchString(mend) {
		t.Errorf("it says %q", mend)
	}
}
