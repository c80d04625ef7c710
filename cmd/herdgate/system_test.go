package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/demo"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
)

// testScript has a rule for each prompt that the tests use.
const testScript = `
model: scripted
rules:
  - agent: lead
    match: quick
    turns:
      - text: Off to a sub-agent.
        tool_calls: [{name: task, args: {description: "look \e[31mred", subagent_type: general-purpose, prompt: quick look}}]
        usage: {input_tokens: 10, output_tokens: 5}
      - {text: "All done.\n\e]0;evil\aEnd.", usage: {input_tokens: 20, output_tokens: 6}}
  - agent: lead
    match: slow
    turns:
      - text: This takes a while.
        tool_calls: [{name: task, args: {description: slow work, subagent_type: general-purpose, prompt: slow work}}]
      - {text: never said}
  - agent: lead
    match: broken
    turns: [{fault: http_500}, {fault: http_500}, {fault: http_500}, {fault: http_500}, {fault: http_500}, {fault: http_500}]
  - agent: lead
    match: deprecated legacy order client
    turns: [{text: the configured model was asked}]
  - agent: "*"
    match: quick
    turns:
      - text: A look.
        tool_calls: [{name: ls, args: {path: "."}}]
        usage: {input_tokens: 7, output_tokens: 3}
      - {text: "nothing there", usage: {input_tokens: 9, output_tokens: 2}}
  - agent: "*"
    match: slow
    turns: [{text: at last, delay_ms: 600000}]
`

// testConfig makes a configuration with the scripted model in a new folder.
func testConfig(t *testing.T, more string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	writeFile(t, filepath.Join(dir, "script.yaml"), testScript)
	writeFile(t, filepath.Join(dir, "herdgate.yaml"), "models: [{name: scripted, provider: script, script: script.yaml}]\n"+more)
	return dir
}

func decode[T any](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v:\n%s", err, clip(text))
	}
	return v
}

var runStarted = regexp.MustCompile(`(?m)^run +started +(\S+)$`)

