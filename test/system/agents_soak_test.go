package system

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/anthropic"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
	"github.com/herdgate/herdgate/internal/model/openai"
	"github.com/herdgate/herdgate/internal/model/provider"
	"github.com/herdgate/herdgate/internal/model/retry"
	"github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/executor"
)

var (
	agentsRuns = flag.Int("agents.runs", 20, "how many sub-agents run in TestAgentsSoak")
	agentsSeed = flag.Uint64("agents.seed", 0, "seed of the faults in TestAgentsSoak; 0 takes one from the clock")
)

const (
	agentsAtOnce  = 8
	agentsRetries = 2
	// agentsIdle is the silence after which a call is given up. It is much longer than
	// a busy machine lets an answer wait.
	agentsIdle   = time.Second
	agentsOutput = 2000 // characters of a result
	// agentsGrowth is how much larger the live heap may be after the last run than
	// after the first quarter of them.
	agentsGrowth = 1.1
)

// agentsEnv has what the executor process of TestAgentsSoak is told, as JSON.
const agentsEnv = "AGENTS_SOAK_PROCESS"

type agentsPlan struct {
	NATS, Models     string // addresses
	Workspaces       string // folder
	Executions       string // folder with one file for each call, one byte for each execution
	RequestIdle      time.Duration
	Retries, AtOnce  int
	OutputCharacters int
}

// agentsMain runs the executor of TestAgentsSoak, if this process is it. For each
// line on its input it tells what it holds; it ends with its input.
func agentsMain() {
	var p agentsPlan
	text := os.Getenv(agentsEnv)
	if text == "" {
		return
	}
	err := json.Unmarshal([]byte(text), &p)
	if err == nil {
		err = p.run()
	}
	if err == nil {
		err = goleak.Find()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "executor:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// settings are what every run has on: all guards, receipts, compaction early.
func (p agentsPlan) settings() *config.Config {
	cfg := config.Default()
	cfg.Workspace.ToolOutputMaxChars = p.OutputCharacters
	cfg.Summarization.Enabled = true
	cfg.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdMessages, Value: 8}}
	cfg.Summarization.Keep = config.Threshold{Type: config.ThresholdMessages, Value: 4}
	return &cfg
}

func (p agentsPlan) run() error {
	log := zerolog.New(os.Stderr).Level(zerolog.ErrorLevel)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	conn, err := bus.Connect(ctx, bus.Config{URL: p.NATS, Name: "ex-1", Prefix: contract.DefaultPrefix}, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	cfg := provider.Config{Model: "fake-1", BaseURL: p.Models, IdleTimeout: p.RequestIdle}
	cfg.Name = "openai"
	first, err := openai.New(cfg)
	if err != nil {
		return err
	}
	cfg.Name = "anthropic"
	second, err := anthropic.New(cfg)
	if err != nil {
		return err
	}
	idle := func() { first.CloseIdleConnections(); second.CloseIdleConnections() }
	defer idle()
	policy := retry.Policy{MaxRetries: p.Retries, Base: 5 * time.Millisecond, Cap: 20 * time.Millisecond}
	models, err := model.NewRegistry(retry.Retry(first, policy, log), retry.Retry(second, policy, log))
	if err != nil {
		return err
	}
	box := sandbox.New(sandbox.Landlock, func(reason string) { fmt.Fprintln(os.Stderr, "commands run unconfined:", reason) })
	svc, err := executor.New(executor.Config{Name: "ex-1", MaxTasks: p.AtOnce, Settings: p.settings(), DrainTimeout: time.Second}, executor.Deps{
		Bus: conn, Models: models, Log: log,
		Tools: func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
			ws, err := tool.NewWorkspace(tool.ThreadDir(p.Workspaces, req.Tenant, req.ThreadID))
			if err != nil {
				return nil, nil, err
			}
			tools := tool.Tools(ws, tool.Options{Bash: true, Sandbox: box, OutputMaxChars: p.OutputCharacters})
			for i, t := range tools {
				tools[i] = counted{t, p.Executions}
			}
			return tools, func() { _ = ws.Close() }, nil
		},
	})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		idle()
		h, err := holdings()
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(h); err != nil {
			return err
		}
	}
	cancel()
	return <-done
}

