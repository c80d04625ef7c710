package doctor

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
	rules "github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/pgtest"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

func TestMain(m *testing.M) {
	sandbox.Main()
	goleak.VerifyTestMain(m)
}

// lead answers /readyz with a status.
func lead(t *testing.T, status int) string {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprint(w, `{"status":"x","checks":{"admission: nats":"no leader"}}`)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func nobody(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// patient is one whose server does not answer and who has nothing configured.
func patient(t *testing.T, server string) Patient {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	c, err := client.New(server, "", hc)
	if err != nil {
		t.Fatal(err)
	}
	return Patient{
		Env:     &process.Env{Config: config.Default(), Name: "test", Log: zerolog.Nop(), Metrics: telemetry.NewMetrics("test", "0")},
		DataDir: filepath.Join(t.TempDir(), "data"), Client: c, Server: server,
		Getenv: func(name string) string { return map[string]string{"HAS_KEY": "secret-key"}[name] },
	}
}

// expect checks one result of an examination: its status, a word of it, and
// that what is not well can be mended.
func expect(t *testing.T, r Report, name string, status Status, word string) {
	t.Helper()
	for _, c := range r.Checks {
		if c.Name != name {
			continue
		}
		if c.Status != status || !strings.Contains(c.Detail, word) {
			t.Errorf("%s is %s (%s), want %s with %q", name, c.Status, c.Detail, status, word)
		}
		if (c.Mend == "") != (c.Status == OK) {
			t.Errorf("%s is %s and says %q about mending it", name, c.Status, c.Mend)
		}
		return
	}
	t.Errorf("no check is called %s: %+v", name, r.Checks)
}

func TestNothingIsThereYet(t *testing.T) {
	t.Parallel()
	p := patient(t, "http://"+nobody(t))
	r := Examine(t.Context(), p)
	expect(t, r, "nats", Warn, "no embedded one is running")
	expect(t, r, "data directory", OK, "not there yet")
	expect(t, r, "event store", OK, "not there yet")
	expect(t, r, "models", Warn, "none is configured")
	expect(t, r, "tracing", OK, "off")
	expect(t, r, "lead", Warn, "nobody answers")
	if !r.OK {
		t.Errorf("warnings count as failures: %+v", r)
	}
	if _, err := os.Stat(p.DataDir); err == nil {
		t.Error("the doctor has made the data directory")
	}
}

func TestEmbeddedServer(t *testing.T) {
	t.Parallel()
	p := patient(t, lead(t, 200))
	dir := filepath.Join(p.DataDir, "nats")
	s, err := natsd.Start(t.Context(), natsd.Config{StoreDir: dir, Log: zerolog.Nop(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	r := Examine(t.Context(), p)
	expect(t, r, "nats", OK, fmt.Sprintf("process %d", os.Getpid()))
	expect(t, r, "lead", OK, "ready")
	// One that listens is looked into.
	p.Env.Config.NATS.Embedded.Listen = strings.TrimPrefix(s.ClientURL(), "nats://")
	r = Examine(t.Context(), p)
	expect(t, r, "nats", OK, "answers in")
	expect(t, r, "streams", Fail, "HG_WORK is missing")
	s.Stop()
	expect(t, Examine(t.Context(), p), "nats", Warn, "no embedded one is running")
}

func TestOutsideServer(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t, natstest.Listen(), natstest.Tune(func(o *server.Options) { o.JetStreamMaxStore = 1 << 40 }))
	p := patient(t, lead(t, 503))
	p.Env.Config.NATS.URL = config.Address(s.URL())
	r := Examine(t.Context(), p)
	expect(t, r, "nats", OK, "answers in")
	expect(t, r, "jetstream", OK, "")
	expect(t, r, "streams", Fail, "HG_WORK is missing")
	expect(t, r, "event sink", Warn, "no event sink answers")
	expect(t, r, "lead", Fail, "not ready")
	if r.OK {
		t.Error("failures do not count")
	}
	s.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64, EventMaxBytes: provision.DefaultEventMaxBytes})
	expect(t, Examine(t.Context(), p), "streams", OK, "as they should be")
	p.Env.Config.SubagentRuntime.MaxQueued = 7
	expect(t, Examine(t.Context(), p), "streams", Warn, "max_msgs")
}

func TestServerWithoutJetStream(t *testing.T) {
	t.Parallel()
	p := patient(t, lead(t, 404))
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.WaitForShutdown()
	defer srv.Shutdown()
	if !srv.ReadyForConnections(natstest.Timeout) {
		t.Fatal("the server is not ready")
	}
	p.Env.Config.NATS.URL = config.Address(srv.ClientURL())
	r := Examine(t.Context(), p)
	expect(t, r, "jetstream", Fail, "JetStream is not enabled")
	expect(t, r, "lead", Fail, "404")
}

func TestServerThatIsNotThere(t *testing.T) {
	t.Parallel()
	p := patient(t, lead(t, 200))
	p.Timeout = 200 * time.Millisecond
	p.Env.Config.NATS.URL = config.Address("nats://me:hidden-password@" + nobody(t))
	r := Examine(t.Context(), p)
	expect(t, r, "nats", Fail, "connect to nats://")
	if text := fmt.Sprint(r); strings.Contains(text, "hidden-password") {
		t.Errorf("the report shows the password: %s", text)
	}
}

func TestDataDirectoryAndStore(t *testing.T) {
	t.Parallel()
	p := patient(t, lead(t, 200))
	if err := os.WriteFile(p.DataDir, []byte("a file"), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, Examine(t.Context(), p), "data directory", Fail, "no folder")
	if err := os.Remove(p.DataDir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(p.DataDir, 0o700); err != nil {
		t.Fatal(err)
	}
	store := filepath.Join(p.DataDir, sqlite.File)
	if err := os.WriteFile(store, []byte("something else altogether"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := Examine(t.Context(), p)
	expect(t, r, "data directory", OK, "can be written")
	expect(t, r, "event store", Fail, "no SQLite database")
	if err := os.Remove(store); err != nil {
		t.Fatal(err)
	}
	s, err := sqlite.Open(t.Context(), p.DataDir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	expect(t, Examine(t.Context(), p), "event store", OK, "can be read")
	if left, _ := filepath.Glob(filepath.Join(p.DataDir, ".doctor-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestPostgres(t *testing.T) {
	t.Parallel()
	db := pgtest.Start(t)
	p := patient(t, lead(t, 200))
	p.Env.Config.Eventsink.Store = config.StorePostgres
	dsn := db.Database()
	p.Env.Config.Eventsink.DSN = config.Address(dsn)
	expect(t, Examine(t.Context(), p), "event store", OK, "makes its tables")
	db.SQL("postgres", "CREATE ROLE reader LOGIN")
	p.Env.Config.Eventsink.DSN = config.Address(db.DSN("db1", "reader"))
	expect(t, Examine(t.Context(), p), "event store", Fail, "GRANT CREATE")
	p.Env.Config.Eventsink.DSN = config.Address(dsn)
	s, err := postgres.Open(t.Context(), dsn, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	expect(t, Examine(t.Context(), p), "event store", OK, "events up to 0 are stored")
	db.Stop("fast")
	expect(t, Examine(t.Context(), p), "event store", Fail, "connect")
}

// models is a server that is asked for a model and then for all of them.
func models(t *testing.T, one int, oneBody string, all int, allBody string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, body := one, oneBody
		if strings.HasSuffix(r.URL.Path, "/models") {
			status, body = all, allBody
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestModelsSandboxTracing(t *testing.T) {
	t.Parallel()
	p := patient(t, lead(t, 200))
	script := filepath.Join(t.TempDir(), "s.yaml")
	if err := os.WriteFile(script, []byte("rules: [{agent: lead, turns: [{text: hello}]}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	rules, err := rules.Load(script)
	if err != nil {
		t.Fatal(err)
	}
	fake := httptest.NewServer(fakeserver.New(rules))
	defer fake.Close()
	there := fake.URL
	cfg := &p.Env.Config
	cfg.Models = []config.Model{
		{Name: "good", Provider: "openai", Model: "m/1", APIKeyEnv: "HAS_KEY", BaseURL: there + "/v1"},
		{Name: "keyless", Provider: "openai", Model: "m", APIKeyEnv: "NO_KEY"},
		{Name: "bare", Provider: "openai", Model: "m"},
		{Name: "away", Provider: "openai", Model: "m", BaseURL: "http://" + nobody(t) + "/v1"},
		{Name: "claude", Provider: "anthropic", Model: "m", APIKeyEnv: "HAS_KEY", BaseURL: there},
		{Name: "wrong key", Provider: "anthropic", Model: "m", APIKeyEnv: "HAS_KEY", BaseURL: models(t, 401, `{"error":{"message":"bad key"}}`, 401, "")},
		{Name: "unknown", Provider: "openai", Model: "m", BaseURL: models(t, 404, "{}", 200, `{"data":[{"id":"a"},{"id":"b"}]}`)},
		{Name: "listed", Provider: "openai", Model: "m", BaseURL: models(t, 404, "{}", 200, `{"data":[{"id":"a"},{"id":"m"}]}`)},
		{Name: "silent", Provider: "openai", Model: "m", BaseURL: models(t, 404, "", 404, "")},
		{Name: "busy", Provider: "openai", Model: "m", BaseURL: models(t, 503, "<title>Busy</title>", 503, "")},
		{Name: "script", Provider: "script", Script: script},
		{Name: "noscript", Provider: "script", Script: script + ".missing"},
	}
	cfg.Workspace.Sandbox, cfg.Workspace.AllowHostBash = config.SandboxNone, true
	cfg.Telemetry.OTLPEndpoint = nobody(t)
	r := Examine(t.Context(), p)
	expect(t, r, "model good", OK, "m/1 at "+there+"/v1 is there; nothing was generated")
	expect(t, r, "model keyless", Fail, "NO_KEY")
	expect(t, r, "model bare", Warn, "no key")
	expect(t, r, "model away", Fail, "cannot be reached")
	expect(t, r, "model claude", OK, "is there")
	expect(t, r, "model wrong key", Fail, "HAS_KEY")
	expect(t, r, "model unknown", Fail, `has no model "m"; it has a, b`)
	expect(t, r, "model listed", OK, "is there")
	expect(t, r, "model silent", OK, "was not checked")
	expect(t, r, "model busy", Warn, "503")
	expect(t, r, "model script", OK, "offline")
	expect(t, r, "model noscript", Fail, "missing")
	expect(t, r, "sandbox", Warn, "bare host")
	expect(t, r, "tracing", Warn, "cannot be reached")
	if text := fmt.Sprint(r); strings.Contains(text, "secret-key") {
		t.Errorf("the report shows a key: %s", text)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg.Telemetry.OTLPEndpoint = l.Addr().String()
	cfg.Workspace.AllowHostBash = false
	r = Examine(t.Context(), p)
	expect(t, r, "tracing", OK, l.Addr().String())
	expect(t, r, "sandbox", OK, "off")
}

// What the kernel gives is said, and what it does not.
func TestProtection(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ok, host bool
		gaps     []string
		status   Status
		want     string
	}{
		{true, false, nil, OK, "Landlock 7; no network"},
		{true, false, []string{"a hole", "another"}, Warn, "Landlock 7), but a hole; and another"},
		{false, false, nil, Warn, "no commands for models: the reason"},
		{false, true, nil, Warn, "bare host (workspace.allow_host_bash): the reason"},
	} {
		d := &doctor{Patient: Patient{Env: &process.Env{}}}
		d.Env.Config.Workspace.AllowHostBash = c.host
		d.protection(c.ok, "the reason", "Landlock 7", c.gaps)
		expect(t, Report{Checks: d.checks}, "sandbox", c.status, c.want)
	}
}