// A system and the verbs that work with it, from the first run to the last look.
func TestWorkWithARunningSystem(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "")
	p, server := up(t, dir, nil)
	at := []string{"--server", server}
	do := func(args ...string) result { t.Helper(); return herdgate(t, dir, nil, append(args, at...)...) }

	r := do("run", "quick, please").want(t, 0)
	// What a model says must not reach the terminal as it is.
	if r.stdout != "All done.\n\\x1b]0;evil\\x07End.\n" {
		t.Errorf("stdout = %q", r.stdout)
	}
	if strings.ContainsRune(r.stderr, '\x1b') {
		t.Errorf("stderr has an escape character: %q", r.stderr)
	}
	matches(t, "stderr", r.stderr,
		`^lead +Off to a sub-agent\.$`, `^task 1 +queued +look .*red$`, `^task 1 +started +general-purpose, scripted$`,
		`^task 1 +running +ls$`, `^task 1 +completed +3 steps, .* s, 21 tokens$`, `^run +completed`)
	id := runStarted.FindStringSubmatch(r.stderr)[1]

	lines := strings.Split(strings.TrimSpace(do("run", "quick", "--output", "json", "--thread", "th", "--max-total", "2").want(t, 0).stdout), "\n")
	first, last := decode[contract.EventRecord](t, lines[0]), decode[contract.EventRecord](t, lines[len(lines)-1])
	if first.EventType != contract.RecordRunStarted || last.EventType != contract.RecordRunCompleted || first.ThreadID != "th" {
		t.Errorf("first %s of %q, last %s", first.EventType, first.ThreadID, last.EventType)
	}

	r = do("run", "broken").want(t, 1)
	contains(t, "stderr", r.stderr, "the run has failed", "llm_error")
	if r.stdout != "" {
		t.Errorf("a failed run has printed an answer: %q", r.stdout)
	}
	contains(t, "stderr", do("run", "quick", "--model", "nosuch").want(t, 1).stderr, "nosuch", "scripted")

	runs := decode[wire.RunPage](t, do("runs", "list", "--output", "json").want(t, 0).stdout)
	if len(runs.Runs) != 3 {
		t.Errorf("%d runs, want 3", len(runs.Runs))
	}
	contains(t, "runs list", do("runs", "list", "--status", "failed").want(t, 0).stdout, "RUN", "failed", "broken")
	contains(t, "runs show", do("runs", "show", id).want(t, 0).stdout, id, "completed", `All done.`, `\x1b]0;evil`, "general-purpose")
	if got := decode[wire.Run](t, do("runs", "show", id, "--output", "json").want(t, 0).stdout); got.Output == nil || *got.Output != "All done.\n\x1b]0;evil\aEnd." {
		t.Errorf("the answer as JSON = %v", got.Output)
	}
	contains(t, "stderr", do("runs", "show", "r_none").want(t, 1).stderr, "not_found")

	tasks := decode[wire.TaskPage](t, do("tasks", "list", "--run", id, "--output", "json").want(t, 0).stdout)
	if len(tasks.Tasks) != 1 {
		t.Fatalf("%d tasks, want 1", len(tasks.Tasks))
	}
	done := string(tasks.Tasks[0].TaskID)
	contains(t, "tasks show", do("tasks", "show", done).want(t, 0).stdout, done, "completed", "nothing there", "scripted")
	contains(t, "stderr", do("tasks", "cancel", done).want(t, 1).stderr, "completed")

	// One task on its own, cancelled while it runs.
	task := strings.TrimSpace(do("tasks", "submit", "slow", "--description", "alone").want(t, 0).stdout)
	natstest.Eventually(t, deadline, func() (bool, string) {
		s := do("tasks", "show", task, "--output", "json").want(t, 0).stdout
		return strings.Contains(s, `"running"`), s
	})
	contains(t, "admission status", do("admission", "status").want(t, 0).stdout, "running           1 of 3", task)
	contains(t, "tasks cancel", do("tasks", "cancel", task).want(t, 0).stdout, "cancelled")
	// The follower ends at the last event of the task, not by itself.
	r = do("events", "--task", task, "--type", "subagent.end", "--follow", "--limit", "1").want(t, 0)
	if rec := decode[contract.EventRecord](t, r.stdout); !strings.Contains(string(rec.Content), `"cancelled"`) {
		t.Errorf("the task's end = %s", rec.Content)
	}

	events := strings.Split(strings.TrimSpace(do("events", "--run", id).want(t, 0).stdout), "\n")
	var seq uint64
	for _, line := range events {
		rec := decode[contract.EventRecord](t, line)
		if rec.Seq <= seq || rec.RunID != contract.RunID(id) {
			t.Errorf("event %d of run %s after %d", rec.Seq, rec.RunID, seq)
		}
		seq = rec.Seq
	}
	if len(events) < 8 {
		t.Errorf("%d events of the run, want all of them:\n%s", len(events), strings.Join(events, "\n"))
	}
	if got := strings.Count(do("events", "--limit", "2", "--type", "run.started,run.completed").want(t, 0).stdout, "\n"); got != 2 {
		t.Errorf("--limit 2 prints %d events", got)
	}
	// An export is all of them, and goes on behind what the file has.
	all := do("events").want(t, 0).stdout
	if r := do("events", "export").want(t, 0); r.stdout != all || !strings.Contains(r.stderr, "events, up to seq") {
		t.Errorf("events export prints %d bytes and %q, want the %d that events prints", len(r.stdout), r.stderr, len(all))
	}
	file := filepath.Join(dir, "export.jsonl")
	if err := os.WriteFile(file, []byte(all[:len(all)/2]), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		do("events", "export", "--file", file).want(t, 0)
		if b, err := os.ReadFile(file); err != nil || string(b) != all {
			t.Errorf("the file holds %d bytes, %v; want %d", len(b), err, len(all))
		}
	}
	contains(t, "export to a strange file", do("events", "export", "--file", filepath.Join(dir, "herdgate.yaml")).want(t, 1).stderr, "choose another file")
	traced(t, do, id, task)
	matches(t, "doctor", do("doctor").want(t, 0).stdout, `^ok +lead .* is ready$`, `^ok +model scripted`)
	stopped(t, p)
}