// counted is a tool that notes each of its executions.
type counted struct {
	tool.Tool
	dir string
}

// Writes implements tool.OnFiles.
func (c counted) Writes() bool {
	t, ok := c.Tool.(tool.OnFiles)
	return ok && t.Writes()
}

// Call implements tool.Tool.
func (c counted) Call(ctx context.Context, call tool.Call) (tool.Result, error) {
	var a struct{ Call string }
	if err := json.Unmarshal(call.Args, &a); err != nil || a.Call == "" {
		a.Call = "unknown" // no call that was ever sent
	}
	f, err := os.OpenFile(filepath.Join(c.dir, filepath.Base(a.Call)), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return tool.Result{}, err
	}
	_, err = f.WriteString("x")
	if err = cmp.Or(err, f.Close()); err != nil {
		return tool.Result{}, err
	}
	return c.Tool.Call(ctx, call)
}

// holding is what a process holds.
type holding struct {
	Goroutines int
	Files      []string // what its descriptors are
	Children   []string
	Heap, RSS  uint64
	Temp       []string // what lies in its folder for temporary files
	Stacks     string
}

func holdings() (h holding, err error) {
	runtime.GC()
	runtime.GC() // the second one frees what finalizers let go
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	h.Heap, h.Goroutines = mem.HeapAlloc, runtime.NumGoroutine()
	var stacks bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&stacks, 1); err != nil {
		return h, err
	}
	h.Stacks = stacks.String()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return h, err
	}
	for _, fd := range fds {
		if name, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil { // else it was the one that read the folder
			h.Files = append(h.Files, fd.Name()+" "+name)
		}
	}
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return h, err
	}
	for _, name := range tasks {
		if b, err := os.ReadFile(name); err == nil { // else the thread has ended
			h.Children = append(h.Children, strings.Fields(string(b))...)
		}
	}
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			pages, _ := strconv.ParseUint(f[1], 10, 64)
			h.RSS = pages * uint64(os.Getpagesize())
		}
	}
	h.Temp = filesBelow(os.TempDir())
	return h, nil
}

func filesBelow(dir string) (out []string) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && path != dir {
			out = append(out, path)
		}
		return nil
	})
	return out
}

// agentsProcess is the executor.
type agentsProcess struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

func startAgents(t *testing.T, p agentsPlan, temp string) *agentsProcess {
	t.Helper()
	plan, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	a := &agentsProcess{t: t, cmd: exec.Command(os.Args[0])}
	a.cmd.Env = append(os.Environ(), agentsEnv+"="+string(plan), "TMPDIR="+temp)
	said := &natstest.Output{}
	a.cmd.Stderr = said
	if a.in, err = a.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.out = json.NewDecoder(out)
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.in.Close()
		kill := time.AfterFunc(Timeout, func() { _ = a.cmd.Process.Kill() })
		defer kill.Stop()
		if err := a.cmd.Wait(); err != nil {
			t.Errorf("the executor: %v", err)
		}
		if s := said.String(); s != "" {
			t.Logf("the executor says:\n%s", s)
		}
	})
	return a
}

// holds asks the executor what it holds.
func (a *agentsProcess) holds() (h holding) {
	a.t.Helper()
	kill := time.AfterFunc(Timeout, func() { _ = a.cmd.Process.Kill() })
	defer kill.Stop()
	_, err := io.WriteString(a.in, "\n")
	if err == nil {
		err = a.out.Decode(&h)
	}
	if err != nil {
		a.t.Fatalf("the executor does not say what it holds: %v", err)
	}
	return h
}

// rest asks until the executor holds the same several times in a row.
func (a *agentsProcess) rest() (h holding) {
	a.t.Helper()
	same := 0
	natstest.Eventually(a.t, Timeout, func() (bool, string) {
		now := a.holds()
		if same++; now.Goroutines != h.Goroutines || len(now.Files) != len(h.Files) {
			same = 0
		}
		h = now
		return same >= 10, fmt.Sprintf("%d goroutines, %d descriptors", h.Goroutines, len(h.Files))
	})
	return h
}

