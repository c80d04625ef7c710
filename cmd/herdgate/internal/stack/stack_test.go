package stack

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/natsd"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func testEnv(t *testing.T, dir string) *process.Env {
	t.Helper()
	return &process.Env{Config: config.Default(), DataDir: dir, Name: "test", Log: zerolog.Nop(), Metrics: telemetry.NewMetrics("test", "0")}
}

func TestParseServices(t *testing.T) {
	t.Parallel()
	for list, want := range map[string][]string{
		"": Services(), "all": Services(), "none": nil, "lead, executor,lead": {Lead, Executor}, "eventsink": {Eventsink},
	} {
		if got, err := ParseServices(list); err != nil || !slices.Equal(got, want) {
			t.Errorf("ParseServices(%q) = %v, %v; want %v", list, got, err, want)
		}
	}
	for _, list := range []string{"nosuch", "lead,", "none,lead"} {
		if _, err := ParseServices(list); err == nil {
			t.Errorf("ParseServices(%q) is accepted", list)
		}
	}
}

func TestEventMaxBytesFitsAndIsSteady(t *testing.T) {
	t.Parallel()
	for limit, want := range map[int64]int64{
		1 << 40: provision.DefaultEventMaxBytes, 2 << 30: 1 << 30, 2<<30 - 1: 512 << 20, 600 << 20: 256 << 20, 0: 64 << 20,
	} {
		if got := eventMaxBytes(limit); got != want {
			t.Errorf("eventMaxBytes(%d) = %d, want %d", limit, got, want)
		}
	}
}

// Services stop before what they lean on, and the server last.
func TestOrderOfTheEnd(t *testing.T) {
	t.Parallel()
	env := testEnv(t, t.TempDir())
	var mu sync.Mutex
	var ended []string
	running := make(chan struct{}, 4)
	serve := func(name string) process.Serve {
		return func(ctx context.Context, env *process.Env) error {
			c, err := env.Open(ctx, name, nil)
			if err != nil {
				return err
			}
			defer c.Close()
			running <- struct{}{}
			<-ctx.Done()
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, name)
			// The server is still there.
			return c.Bus.NC.FlushTimeout(5 * time.Second)
		}
	}
	serves := map[string]process.Serve{}
	for _, name := range Services() {
		serves[name] = serve(name)
	}
	s, err := Start(t.Context(), Config{Env: env, Services: Services(), Serve: serves})
	if err != nil {
		t.Fatal(err)
	}
	if err := env.Metrics.Probes.Ready(); err == nil || !strings.Contains(err.Error(), "starting") {
		t.Errorf("before anything runs, readiness is %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	for range Services() {
		<-running
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	first := ended[:2]
	slices.Sort(first)
	if want := []string{Executor, Lead, Admission, Eventsink}; !slices.Equal(ended, want) {
		t.Errorf("ended in the order %v, want %v", ended, want)
	}
	// The directory is free again.
	again, err := natsd.Start(t.Context(), natsd.Config{StoreDir: StoreDir(env), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	again.Stop()
}

func TestServiceThatFailsStopsAll(t *testing.T) {
	t.Parallel()
	env := testEnv(t, t.TempDir())
	boom := errors.New("boom")
	s, err := Start(t.Context(), Config{Env: env, Services: []string{Lead, Eventsink}, Serve: map[string]process.Serve{
		Lead:      func(context.Context, *process.Env) error { return boom },
		Eventsink: func(ctx context.Context, _ *process.Env) error { <-ctx.Done(); return nil },
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); !errors.Is(err, boom) {
		t.Errorf("Run = %v, want boom", err)
	}
}

func TestOneServerForOneDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	env := testEnv(t, dir)
	s, err := Start(t.Context(), Config{Env: env, Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	if _, err := Start(t.Context(), Config{Env: testEnv(t, dir)}); !errors.Is(err, natsd.ErrInUse) || !strings.Contains(err.Error(), "another herdgate process") {
		t.Errorf("the second server: %v", err)
	}
	nc, err := nats.Connect(s.Outside())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	assets, err := env.Assets()
	if err != nil {
		t.Fatal(err)
	}
	// What the services will check is what was made.
	if changes, err := provision.Plan(t.Context(), nc, assets); err != nil || len(changes) > 0 {
		t.Errorf("after the start: %v, %v", changes, err)
	}

	// The one that is there is an outside server for others.
	other := testEnv(t, filepath.Join(dir, "other"))
	other.Config.NATS.URL = config.Address(s.Outside())
	if Embedded(other) {
		t.Error("a configured server counts as embedded")
	}
	if _, err := Start(t.Context(), Config{Env: other, Listen: "127.0.0.1:0"}); err == nil {
		t.Error("--nats-listen together with an outside server is accepted")
	}
	joined, err := Start(t.Context(), Config{Env: other})
	if err != nil {
		t.Fatal(err)
	}
	if joined.Outside() != "" || joined.server != nil {
		t.Error("a server was embedded although one is configured")
	}
}

// An outside server that is not there yet keeps nothing from starting: the
// services must be able to say that they wait (F-184).
func TestServicesStartBeforeTheServer(t *testing.T) {
	t.Parallel()
	env := testEnv(t, t.TempDir())
	env.Config.NATS.URL = "nats://127.0.0.1:1"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := Start(ctx, Config{Env: env, Services: []string{Lead}, Serve: map[string]process.Serve{
		Lead: func(ctx context.Context, _ *process.Env) error { cancel(); <-ctx.Done(); return nil },
	}})
	if err != nil {
		t.Fatalf("Start = %v", err)
	}
	if err := env.Metrics.Probes.Ready(); err == nil || !strings.Contains(err.Error(), "lead: nats: starting") {
		t.Errorf("before the server is there, readiness is %v", err)
	}
	// The wait for the server ends with everything else.
	if err := s.Run(ctx); err != nil {
		t.Errorf("Run = %v", err)
	}
}

// An outside server gets its streams and buckets while the services run.
func TestOutsideServerIsProvisioned(t *testing.T) {
	t.Parallel()
	server, err := natsd.Start(t.Context(), natsd.Config{StoreDir: t.TempDir(), Listen: "127.0.0.1:0", Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	env := testEnv(t, t.TempDir())
	env.EventMaxBytes = 64 << 20
	env.Config.NATS.URL = config.Address(server.ClientURL())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opened := make(chan error, 1)
	s, err := Start(ctx, Config{Env: env, Services: []string{Lead}, Serve: map[string]process.Serve{
		Lead: func(ctx context.Context, env *process.Env) error {
			defer cancel()
			c, err := env.Open(ctx, Lead, func(n contract.Names) []string { return []string{n.WorkStream(), n.EventStream()} })
			if err == nil {
				c.Close()
			}
			opened <- err
			return err
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(ctx); err != nil {
		t.Errorf("Run = %v", err)
	}
	if err := <-opened; err != nil {
		t.Errorf("the service: %v", err)
	}
}