// CANCEL-08: Ctrl-C on a run cancels it and every task of it, and waits for the end.
func TestInterruptCancelsTheRun(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "")
	p, server := up(t, dir, nil)
	r := start(t, dir, nil, "run", "slow", "--server", server)
	r.saw(&r.stderr, `(?m)^task 1 +started`)
	r.signal(os.Interrupt)
	if code := r.wait(); code != 130 {
		t.Errorf("exit code %d after SIGINT, want 130", code)
	}
	id := runStarted.FindStringSubmatch(r.stderr.String())[1]
	run := decode[wire.Run](t, herdgate(t, dir, nil, "runs", "show", id, "--output", "json", "--server", server).want(t, 0).stdout)
	if run.Status != contract.RunCancelled {
		t.Errorf("the run is %s, want cancelled", run.Status)
	}
	tasks := decode[wire.TaskPage](t, herdgate(t, dir, nil, "tasks", "list", "--run", id, "--output", "json", "--server", server).want(t, 0).stdout)
	for _, task := range tasks.Tasks {
		if task.Status != contract.TaskCancelled {
			t.Errorf("task %s is %s, want cancelled", task.TaskID, task.Status)
		}
	}
	stopped(t, p)
}

// A second signal does not wait for running tasks.
func TestSecondSignalCutsShort(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "executor: {drain_timeout_seconds: 3600}\n")
	p, server := up(t, dir, nil)
	r := start(t, dir, nil, "run", "slow", "--server", server)
	r.saw(&r.stderr, `(?m)^task 1 +started`)
	p.signal(syscall.SIGTERM)
	p.saw(&p.stderr, `"message":"stopping"`)
	p.signal(syscall.SIGTERM)
	p.wait()
	// Nobody is left to cancel anything.
	r.signal(os.Interrupt)
	if code := r.wait(); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	contains(t, "stderr", r.stderr.String(), "could not be cancelled")
}

// The second Ctrl-C of a run waits for nothing.
func TestSecondInterruptLeavesAtOnce(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/runs", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprint(w, `{"run_id":"r_1","thread_id":"th","status":"running","trace_id":""}`)
	})
	hang := func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-gone:
		}
	}
	mux.HandleFunc("POST /v1/runs/r_1/cancel", hang)
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "id: 1\nevent: run.started\ndata: {\"seq\":1,\"run_id\":\"r_1\",\"event_type\":\"run.started\",\"content\":{}}\n\n")
		_ = http.NewResponseController(w).Flush()
		hang(w, r)
	})
	srv := httptest.NewServer(mux)
	defer srv.Close()
	defer close(gone)
	r := start(t, t.TempDir(), nil, "run", "anything", "--server", srv.URL)
	r.saw(&r.stderr, `(?m)^run +started +r_1$`)
	r.signal(os.Interrupt)
	r.saw(&r.stderr, "cancelling the run")
	r.signal(os.Interrupt)
	if code := r.wait(); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
}

// ARCH-07: without a lead in it, a process works all the same and has no HTTP API.
// The services are joined by NATS alone.
func TestServicesInTwoProcesses(t *testing.T) {
	t.Parallel()
	dir, url := testConfig(t, ""), outsideNATS(t)
	work := start(t, dir, nil, "up", "--services", "admission,executor,eventsink", "--nats-url", url, "--metrics-addr", "127.0.0.1:0")
	work.saw(&work.stderr, "herdgate is up")
	p, server := up(t, dir, nil, "--services", "lead", "--nats-url", url)
	contains(t, "stdout", herdgate(t, dir, nil, "run", "quick", "--server", server).want(t, 0).stdout, "All done.")
	if strings.Contains(work.stderr.String(), `"http":`) {
		t.Errorf("a process without a lead serves HTTP:\n%s", clip(work.stderr.String()))
	}
	stopped(t, p)
	stopped(t, work)
}