// soaked is what the server knows of one task.
type soaked struct {
	name               string
	thread             contract.ThreadID
	answers, summaries int // asked for
	plan               []string
	step               int
	kind               string // what became of the last answer; "" is nothing, or a kind of fault
	last               bool   // the last answer was the report
	text               string // of the last answer
	failures           int    // answers without success at the end
	calls              map[string]*soakedCall
}

type soakedCall struct {
	step  int
	tool  string
	never bool // it must not be executed
	back  bool // it came back with a result
}

// soakedModel answers for all tasks. It knows each by a word in its system prompt,
// and how far it is by the calls that came back with a result.
type soakedModel struct {
	chance script.Random
	mu     sync.Mutex
	tasks  map[string]*soaked
	kinds  map[string]int
	asked  int
	bad    []string
}

var soakedName = regexp.MustCompile(`soaker-\d+`)

func (m *soakedModel) next(_ context.Context, req model.Request) (script.Step, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := ""
	for _, msg := range req.Messages {
		if name = soakedName.FindString(msg.Text); name != "" {
			break
		}
	}
	m.asked++
	t := m.tasks[name]
	switch summary := (script.Step{Message: model.Message{Role: model.RoleAssistant, Text: "Some work was done.", FinishReason: "stop"}}); {
	case t == nil && len(req.Tools) == 0: // of nothing but an empty answer
		m.kinds[""]++
		return summary, nil
	case t == nil:
		m.bad = append(m.bad, fmt.Sprintf("a request of nobody: %+v", req.Messages))
		return script.Step{Fault: script.FaultReset}, nil
	case len(req.Tools) == 0:
		t.summaries++
		step, kind := m.chance.Change(name+" summary", t.summaries, summary)
		m.kinds[kind]++
		return step, nil
	}
	t.hear(req.Messages)
	t.answers++
	step, kind := m.chance.Change(name, t.answers, t.say())
	m.kinds[kind]++
	t.note(step, kind)
	return step, nil
}

// hear learns from the results which calls have come through.
func (t *soaked) hear(messages []model.Message) {
	for _, msg := range messages {
		for _, c := range msg.ToolCalls { // the server refuses a request with one that has no result
			var a struct{ Call string }
			if json.Unmarshal([]byte(c.Args), &a) != nil || t.calls[a.Call] == nil {
				continue
			}
			call := t.calls[a.Call]
			call.back = true
			if !call.never {
				t.step = max(t.step, call.step+1)
			}
		}
	}
}

// say is the next step of the task, with new calls.
func (t *soaked) say() script.Step {
	name := t.name
	step := script.Step{
		Usage: &contract.Usage{InputTokens: 100, OutputTokens: 10, TotalTokens: 110, CacheReadTokens: 5}, Message: model.Message{Role: model.RoleAssistant, FinishReason: "stop"},
	}
	if t.answers%2 == 0 {
		step.Reasoning = "One thing after the other."
	}
	if t.step >= len(t.plan) {
		step.Message.Text = "The work of " + name + " is done: größer, schöner, 完成."
		return step
	}
	step.Message.Text, step.Message.FinishReason = "Next for "+name+": "+t.plan[t.step]+".", "tool_calls"
	call := func(tool, args string, a ...any) {
		id := fmt.Sprintf("%s.%d.%d", name, t.answers, len(step.Message.ToolCalls))
		t.calls[id] = &soakedCall{step: t.step, tool: tool}
		step.Message.ToolCalls = append(step.Message.ToolCalls, model.ToolCall{
			ID: fmt.Sprintf("call_%d_%d", t.answers, len(step.Message.ToolCalls)), Name: tool, Args: fmt.Sprintf(`{"call": %q, `, id) + fmt.Sprintf(args, a...) + "}",
		})
		if tool == "bash" { // the command notes for itself that it ran
			last := &step.Message.ToolCalls[len(step.Message.ToolCalls)-1]
			last.Args = strings.Replace(last.Args, "NOTE", "echo "+id+" >> "+name+".log", 1)
		}
	}
	file := name + ".txt"
	switch t.plan[t.step] {
	case "write":
		call("write_file", `"path": %q, "content": "alpha\nbeta\n"`, file)
		call("read_file", `"path": %q`, file)
	case "edit":
		call("read_file", `"path": %q`, file)
		call("str_replace", `"path": %q, "old_str": "beta", "new_str": "gamma"`, file)
	case "search":
		call("grep", `"pattern": "alpha", "glob": %q`, file)
		call("glob", `"pattern": "*.txt"`)
		call("ls", `"path": "."`)
	case "background":
		call("bash", `"command": "NOTE; sleep 1000 & (setsid sleep 1000 &) ; nohup sh -c 'sleep 1000; true' >/dev/null 2>&1 & cat <<E\nhere\nE\n"`)
	case "overflow":
		call("bash", `"command": "NOTE; yes line of output | head -n 4000"`)
	case "fails":
		call("bash", `"command": "NOTE; exec 2>&1; ls /root/nothing /etc/shadow; exit 3"`)
		call("read_file", `"path": "../../../../etc/passwd"`)
	case "stopped":
		call("bash", `"command": "NOTE; setsid sleep 1000 & sleep 1000", "timeout_seconds": 0.2`)
	}
	return step
}

