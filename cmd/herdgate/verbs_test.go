package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// outsideNATS runs a server for other processes and returns its address. It has
// room for what streams reserve; nothing of that is used.
func outsideNATS(t *testing.T) string {
	t.Helper()
	return natstest.Start(t, natstest.Listen(), natstest.Tune(func(o *server.Options) { o.JetStreamMaxStore = 1 << 40 })).URL()
}

func TestVersion(t *testing.T) {
	t.Parallel()
	r := herdgate(t, t.TempDir(), nil, "version").want(t, 0)
	contains(t, "stdout", r.stdout, "herdgate ", "go1.")
	var v versionInfo
	if err := json.Unmarshal([]byte(herdgate(t, t.TempDir(), nil, "version", "--output", "json").want(t, 0).stdout), &v); err != nil || v.Version == "" {
		t.Errorf("version as JSON: %+v, %v", v, err)
	}
}

func TestUnknownWordsAreRefused(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"nosuch"}, {"runs", "--nosuch"}, {"version", "--output", "xml"}, {"up", "--services", "lead,nosuch"}} {
		r := herdgate(t, t.TempDir(), nil, args...).want(t, 1)
		if !strings.HasPrefix(r.stderr, "herdgate: ") || r.stdout != "" {
			t.Errorf("%v: stdout %q, stderr %q; want the error on stderr alone", args, r.stdout, r.stderr)
		}
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	contains(t, "stdout", herdgate(t, t.TempDir(), nil, "completion", "bash").want(t, 0).stdout, "herdgate")
}

// CONFIG-01: values out of range in a file are refused, with file, line, column and
// the allowed range.
func TestConfigCheck(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "bad.yaml"), "nats:\n  urll: x\nsubagent_runtime:\n  max_running: 900\n")
	r := herdgate(t, dir, nil, "config", "check", "bad.yaml").want(t, 1)
	contains(t, "stdout", r.stdout, "bad.yaml:2:3: nats.urll: ", "bad.yaml:4:16: subagent_runtime.max_running: ", "1 to 64", "900")
	contains(t, "stderr", r.stderr, "2 fault")

	var report configReport
	out := herdgate(t, dir, nil, "config", "check", "bad.yaml", "--output", "json").want(t, 1).stdout
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	if report.OK || len(report.Faults) != 2 || report.Faults[1].Line != 4 || report.Faults[1].Column != 16 || report.Faults[1].Path != "subagent_runtime.max_running" {
		t.Errorf("report = %+v", report)
	}

	writeFile(t, filepath.Join(dir, "herdgate.yaml"), "subagent_runtime: {max_running: 5}\n")
	contains(t, "stdout", herdgate(t, dir, nil, "config", "check").want(t, 0).stdout, "herdgate.yaml: ok")
	r = herdgate(t, dir, []string{"HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING=900"}, "config", "check").want(t, 1)
	contains(t, "stdout", r.stdout, "HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING", "1 to 64")
	contains(t, "stdout", herdgate(t, t.TempDir(), nil, "config", "check").want(t, 0).stdout, "the defaults hold")
	contains(t, "stderr", herdgate(t, dir, nil, "config", "check", "none.yaml").want(t, 1).stderr, "none.yaml")
	// Every other verb tells the same.
	contains(t, "stderr", herdgate(t, dir, nil, "up", "--config", "bad.yaml").want(t, 1).stderr, "bad.yaml:4:16:")
}

func TestConfigSchema(t *testing.T) {
	t.Parallel()
	var schema struct {
		Properties map[string]any `json:"properties"`
	}
	out := herdgate(t, t.TempDir(), nil, "config", "schema").want(t, 0).stdout
	if err := json.Unmarshal([]byte(out), &schema); err != nil || schema.Properties["subagent_runtime"] == nil {
		t.Errorf("schema: %v\n%s", err, clip(out))
	}
}

func TestContract(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var d description
	out := herdgate(t, dir, []string{"HERDGATE_NATS__PREFIX=acme.v1"}, "contract").want(t, 0).stdout
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		t.Fatal(err)
	}
	if d.Subjects["task_request"] != "acme.v1.task.request.<tenant>.<task_id>" || d.Streams["work"] != "ACME_WORK" || d.ContractVersion != contract.Version {
		t.Errorf("contract = %+v", d)
	}
	if len(d.EventTypes) != len(contract.EventTypes()) {
		t.Errorf("%d event types, want %d", len(d.EventTypes), len(contract.EventTypes()))
	}
	for _, e := range d.EventTypes {
		if e.Stored == "" || e.DataSchema == "" {
			t.Errorf("event type %+v is not described", e)
		}
	}
	if !slices.Contains(d.ErrorCodes, "queue_full") || !slices.Contains(d.ErrorCodes, "executor_stalled") || !slices.Contains(d.TaskStatuses, "timed_out") {
		t.Errorf("codes %v, statuses %v", d.ErrorCodes, d.TaskStatuses)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("a verb that only looks has made %v", left)
	}
}

