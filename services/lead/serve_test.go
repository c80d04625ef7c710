package lead

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
)

// serve runs a lead until the test ends and returns a client for it.
func serve(t *testing.T, env *process.Env) *http.Client {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, env) }()
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
	return client
}

// F-182, F-184: a lead that cannot use NATS answers, and says why, from its
// first moment: not ready, and new runs are refused instead of hanging. It goes
// on by itself when what was missing is there.
func TestLeadAnswersBeforeItCanWork(t *testing.T) {
	t.Parallel()
	nats := natstest.Start(t)
	env, err := process.NewEnv("lead", process.Options{DataDir: t.TempDir(), HTTPAddr: freeAddr(t), Stderr: new(bytes.Buffer)})
	if err != nil {
		t.Fatal(err)
	}
	env.InProcess = nats
	env.Script = []byte("default: {turns: [{text: hello}]}\n")
	client := serve(t, env)
	call := func(method, path, body string) (int, http.Header, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+env.Config.HTTP.Addr+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := client.Do(req)
		if err != nil {
			return 0, nil, err.Error()
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header, string(b)
	}
	natstest.Eventually(t, patience, func() (bool, string) {
		code, _, body := call("GET", "/readyz", "")
		return code == 503 && strings.Contains(body, "stream HG_WORK is missing"), fmt.Sprint(code, " ", body)
	})
	if code, _, body := call("GET", "/healthz", ""); code != 200 {
		t.Errorf("GET /healthz = %d %s, want 200: the process is alive", code, body)
	}
	code, header, body := call("POST", "/v1/runs", `{"input":"x"}`)
	var p wire.Problem
	if err := json.Unmarshal([]byte(body), &p); err != nil || code != 503 || p.Code != wire.CodeUnavailable || p.Status != 503 ||
		!strings.Contains(p.Detail, "stream HG_WORK is missing") || header.Get("Retry-After") == "" || header.Get("Content-Type") != wire.ProblemType {
		t.Errorf("POST /v1/runs = %d %v %s, %v; want a problem 503 with the reason and Retry-After", code, header, body, err)
	}
	nats.Provision(provision.Config{MaxRunning: 3, MaxQueued: 64})
	natstest.Eventually(t, patience, func() (bool, string) {
		code, _, body := call("GET", "/readyz", "")
		return code == 200, fmt.Sprint(code, " ", body)
	})
	if code, _, body := call("GET", "/v1/runs", ""); code != 200 {
		t.Errorf("GET /v1/runs of a lead that is ready = %d %s", code, body)
	}
}

// Without authentication nothing but loopback is served, also not for the time
// of the start.
func TestLeadRefusesAnOpenAddressAtOnce(t *testing.T) {
	t.Parallel()
	env, err := process.NewEnv("lead", process.Options{DataDir: t.TempDir(), HTTPAddr: "0.0.0.0:0", NATSURL: "nats://127.0.0.1:1", Stderr: new(bytes.Buffer)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := Serve(ctx, env); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("Serve on 0.0.0.0 = %v, want a refusal", err)
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// F-146: a lead whose event stream refuses events refuses runs, and is not ready
// then, in both cases with what to do about it.
func TestLeadSaysThatEventsAreRefused(t *testing.T) {
	t.Parallel()
	nats, conn := natstest.New(t)
	env, err := process.NewEnv("lead", process.Options{DataDir: t.TempDir(), HTTPAddr: freeAddr(t), Stderr: new(natstest.Output)})
	if err != nil {
		t.Fatal(err)
	}
	env.InProcess = nats
	env.Script = []byte("default: {turns: [{text: hello}]}\n")
	client := serve(t, env)
	readyz := func(code int, text string) {
		t.Helper()
		natstest.Eventually(t, patience, func() (bool, string) {
			resp, err := client.Get("http://" + env.Config.HTTP.Addr + "/readyz") //nolint:noctx // a probe
			if err != nil {
				return false, err.Error()
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			return err == nil && resp.StatusCode == code && strings.Contains(string(b), text), fmt.Sprint(resp.StatusCode, " ", string(b))
		})
	}
	readyz(200, "")
	// The limits that its leader publishes; there is none here.
	limits, err := json.Marshal(contract.AdmissionLimits{MaxRunning: 3, MaxQueued: 64, AdmissionPolicy: "queue"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Publish(t.Context(), bus.Write{Subject: conn.KV(contract.LimitsKey), Data: limits}); err != nil {
		t.Fatal(err)
	}
	stream, err := conn.JS.Stream(t.Context(), conn.Names.EventStream())
	if err != nil {
		t.Fatal(err)
	}
	was := stream.CachedInfo().Config
	full := was
	full.MaxMsgSize = 100 // a setting that nothing forbids, and no event fits
	if _, err := conn.JS.UpdateStream(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	readyz(200, "")
	resp, err := client.Post("http://"+env.Config.HTTP.Addr+"/v1/runs", "application/json", strings.NewReader(`{"input":"x"}`)) //nolint:noctx // bounded by the test
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var p wire.Problem
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil || resp.StatusCode != 503 || p.Code != wire.CodeUnavailable || !strings.Contains(p.Detail, "herdgate provision") || resp.Header.Get("Retry-After") == "" {
		t.Errorf("POST /v1/runs = %d %+v, %v", resp.StatusCode, p, err)
	}
	readyz(503, "HG_EVENTS refuses events")
	if _, err := conn.JS.UpdateStream(t.Context(), was); err != nil {
		t.Fatal(err)
	}
	again, err := client.Post("http://"+env.Config.HTTP.Addr+"/v1/runs?wait=true", "application/json", strings.NewReader(`{"input":"x"}`)) //nolint:noctx // bounded by the test
	if err != nil {
		t.Fatal(err)
	}
	defer again.Body.Close()
	var run wire.Run
	if err := json.NewDecoder(again.Body).Decode(&run); err != nil || run.Status != contract.RunCompleted {
		t.Errorf("with room: %d %+v, %v", again.StatusCode, run, err)
	}
	readyz(200, "")
}

// executor.drain_timeout_seconds bounds the wait of leads as well; 0 is no wait, not
// the default.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	for seconds, most := range map[int]time.Duration{0: time.Millisecond, 3: 3 * time.Second, 60: maxDrain} {
		env, err := process.NewEnv("lead", process.Options{DataDir: t.TempDir(), Stderr: new(bytes.Buffer)})
		if err != nil {
			t.Fatal(err)
		}
		env.Config.Executor.DrainTimeoutSeconds = seconds
		cfg, err := configOf(env)
		if err != nil {
			t.Fatal(err)
		}
		if d := cfg.DrainTimeout; d <= 0 || d > most || seconds > 0 && d != most {
			t.Errorf("%d s: %v, want at most %v and more than 0, which would be the default", seconds, d, most)
		}
	}
}