// Definitions of sub-agents that lie in the database: all services in one process, and
// the next process finds what the one before it stored.
func TestAgentsInTheDatabase(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "agent_storage: {backend: sql}\n")
	writeFile(t, filepath.Join(dir, "agent.yaml"), "name: scout\ndescription: looks around\nsystem_prompt: You look.\n")
	p, server := up(t, dir, nil)
	contains(t, "apply", herdgate(t, dir, nil, "agents", "apply", "-f", "agent.yaml", "--server", server).want(t, 0).stdout, "scout created")
	stopped(t, p)
	p, server = up(t, dir, nil)
	contains(t, "apply again", herdgate(t, dir, nil, "agents", "apply", "-f", "agent.yaml", "--server", server).want(t, 0).stdout, "scout unchanged")
	contains(t, "list", herdgate(t, dir, nil, "agents", "list", "--server", server).want(t, 0).stdout, "scout", "managed", "in force")
	stopped(t, p)
}

func TestToken(t *testing.T) {
	t.Parallel()
	dir := testConfig(t, "http: {auth: {mode: tokens, tokens: [{name: me, token_env: MY_TOKEN}]}}\n")
	env := []string{"MY_TOKEN=a-secret-of-some-length"}
	p, server := up(t, dir, env)
	contains(t, "stderr", herdgate(t, dir, env, "runs", "list", "--server", server).want(t, 1).stderr, "--token-env")
	contains(t, "stdout", herdgate(t, dir, env, "run", "quick", "--server", server, "--token-env", "MY_TOKEN").want(t, 0).stdout, "All done.")
	if strings.Contains(p.stderr.String(), "a-secret") {
		t.Error("the token is in the log")
	}
	stopped(t, p)
}

func TestUpWithoutAModel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, server := up(t, dir, nil)
	contains(t, "log", p.stderr.String(), "no model is configured")
	contains(t, "stdout", herdgate(t, dir, nil, "run", "hello", "--server", server).want(t, 0).stdout, "No model is configured")
	stopped(t, p)
}

func TestAddressInUse(t *testing.T) {
	t.Parallel()
	first := testConfig(t, "")
	p, server := up(t, first, nil)
	dir := testConfig(t, "")
	r := herdgate(t, dir, nil, "up", "--http-addr", strings.TrimPrefix(server, "http://")).want(t, 1)
	contains(t, "stderr", r.stderr, "address already in use", "--http-addr")
	stopped(t, p)
}

// The main job with nothing set up.
func TestDemo(t *testing.T) {
	t.Parallel()
	truth, err := demo.Truth()
	if err != nil {
		t.Fatal(err)
	}
	dir, data := t.TempDir(), filepath.Join(t.TempDir(), "demo")
	r := herdgate(t, dir, nil, "demo", "--data-dir", data).want(t, 0)
	for _, place := range truth {
		contains(t, "the answer", r.stdout, "\n"+place+": ")
	}
	contains(t, "stdout", r.stdout, "in 13 places", "events.db", "general-purpose", "completed", "herdgate up --data-dir "+data)
	contains(t, "stderr", r.stderr, "task 1     running    grep", "task 3     completed  ")
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("the demo has made %v in the current folder", left)
	}

	// What it left can be looked at.
	id := runStarted.FindStringSubmatch(r.stderr)[1]
	p, server := up(t, dir, nil, "--data-dir", data)
	contains(t, "runs show", herdgate(t, dir, nil, "runs", "show", id, "--server", server).want(t, 0).stdout, "in 13 places")
	if n := strings.Count(herdgate(t, dir, nil, "events", "--run", id, "--type", "subagent.end", "--server", server).want(t, 0).stdout, "\n"); n != 3 {
		t.Errorf("%d tasks have ended in the event store, want 3", n)
	}
	stopped(t, p)
}