var soakedSteps = []string{"edit", "search", "background", "overflow", "fails", "stopped"}

// note takes down what was said.
func (t *soaked) note(step script.Step, kind string) {
	t.kind, t.text, t.last = kind, step.Message.Text, t.step >= len(t.plan)
	if step.Fault.Fails() {
		t.failures++
	} else {
		t.failures = 0
	}
	if kind == script.ChanceEmpty {
		maps.DeleteFunc(t.calls, func(id string, _ *soakedCall) bool {
			return strings.HasPrefix(id, fmt.Sprintf("%s.%d.", t.name, t.answers))
		})
	}
	for i := range step.Message.ToolCalls {
		call := t.calls[fmt.Sprintf("%s.%d.%d", t.name, t.answers, i)]
		switch kind {
		case string(script.FaultMalformed), string(script.FaultCutCall), script.ChanceLength, script.ChanceFilter, script.ChanceFilterAll:
			call.never = true
		case script.ChanceUnknownTool:
			call.never = i == 0
		default:
			call.never = step.Fault.Fails()
		}
	}
}

// verdict says what is wrong with how a task ended; "" is nothing. It may end in no
// other way than what was answered last allows.
func (t *soaked) verdict(rec contract.TaskRecord) string {
	failed := func(want string) string {
		if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrLLM || rec.Error == "" || rec.Result != "" || rec.StopReason != "" {
			return "want failed, llm_error, because " + want
		}
		return ""
	}
	completed := func(result string) string {
		if rec.State != contract.StateCompleted || rec.ErrorCode != "" || rec.StopReason != "" || !strings.HasPrefix(rec.Result, result) {
			return fmt.Sprintf("want completed with %q", result)
		}
		return ""
	}
	switch {
	case t.failures > agentsRetries:
		return failed("all tries failed")
	case t.kind == script.ChanceFilterAll, t.kind == script.ChanceFilter && t.text == "":
		return failed("nothing was answered but a refusal")
	case rec.ErrorCode == contract.ErrLLM && t.failures <= agentsRetries && strings.Contains(rec.Error, "idle timeout"):
		return "" // the machine was too busy to answer in time
	case t.kind == script.ChanceFilter, t.last && t.text != "" && t.failures == 0:
		return completed(t.text)
	case t.kind == script.ChanceEmpty:
		return completed(outcome.Placeholder)
	}
	return "want more answers to be asked for"
}