func TestProvision(t *testing.T) {
	t.Parallel()
	dir, url := t.TempDir(), outsideNATS(t)
	for range 2 { // the first dry run has changed nothing
		r := herdgate(t, dir, nil, "provision", "--dry-run", "--nats-url", url).want(t, 0)
		contains(t, "stdout", r.stdout, "+ stream HG_WORK", "+ stream KV_HG_TASKS", "+ consumer HG_EVENTS/eventsink")
		contains(t, "stderr", r.stderr, "dry run")
	}
	contains(t, "stdout", herdgate(t, dir, nil, "provision", "--nats-url", url).want(t, 0).stdout, "+ stream HG_WORK")
	contains(t, "stdout", herdgate(t, dir, nil, "provision", "--dry-run", "--nats-url", url).want(t, 0).stdout, "in line")

	more := []string{"HERDGATE_SUBAGENT_RUNTIME__MAX_QUEUED=10"}
	var report provisionReport
	out := herdgate(t, dir, more, "provision", "--dry-run", "--nats-url", url, "--output", "json").want(t, 0).stdout
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if !report.DryRun || report.InLine || len(report.Changes) != 1 || report.Changes[0].Name != "HG_WORK" || report.Changes[0].Action != "update" {
		t.Errorf("report = %+v", report)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("provision has made %v", left)
	}
}

// natsContext makes a context of the nats tool below home.
func natsContext(t *testing.T, home, name, url string) {
	t.Helper()
	dir := filepath.Join(home, "nats", "context")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, name+".json"), `{"url":"`+url+`"}`)
}

func TestNATSContext(t *testing.T) {
	t.Parallel()
	home, url := t.TempDir(), outsideNATS(t)
	natsContext(t, home, "mine", url)
	env := []string{"XDG_CONFIG_HOME=" + home}
	contains(t, "stdout", herdgate(t, t.TempDir(), env, "provision", "--dry-run", "--context", "mine").want(t, 0).stdout, "+ stream HG_WORK")
	contains(t, "stderr", herdgate(t, t.TempDir(), env, "provision", "--dry-run", "--context", "other").want(t, 1).stderr, "other", "nats context ls")
}

func TestNobodyAnswers(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"runs", "list"}, {"run", "hello"}, {"tasks", "submit", "x"}, {"events", "--follow"}, {"admission", "status"}} {
		// Port 1 is reserved: nobody listens there.
		r := herdgate(t, t.TempDir(), nil, append(args, "--server", "http://127.0.0.1:1")...).want(t, 1)
		contains(t, "stderr", r.stderr, "is `herdgate up` running?", "--server")
	}
	contains(t, "stderr", herdgate(t, t.TempDir(), nil, "events", "verify", "--nats-url", "nats://127.0.0.1:1").want(t, 1).stderr, "is a server running there?", "--nats-url names another")
	contains(t, "stderr", herdgate(t, t.TempDir(), nil, "runs", "list", "--server", "127.0.0.1:1").want(t, 1).stderr, "want http://host:port")
	contains(t, "stderr", herdgate(t, t.TempDir(), nil, "runs", "list", "--token-env", "NOT_SET").want(t, 1).stderr, "NOT_SET")
}

func TestServerAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, dir, nil, "up", "--services", "none", "--nats-listen", "127.0.0.1:0")
	url := p.saw(&p.stderr, `"nats":"(nats://[^"]+)".*herdgate is up`)[1]
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	contains(t, "stdout", herdgate(t, dir, nil, "provision", "--dry-run", "--nats-url", url).want(t, 0).stdout, "in line")

	// One data directory, one server.
	r := herdgate(t, dir, nil, "up", "--services", "none").want(t, 1)
	contains(t, "stderr", r.stderr, "another herdgate process runs on this data directory", "use another data directory")
	r = herdgate(t, dir, nil, "doctor", "--server", "http://127.0.0.1:1").want(t, 0)
	contains(t, "stdout", r.stdout, "the embedded server is running in process")

	stopped(t, p)
	// The directory is free again.
	again := start(t, dir, nil, "up", "--services", "none", "--log-format", "console")
	again.saw(&again.stderr, `is up; Ctrl-C stops it`)
	again.signal(os.Interrupt)
	if code := again.wait(); code != 0 {
		t.Errorf("exit code %d after SIGINT, want 0", code)
	}
}

func TestServerAloneNeedsToBeEmbedded(t *testing.T) {
	t.Parallel()
	r := herdgate(t, t.TempDir(), nil, "up", "--services", "none", "--nats-url", "nats://127.0.0.1:1").want(t, 1)
	contains(t, "stderr", r.stderr, "nothing to run")
	r = herdgate(t, t.TempDir(), nil, "up", "--nats-listen", "127.0.0.1:0", "--nats-url", "nats://127.0.0.1:1").want(t, 1)
	contains(t, "stderr", r.stderr, "--nats-listen is for the embedded server")
	r = herdgate(t, t.TempDir(), nil, "up", "--services", "none", "--nats-listen", "0.0.0.0:0").want(t, 1)
	contains(t, "stderr", r.stderr, "loopback")
}

func TestDoctorFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "herdgate.yaml"), "models: [{name: main, provider: openai, model: m, api_key_env: NO_SUCH_KEY}]\n")
	r := herdgate(t, dir, nil, "doctor", "--nats-url", outsideNATS(t), "--server", "http://127.0.0.1:1").want(t, 1)
	contains(t, "stdout", r.stdout, "NO_SUCH_KEY", "fail  streams", "herdgate provision", "warn  lead")
	r = herdgate(t, dir, []string{"HERDGATE_NATS__REPLICAS=99"}, "doctor").want(t, 1)
	contains(t, "stdout", r.stdout, "fail  configuration", "HERDGATE_NATS__REPLICAS")
}