func TestDemoAsJSON(t *testing.T) {
	t.Parallel()
	data := filepath.Join(t.TempDir(), "demo")
	// A configuration that would get in the way does not.
	dir := testConfig(t, "nats: {url: \"nats://127.0.0.1:1\"}\nhttp: {addr: \"127.0.0.1:1\"}\n")
	r := herdgate(t, dir, nil, "demo", "--data-dir", data, "--output", "json").want(t, 0)
	report := decode[demoReport](t, r.stdout)
	if len(report.Tasks) != 3 || report.Run.Status != contract.RunCompleted || report.Events < 30 || r.stderr != "" {
		t.Errorf("%d tasks, run %s, %d events, stderr %q", len(report.Tasks), report.Run.Status, report.Events, r.stderr)
	}
	for _, task := range report.Tasks {
		if task.Status != "completed" || task.Usage == nil || task.Steps < 5 || task.Attempt != 1 || task.DurationMS <= 0 {
			t.Errorf("task = %+v", task)
		}
	}
	// One trace, with spans of all services.
	trace, err := os.ReadFile(report.Trace)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(trace)) {
		s := decode[struct {
			TraceID string `json:"trace_id"`
			Service string `json:"service"`
		}](t, line)
		if s.TraceID == report.Run.TraceID {
			seen[s.Service] = true
		}
	}
	for _, service := range []string{"herdgate-lead", "herdgate-admission", "herdgate-executor"} {
		if !seen[service] {
			t.Errorf("the trace of the run has no span of %s; it has %v", service, seen)
		}
	}
	if _, err := os.Stat(report.Database); err != nil {
		t.Error(err)
	}
}

func TestDemoKeeps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, dir, nil, "demo", "--keep", "--data-dir", "d")
	p.saw(&p.stderr, "everything goes on running")
	server := p.saw(&p.stdout, `--server (http://\S+)`)[1]
	contains(t, "tasks list", herdgate(t, dir, nil, "tasks", "list", "--server", server).want(t, 0).stdout, "Search web (TypeScript)")
	p.signal(os.Interrupt)
	if code := p.wait(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "script.yaml"), "rules: [{agent: lead, turns: [{text: never, delay_ms: 600000}]}]\n")
	writeFile(t, filepath.Join(dir, "herdgate.yaml"), "models: [{name: slow, provider: script, script: script.yaml}]\n")
	p := start(t, dir, nil, "demo", "--data-dir", "d", "--model", "slow")
	p.saw(&p.stderr, `(?m)^run +started`)
	p.signal(os.Interrupt)
	if code := p.wait(); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	matches(t, "stderr", p.stderr.String(), `^run +cancelled`)
}

func TestDemoModel(t *testing.T) {
	t.Parallel()
	r := herdgate(t, t.TempDir(), nil, "demo", "--data-dir", "d", "--model", "nosuch").want(t, 1)
	contains(t, "stderr", r.stderr, "nosuch", "OPENAI_API_KEY", "herdgate.yaml")
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "herdgate.yaml"), "models: [{name: main, provider: openai, model: m, api_key_env: NO_SUCH_KEY}]\n")
	contains(t, "stderr", herdgate(t, dir, nil, "demo", "--data-dir", "d", "--model", "main").want(t, 1).stderr, "NO_SUCH_KEY")
	// A configured model gets the same prompt.
	r = herdgate(t, testConfig(t, ""), nil, "demo", "--data-dir", "d", "--model", "scripted").want(t, 0)
	contains(t, "stdout", r.stdout, "the configured model was asked")
	if strings.Contains(r.stdout, "offline") {
		t.Errorf("stdout speaks of the offline model:\n%s", r.stdout)
	}
}