// I4, STATUS-05, F-116, F-118, F-122: sub-agents of both providers
// work with a server that spoils every third answer on average, at random and in every
// way that it knows. Each task ends once, as its last answer allows; no call is
// executed twice, none that was not whole is; and the executor holds afterwards what
// it held before: goroutines, descriptors, processes, temporary files, memory.
func TestAgentsSoak(t *testing.T) {
	t.Parallel()
	n, seed := *agentsRuns, *agentsSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test -count=1 -v -run='^TestAgentsSoak$' ./test/system -agents.runs=%d -agents.seed=%d", n, seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	root := t.TempDir()
	workspaces, executions, temp := filepath.Join(root, "workspaces"), filepath.Join(root, "executions"), filepath.Join(root, "temp")
	for _, dir := range []string{workspaces, executions, temp} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	m := &soakedModel{chance: script.Random{Seed: seed, Every: 3}, tasks: map[string]*soaked{}, kinds: map[string]int{}}
	server := fakeserver.Answering(m.next)
	server.OnRequest = func(path, refusal string) {
		if refusal != "" {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.bad = append(m.bad, "the strict server refused a request to "+path+": "+refusal)
		}
	}
	web := httptest.NewServer(server)
	t.Cleanup(func() { server.Close(); web.Close() })

	s := New(t, Options{MaxRunning: agentsAtOnce, MaxQueued: n, LeaseTTL: 30 * time.Second, Listen: true})
	feed := s.Follow()
	s.Admission("adm-1")
	ex := startAgents(t, agentsPlan{
		NATS: s.Server.URL(), Models: web.URL + "/v1", Workspaces: workspaces, Executions: executions,
		RequestIdle: agentsIdle, Retries: agentsRetries, AtOnce: agentsAtOnce, OutputCharacters: agentsOutput,
	}, temp)

	ids := map[string]contract.TaskID{}
	submit := func(from, to int) {
		for i := from; i < to; i++ {
			req := Request("Do what has to be done.")
			task := &soaked{name: fmt.Sprint("soaker-", i), calls: map[string]*soakedCall{}, plan: []string{"write"}}
			for range 3 + dice.IntN(4) {
				task.plan = append(task.plan, soakedSteps[dice.IntN(len(soakedSteps))])
			}
			if i%2 == 1 { // it works in the folder of the one before
				req.ThreadID = m.tasks[fmt.Sprint("soaker-", i-1)].thread
			}
			task.thread = req.ThreadID
			req.Subagent.SystemPrompt = "You are " + task.name + "."
			req.Subagent.Model = []string{"openai", "anthropic"}[i%2]
			req.Subagent.MaxTurns, req.Subagent.TimeoutSeconds = 60, 600
			m.mu.Lock()
			m.tasks[task.name] = task
			m.mu.Unlock()
			ids[task.name] = req.TaskID
			s.Submit(req)
		}
		natstest.Eventually(t, Timeout+time.Duration(n)*2*time.Second, func() (bool, string) {
			ended := Count(feed.Events(), contract.EventType.TaskTerminal)
			return ended >= to, fmt.Sprintf("%d of %d tasks have ended", ended, to)
		})
		ex.nothingRuns(workspaces)
	}
	began := time.Now()
	warm := max(n/4, min(n, 2*agentsAtOnce))
	submit(0, warm)
	before := ex.rest()
	submit(warm, n)
	took := time.Since(began)
	var after holding
	natstest.Eventually(t, Timeout, func() (bool, string) {
		after = ex.holds()
		return after.Goroutines <= before.Goroutines && len(after.Files) <= len(before.Files),
			fmt.Sprintf("after %d runs the executor holds %d goroutines and %d descriptors, after %d runs %d and %d\n%s\n%s", n, after.Goroutines, len(after.Files),
				warm, before.Goroutines, len(before.Files), strings.Join(after.Files, "\n"), after.Stacks)
	})
	growth := float64(after.Heap) / float64(before.Heap)
	if n > warm && growth > agentsGrowth {
		t.Errorf("%d bytes live after %d runs, %d after %d: a factor of %.2f, want at most %v", after.Heap, n, before.Heap, warm, growth, agentsGrowth)
	}
	if len(after.Children) > 0 || len(after.Temp) > 0 {
		t.Errorf("left: processes %v, temporary files %v", after.Children, after.Temp)
	}

	ends := map[contract.TaskID]int{}
	for _, e := range s.judge(t) {
		if e.EventType == contract.RecordEnd {
			ends[e.TaskID]++
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, bad := range m.bad {
		t.Error(bad)
	}
	states := map[string]int{}
	summaries, executed := 0, 0
	for name, task := range m.tasks {
		rec, _ := s.Record(ids[name])
		states[strings.TrimSuffix(fmt.Sprint(rec.State, " ", rec.ErrorCode), " ")]++
		summaries += task.summaries
		if wrong := task.verdict(rec); wrong != "" {
			t.Errorf("%s ended as %s %s %s, result %.200q, error %.200q: %s; the last answer was %q with fault %q, after %d without success", name,
				rec.State, rec.ErrorCode, rec.StopReason, rec.Result, rec.Error, wrong, task.text, task.kind, task.failures)
		}
		if ends[rec.TaskID] != 1 || rec.Attempt != 1 {
			t.Errorf("%s has %d terminal events and attempt %d, want one each", name, ends[rec.TaskID], rec.Attempt)
		}
		ran := task.wantExecutions(t, executions, tool.ThreadDir(workspaces, contract.DefaultTenant, task.thread))
		if executed += ran; ran > 0 && len(rec.Receipts) == 0 {
			t.Errorf("%s has no receipts for %d calls", name, ran)
		}
	}
	if b, err := os.ReadFile(filepath.Join(executions, "unknown")); err == nil {
		t.Errorf("%d executions of calls that nobody sent", len(b))
	}
	for _, path := range filesBelow(workspaces) {
		if filepath.Base(filepath.Dir(path)) == tool.TempDir {
			t.Errorf("left in the folder for temporary files of a workspace: %s", path)
		}
	}
	spoilt := m.asked - m.kinds[""]
	if summaries == 0 || executed == 0 || spoilt*5 < m.asked || spoilt*2 > m.asked {
		t.Errorf("%d summaries, %d executions, %d of %d answers with a fault: that is no soak", summaries, executed, spoilt, m.asked)
	}
	delete(m.kinds, "")
	t.Logf("%d runs in %v: %v; %d answers, %d of them with a fault (%d kinds), %d for summaries; %d tool executions", n, took.Round(100*time.Millisecond),
		states, m.asked, spoilt, len(m.kinds), summaries, executed)
	t.Logf("the executor after %d and %d runs: goroutines %d, %d; descriptors %d, %d; live heap %d, %d KiB (%.2f); resident %d, %d MiB", warm, n,
		before.Goroutines, after.Goroutines, len(before.Files), len(after.Files), before.Heap>>10, after.Heap>>10, growth, before.RSS>>20, after.RSS>>20)
}

// wantExecutions compares what was executed with what was called, by the notes of the
// tools and by those of the commands themselves.
func (t *soaked) wantExecutions(tb testing.TB, executions, workspace string) (total int) {
	tb.Helper()
	log, _ := os.ReadFile(filepath.Join(workspace, t.name+".log")) // none: no command ran
	lines := strings.Split(string(log), "\n")
	for id, call := range t.calls {
		times := func() int {
			b, _ := os.ReadFile(filepath.Join(executions, id)) // none: it was not executed
			return len(b)
		}()
		total += times
		switch {
		case call.never && times > 0:
			tb.Errorf("%s, %s: executed %d times, although it was not whole or not for us", id, call.tool, times)
		case times > 1:
			tb.Errorf("%s, %s: executed %d times", id, call.tool, times)
		case call.back && !call.never && times == 0:
			tb.Errorf("%s, %s: there is a result, but it was not executed", id, call.tool)
		}
		ran := 0
		for _, line := range lines {
			if line == id {
				ran++
			}
		}
		// One with a short time limit may be stopped before it has written its note.
		if call.tool == "bash" && (ran > times || ran < times && t.plan[call.step] != "stopped") {
			tb.Errorf("%s, %s: the command ran %d times, the tool %d times", id, t.plan[call.step], ran, times)
		}
	}
	return total
}

// nothingRuns looks for processes of commands: they have their workspace in their
// environment, supervisors on their command line.
func (a *agentsProcess) nothingRuns(workspaces string) {
	a.t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		a.t.Fatal(err)
	}
	for _, dir := range found {
		if dir == fmt.Sprint("/proc/", a.cmd.Process.Pid) {
			continue
		}
		env, _ := os.ReadFile(dir + "/environ") // it is somebody else's, or has ended
		line, _ := os.ReadFile(dir + "/cmdline")
		if bytes.Contains(env, []byte(workspaces)) || bytes.Contains(line, []byte(workspaces)) {
			a.t.Errorf("process %s still runs: %q", filepath.Base(dir), line)
		}
	}
}
