package process

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/pkg/contract"
)

// within bounds the wait for what comes at once on an idle machine.
const within = 20 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testEnv(t *testing.T, o Options) *Env {
	t.Helper()
	o.DataDir = t.TempDir()
	env, err := NewEnv("herdgate", o)
	if err != nil {
		t.Fatal(err)
	}
	return env
}

// F-184: the connection stands, but what the service needs behind it is gone.
// Only a real question to JetStream shows that.
func TestReadinessAsksJetStream(t *testing.T) {
	t.Parallel()
	s, conn := natstest.New(t)
	env := testEnv(t, Options{Stderr: new(bytes.Buffer)})
	env.InProcess = s
	svc, err := env.Open(t.Context(), "lead", func(n contract.Names) []string { return []string{n.WorkStream(), n.EventStream()} })
	if err != nil {
		t.Fatal(err)
	}
	if err := env.Metrics.Probes.Ready(); err != nil {
		t.Fatalf("readiness after the start: %v", err)
	}
	work, err := conn.JS.Stream(t.Context(), conn.Names.WorkStream())
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.JS.DeleteStream(t.Context(), conn.Names.WorkStream()); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, within, func() (bool, string) {
		err := env.Metrics.Probes.Ready()
		return err != nil && strings.Contains(err.Error(), "lead: nats: ") && strings.Contains(err.Error(), "stream HG_WORK is missing"), errText(err)
	})
	if _, err := conn.JS.CreateStream(t.Context(), work.CachedInfo().Config); err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, within, func() (bool, string) { err := env.Metrics.Probes.Ready(); return err == nil, errText(err) })
	svc.Close()
	// Nobody asks over a connection that is closed.
	if err := env.Metrics.Probes.Ready(); err != nil && strings.Contains(err.Error(), "JetStream cannot be used") {
		t.Errorf("after Close, readiness is %v", err)
	}
}

// F-182: a service that was started first goes on by itself once the assets are
// there.
func TestOpenWaitsForAssets(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	env := testEnv(t, Options{Stderr: new(bytes.Buffer)})
	env.InProcess = s
	opened := make(chan error, 1)
	go func() {
		svc, err := env.Open(t.Context(), "lead", func(n contract.Names) []string { return []string{n.WorkStream()} })
		if err == nil {
			svc.Close()
		}
		opened <- err
	}()
	natstest.Eventually(t, within, func() (bool, string) {
		err := env.Metrics.Probes.Ready()
		return err != nil && strings.Contains(err.Error(), "stream HG_WORK is missing"), errText(err)
	})
	s.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
}

// A line of the log names its service once, or readers differ on what it says.
func TestLogNamesTheServiceOnce(t *testing.T) {
	t.Parallel()
	s, _ := natstest.New(t)
	var out bytes.Buffer
	env := testEnv(t, Options{Stderr: &out, LogFormat: "json"})
	env.InProcess = s
	svc, err := env.Open(t.Context(), "lead", nil)
	if err != nil {
		t.Fatal(err)
	}
	svc.Log.Info().Msg("of the service")
	env.Log.Info().Msg("of the process")
	natsd := env.LogOf("nats")
	natsd.Info().Msg("of the server")
	svc.Close()
	want := map[string]string{"of the service": "lead", "of the process": "herdgate", "of the server": "nats"}
	for line := range strings.Lines(out.String()) {
		var got struct{ Service, Message string }
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if n := strings.Count(line, `"service":`); n != 1 {
			t.Errorf("%d fields called service: %s", n, line)
		}
		if service, ok := want[got.Message]; ok && got.Service != service {
			t.Errorf("line %q is of %q, want %q", got.Message, got.Service, service)
		}
		delete(want, got.Message)
	}
	if len(want) > 0 {
		t.Errorf("lines are missing: %v", want)
	}
}

func errText(err error) string {
	if err == nil {
		return "ready"
	}
	return err.Error()
}

// REG-10: what the configuration says about the network of a type reaches its tasks.
func TestNetworkOfTypes(t *testing.T) {
	t.Parallel()
	cfg, faults := config.Check("h.yaml", []byte(`subagents: {agents: {general-purpose: {network: true}, shut: {network: false}},
  custom_agents: {open: {description: d, system_prompt: p, network: true}, shut: {description: d, system_prompt: p, network: true}}}`), nil)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	r, err := subagent.NewRegistry((&Env{Config: cfg}).Subagents())
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"general-purpose": true, "bash": false, "open": true, "shut": false} {
		if d, ok := r.Get(name); !ok || d.Resolve().Network != want {
			t.Errorf("%s: network %v, want %v", name, d.Resolve().Network, want)
		}
	}
}
