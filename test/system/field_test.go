package system

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
	"github.com/herdgate/herdgate/internal/model/modeltest"
	"github.com/herdgate/herdgate/internal/model/open"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/prompt"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// The cases that docs/field-cases.md lists: what a model server sent elsewhere, byte
// for byte, through a real client of its protocol and the whole system.

// Where the inputs lie.
const (
	openAIInputs    = "../../internal/model/openai/testdata"
	anthropicInputs = "../../internal/model/anthropic/testdata"
	toolInputs      = "../../internal/tool/testdata"
	ownInputs       = "testdata"
)

// Routed asks for each agent the model of the case that is its task, and
// for all others, such as the sub-agents of a lead's case, the rest.
type Routed struct {
	mu   sync.Mutex
	to   map[string]model.Model
	rest model.Model
}

// Name implements model.Model.
func (*Routed) Name() string { return "routed" }

// ModelName implements model.Model.
func (*Routed) ModelName() string { return "fake-1" }

// Generate implements model.Model.
func (r *Routed) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	to := r.rest
	for _, m := range req.Messages {
		if m.Role != model.RoleUser {
			continue
		}
		r.mu.Lock()
		if of := r.to[prompt.Unframe(m.Text)]; of != nil {
			to = of
		}
		r.mu.Unlock()
	}
	return to.Generate(ctx, req, onDelta)
}

// add makes a server's answers those of a case.
func (r *Routed) add(name string, m model.Model) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to[name] = m
}

// dial is a real client for a server.
func dial(t *testing.T, provider, url string, change ...func(*open.Spec)) model.Model {
	t.Helper()
	spec := open.Spec{Name: "fake", Provider: provider, Model: "fake-1", BaseURL: url, RequestTimeout: Timeout, IdleTimeout: Timeout, RetryBase: time.Millisecond, RetryCap: 20 * time.Millisecond}
	for _, f := range change {
		f(&spec)
	}
	models, err := open.Open([]open.Spec{spec})
	if err != nil {
		t.Fatal(err)
	}
	m, err := models.Get("")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// field is a system of which every case has a model server of its own.
type field struct {
	*System
	api    *client.Client
	feed   *Feed
	routed *Routed
	files  string
}

func newField(t *testing.T, settings *config.Config) *field {
	t.Helper()
	f := &field{routed: &Routed{to: map[string]model.Model{}}, files: t.TempDir()}
	f.routed.rest = dial(t, "openai", modeltest.New(t, modeltest.Text("A fact.")).RepeatLast().URL())
	box := sandbox.New(sandbox.None, nil)
	f.System = New(t, Options{MaxRunning: 16, Model: f.routed, Settings: settings, Tools: func(req contract.TaskRequest) ([]tool.Tool, func(), error) {
		ws, err := tool.NewWorkspace(f.dir(req.ThreadID))
		if err != nil {
			return nil, nil, err
		}
		return tool.Tools(ws, tool.Options{Bash: true, Sandbox: box, BashTimeout: 2 * time.Second}), func() { _ = ws.Close() }, nil
	}})
	f.Sink("sink-1", t.TempDir())
	f.Admission("adm-1")
	f.Executor("ex-1", 16, time.Second)
	_, f.api = f.Lead("lead-1", f.files)
	f.feed = f.Follow()
	natstest.Eventually(t, Timeout, func() (bool, string) {
		_, err := f.api.ListEvents(timeout(t), client.EventQuery{Limit: 1}, 0)
		return err == nil, fmt.Sprint("the event store does not answer: ", err)
	})
	return f
}

func (f *field) dir(thread contract.ThreadID) string {
	return tool.ThreadDir(f.files, contract.DefaultTenant, thread)
}

// stored are a task's events, once its end is among them.
func (f *field) stored(t *testing.T, id contract.TaskID) []contract.EventRecord {
	t.Helper()
	var events []contract.EventRecord
	natstest.Eventually(t, 2*Timeout, func() (bool, string) { // commands run into their limits, one after another
		page, err := f.api.ListEvents(timeout(t), client.EventQuery{TaskID: id, Limit: 1000}, 0)
		events = page.Events
		return err == nil && slices.ContainsFunc(events, func(e contract.EventRecord) bool { return e.EventType == contract.RecordEnd }), fmt.Sprint("the end of ", id, " is not stored: ", err)
	})
	return events
}

// file reads an input; each pair after its path is replaced.
func file(t *testing.T, dir, name string, replace ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return []byte(strings.NewReplacer(replace...).Replace(string(b)))
}

// turns reads the answers of a script, with replacements.
func turns(t *testing.T, dir, name string, replace ...string) []modeltest.Reply {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, file(t, dir, name, replace...), 0o600); err != nil {
		t.Fatal(err)
	}
	return modeltest.Load(t, path)
}

// results are the texts of all results in the newest request.
func results(s *modeltest.Server) []string {
	var texts []string
	if all := s.Requests(); len(all) > 0 {
		for _, m := range all[len(all)-1].Messages {
			if m.Role == "tool" {
				texts = append(texts, m.Text())
			}
		}
	}
	return texts
}

// valid checks that a strict server got nothing but UTF-8 and unique ids of calls.
func valid(t *testing.T, s *modeltest.Server) {
	t.Helper()
	for i, r := range s.Requests() {
		if !utf8.Valid(r.Body) || !json.Valid(r.Body) {
			t.Errorf("request %d is no JSON in UTF-8: %q", i, r.Body)
		}
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

const allDone = "All parts are done."

// F-004, F-006, F-010, F-012, F-096, F-098, F-100, F-102, F-104, F-108, F-126: a
// lead whose model writes calls that are odd, cut, repeated or without end. What can
// be delegated runs, once and by its own id; the rest is told to the model, in few
// words; and a strict server takes every conversation back.
func TestFieldCasesOfLeads(t *testing.T) {
	t.Parallel()
	f := newField(t, nil)
	sse := func(name string) modeltest.Reply { return modeltest.SSE(file(t, openAIInputs, name)) }
	script := func(name string) []modeltest.Reply { return turns(t, openAIInputs, name) }
	huge := strings.Repeat("N", 300<<10)
	var long string
	{
		b := file(t, openAIInputs, "F-104.json")
		i := bytes.Index(b, []byte("NNNN"))
		long = string(b[i : i+bytes.IndexByte(b[i:], '"')])
	}
	six := []string{"Accra", "Hanoi", "Hanoi", "Oslo", "Quito", "Quito"}
	for name, c := range map[string]struct {
		replies []modeltest.Reply
		repeat  bool
		tasks   []string // descriptions of what ran
		told    []string // what the model was told of the others, in order
		output  string   // "" is a run that fails
		total   int
	}{
		"F-004":                {replies: turns(t, ownInputs, "F-004.json"), tasks: six, output: "[Delegation limit reached]", total: 6},
		"F-006":                {replies: turns(t, ownInputs, "F-006.json"), tasks: []string{"Oslo"}, told: []string{"no tool"}, output: allDone},
		"F-010":                {replies: []modeltest.Reply{sse("F-010.sse"), modeltest.Text(allDone)}, tasks: []string{"Oslo"}, output: allDone},
		"F-012":                {replies: turns(t, ownInputs, "F-012.json"), repeat: true, told: []string{"no tool"}},
		"F-096":                {replies: []modeltest.Reply{sse("F-096.sse"), modeltest.Text(allDone)}, tasks: []string{"Lima", "Oslo"}, output: allDone},
		"F-096, byte for byte": {replies: []modeltest.Reply{sse("F-096.sse").ByByte(), modeltest.Text(allDone)}, tasks: []string{"Lima", "Oslo"}, output: allDone},
		"F-098":                {replies: []modeltest.Reply{sse("F-098.sse"), modeltest.Text(allDone)}, tasks: []string{"Lima", "Oslo"}, output: allDone},
		"F-098, byte for byte": {replies: []modeltest.Reply{sse("F-098.sse").ByByte(), modeltest.Text(allDone)}, tasks: []string{"Lima", "Oslo"}, output: allDone},
		"F-100":                {replies: script("F-100.json"), tasks: []string{"Lima", "Oslo", "Quito"}, output: allDone},
		"F-102": {replies: script("F-102.json"), tasks: []string{"Oslo"}, output: allDone,
			told: []string{"at character 5", "at character 2", "at character 15", "at character 1", "at character 15", "at character 1", "at character 16", "at character", "at character 16", "at character"}},
		"F-104": {replies: turns(t, openAIInputs, "F-104.json", long, huge), output: allDone,
			told: []string{"got null", "got []", "want an object", "want an object", "want an object", "not JSON at character 1"}},
		"F-108": {replies: script("F-108.json"), tasks: []string{"Lima", "Oslo"}, output: allDone},
		"F-126": {replies: turns(t, ownInputs, "F-126.json"), told: []string{"nested too deeply"}, output: allDone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modeltest.New(t, c.replies...)
			if c.repeat {
				s.RepeatLast()
			}
			f.routed.add(name, dial(t, "openai", s.URL()))
			total, at := max(c.total, 1), 16
			if c.total == 0 {
				total = 50
			}
			run, err := f.api.RunToEnd(timeout(t), wire.RunRequest{Input: name, MaxTotalSubagents: &total, MaxConcurrentSubagents: &at})
			if err != nil {
				t.Fatal(err)
			}
			valid(t, s)
			switch {
			case c.output == "" && (run.Status != contract.RunFailed || run.Error == nil || *run.Error == "" || len(s.Requests()) > 8):
				t.Errorf("run = %+v after %d requests; want one that fails soon, with a reason", run, len(s.Requests()))
			case c.output != "" && (run.Status != contract.RunCompleted || run.Output == nil || !strings.HasPrefix(*run.Output, c.output)):
				t.Errorf("run = %s %q %v; want %q", run.Status, deref(run.Output), run.Error, c.output)
			}
			page, err := f.api.ListTasks(timeout(t), client.TaskQuery{RunID: run.RunID})
			if err != nil {
				t.Fatal(err)
			}
			var ran []string
			ids := map[contract.TaskID]bool{}
			for _, task := range page.Tasks {
				ran = append(ran, task.Description)
				ids[task.TaskID] = true
				ends := 0
				for _, e := range f.stored(t, task.TaskID) {
					if e.EventType == contract.RecordEnd {
						ends++
					}
				}
				if task.Status != contract.TaskCompleted || ends != 1 {
					t.Errorf("task %s: %s with %d ends", task.Description, task.Status, ends)
				}
			}
			if slices.Sort(ran); !slices.Equal(ran, c.tasks) || len(ids) != len(ran) {
				t.Errorf("tasks %q ran with ids %v, want %q", ran, slices.Collect(maps.Keys(ids)), c.tasks)
			}
			var told []string
			for _, text := range results(s) {
				if !strings.Contains(text, "A fact.") && c.total == 0 {
					told = append(told, text)
				}
				if len(text) > 1000 {
					t.Errorf("a result has %d bytes: %.200s…", len(text), text)
				}
			}
			if len(told) != len(c.told) {
				t.Fatalf("told %q; want %d", told, len(c.told))
			}
			for i, want := range c.told {
				if !strings.Contains(told[i], want) {
					t.Errorf("result %d = %q, want %q in it", i, told[i], want)
				}
			}
			for i, r := range s.Requests() {
				if len(r.Body) > 64<<10 {
					t.Errorf("request %d has %d bytes", i, len(r.Body))
				}
			}
		})
	}
}

// oneAtATime gives the answers of a server that speaks the other protocol, and
// refuses what a strict one would.
type oneAtATime struct {
	t *testing.T

	mu     sync.Mutex
	bodies [][]byte
	bytes  [][]byte
}

func (s *oneAtATime) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bodies = append(s.bodies, body)
	// Blocks that come from a file were signed by somebody else.
	if why := fakeserver.CheckMessages(body); why != "" && !strings.Contains(why, "the signature does not fit") {
		s.t.Errorf("request %d would be refused: %s", len(s.bodies), why)
	}
	n := min(len(s.bodies), len(s.bytes))
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = w.Write(s.bytes[n-1])
}

// messages serves streams of the other protocol, the last one again and again.
func messages(t *testing.T, streams ...[]byte) (*oneAtATime, string) {
	t.Helper()
	s := &oneAtATime{t: t, bytes: streams}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	return s, srv.URL + "/v1"
}

// blocks is a message of the other protocol as a stream.
func blocks(stop string, content ...json.RawMessage) []byte {
	var b bytes.Buffer
	event := func(kind, format string, args ...any) {
		var line bytes.Buffer
		_ = json.Compact(&line, fmt.Appendf(nil, format, args...))
		fmt.Fprintf(&b, "event: %s\ndata: %s\n\n", kind, line.Bytes())
	}
	event("message_start", `{"type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"fake","content":[],"usage":{"input_tokens":9,"output_tokens":1}}}`)
	for i, c := range content {
		event("content_block_start", `{"type":"content_block_start","index":%d,"content_block":%s}`, i, c)
		event("content_block_stop", `{"type":"content_block_stop","index":%d}`, i)
	}
	event("message_delta", `{"type":"message_delta","delta":{"stop_reason":%q},"usage":{"output_tokens":4}}`, stop)
	event("message_stop", `{"type":"message_stop"}`)
	return b.Bytes()
}

// F-064, F-066, F-068, F-080, F-082, F-084, F-088, F-106, F-110, F-112, F-114, F-116, F-118,
// F-120, F-122, F-124, F-126, STATUS-04, STATUS-05, STATUS-06, USAGE-01, USAGE-06,
// TOOL-07: sub-agents whose model or provider does what others have met. Each task has
// one end with the right words in it, and what it leaves is gone.
func TestFieldCasesOfTasks(t *testing.T) {
	t.Parallel()
	settings := config.Default()
	settings.Subagents.Agents = map[string]config.AgentOverride{"frugal": {TokenBudget: &config.TokenBudget{Enabled: true, MaxTokens: 1000, WarnThreshold: 0.7, HardStopThreshold: 1}}}
	f := newField(t, &settings)
	// check looks at a task that has ended.
	type check func(t *testing.T, s *modeltest.Server, rec contract.TaskRecord, stored []contract.EventRecord)
	// A negative number of requests is the least.
	completed := func(text string, requests int, more ...check) check {
		return func(t *testing.T, s *modeltest.Server, rec contract.TaskRecord, stored []contract.EventRecord) {
			t.Helper()
			if rec.State != contract.StateCompleted || rec.Result != text || rec.StopReason != "" || rec.Error != "" {
				t.Errorf("record = %+v; want the result %q", rec, text)
			}
			if n := len(s.Requests()); requests > 0 && n != requests || n < -requests {
				t.Errorf("%d requests, want %d", n, requests)
			}
			for _, m := range more {
				m(t, s, rec, stored)
			}
		}
	}
	capped := func(why contract.StopReason, requests int) check {
		return func(t *testing.T, s *modeltest.Server, rec contract.TaskRecord, _ []contract.EventRecord) {
			t.Helper()
			if rec.State != contract.StateFailed || rec.StopReason != why || rec.ErrorCode != "" || len(s.Requests()) != requests {
				t.Errorf("record = %+v after %d requests; want %s after %d", rec, len(s.Requests()), why, requests)
			}
		}
	}
	spent := func(want *contract.Usage) check {
		return func(t *testing.T, _ *modeltest.Server, rec contract.TaskRecord, _ []contract.EventRecord) {
			t.Helper()
			if !reflect.DeepEqual(rec.Usage, want) {
				t.Errorf("usage = %+v, want %+v", rec.Usage, want)
			}
		}
	}
	told := func(want ...string) check {
		return func(t *testing.T, s *modeltest.Server, _ contract.TaskRecord, _ []contract.EventRecord) {
			t.Helper()
			got := results(s)
			if len(got) != len(want) {
				t.Fatalf("results = %q, want %d", got, len(want))
			}
			for i, w := range want {
				if !strings.Contains(got[i], w) {
					t.Errorf("result %d = %q, want %q in it", i, got[i], w)
				}
			}
		}
	}
	absent := func(paths ...string) check {
		return func(t *testing.T, _ *modeltest.Server, rec contract.TaskRecord, _ []contract.EventRecord) {
			t.Helper()
			for _, p := range paths {
				if !filepath.IsAbs(p) {
					p = filepath.Join(f.dir(rec.ThreadID), p)
				}
				if _, err := os.Lstat(p); err == nil {
					t.Errorf("%s was made", p)
				}
			}
		}
	}
	llmError := func(says string) check {
		return func(t *testing.T, s *modeltest.Server, rec contract.TaskRecord, stored []contract.EventRecord) {
			t.Helper()
			if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrLLM || rec.StopReason != "" || !strings.Contains(rec.Error, says) || rec.Result != "" {
				t.Errorf("record = %+v; want llm_error with %q", rec, says)
			}
			// The loop has ended by itself, with a last message that says so.
			last := stored[len(stored)-2]
			if last.EventType != contract.RecordStep || !strings.Contains(string(last.Content), "The model provider failed") {
				t.Errorf("before its end stands %s %s", last.EventType, last.Content)
			}
		}
	}
	escape := filepath.Join(t.TempDir(), "escape")
	sleeps := fmt.Sprintf("sleep 61%d", os.Getpid())
	sse := func(name string) modeltest.Reply { return modeltest.SSE(file(t, openAIInputs, name)) }
	list := func(replies ...modeltest.Reply) []modeltest.Reply { return replies }
	again := modeltest.Text("there")
	impatient := func(s *open.Spec) { s.IdleTimeout, s.MaxRetries = 400*time.Millisecond, 3 } // a slow machine may need more than one
	twice := func(s *open.Spec) { s.MaxRetries = 1 }
	text := modeltest.Usage{Input: 10, Output: 5, Total: 15}
	broken := modeltest.SSE([]byte(`data: {"choices":[{"index":0,"delta":{"content":"Half of"},"finish_reason":null}]}` + "\n\n" + `data: {"error":{"type":"overloaded_error","message":"busy"}}` + "\n\n"))
	bash := func(command string, u *modeltest.Usage) modeltest.Reply {
		args, err := json.Marshal(map[string]string{"command": command})
		if err != nil {
			t.Fatal(err)
		}
		return modeltest.Answer("", []modeltest.Call{{ID: "c", Name: "bash", Args: string(args)}}, "tool_calls", u)
	}
	poll := []modeltest.Reply{}
	for range 8 {
		poll = append(poll, bash("echo x >> n; wc -l < n", &text))
	}
	var unknown, reasoned []modeltest.Reply
	for i := range 8 {
		unknown = append(unknown, bash(fmt.Sprintf("echo %d%s", i, strings.Repeat(" lorem ipsum", 150)), nil))
		reasoned = append(reasoned, bash(fmt.Sprint("echo ", i), &modeltest.Usage{Input: 20, Total: 520}))
	}
	var busy []modeltest.Reply
	for line := range strings.Lines(string(file(t, openAIInputs, "F-122.txt"))) {
		if !strings.HasPrefix(line, "#") {
			busy = append(busy, modeltest.JSON(429, `{"error":{"message":"busy"}}`).With("Retry-After", strings.TrimRight(line, "\n")))
		}
	}
	deep := strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000)
	threadOf := func(name string) contract.ThreadID {
		return contract.ThreadID("th_" + strings.NewReplacer(" ", "_", ",", "", "-", "").Replace(name))
	}
	for name, c := range map[string]struct {
		replies []modeltest.Reply
		repeat  bool
		agent   string
		spec    func(*open.Spec)
		check   check
	}{
		"F-064":       {replies: turns(t, ownInputs, "F-064.json"), repeat: true, check: capped(contract.StopLoopCapped, 5)},
		"F-066":       {replies: turns(t, ownInputs, "F-066.json"), check: completed(allDone, 13)},
		"F-066, poll": {replies: append(poll, modeltest.Text(allDone)), check: completed(allDone, 9)},
		"F-068": {replies: list(modeltest.Answer("half", []modeltest.Call{{ID: "c", Name: "bash", Args: `{"command":"echo hi"}`}}, "tool_calls", nil)), repeat: true,
			check: func(t *testing.T, _ *modeltest.Server, rec contract.TaskRecord, _ []contract.EventRecord) {
				t.Helper()
				if rec.State != contract.StateCompleted || rec.StopReason != contract.StopLoopCapped || !strings.HasPrefix(rec.Result, "half") {
					t.Errorf("record = %+v; want what there was, and the reason", rec)
				}
			}},
		"F-080": {replies: turns(t, toolInputs, "F-080.json", "sleep 600", sleeps), check: completed(allDone, 2, told("ok", "ok", "ok", "ok", "ok", ""),
			func(t *testing.T, _ *modeltest.Server, _ contract.TaskRecord, _ []contract.EventRecord) {
				t.Helper()
				if left := alive(sleeps); len(left) > 0 {
					t.Errorf("after the end of the task there is still %q", left)
				}
			})},
		"F-082": {replies: turns(t, toolInputs, "F-082.json", "esc/tmp/qa-escape", "esc"+escape), check: completed(allDone, 3, told("", "outside of the workspace", "outside of the workspace", ""), absent(escape))},
		"F-084": {replies: turns(t, toolInputs, "F-084.json", "<workspace>", f.dir(threadOf("F-084")), "/../../../tmp/qa-dd", "/../../../qa-dd"),
			check: completed(allDone, 2, told("outside of the workspace", "outside of the workspace", "outside of the workspace", "NUL", "empty"), absent("../../qa-dd"))},
		"F-088": {replies: turns(t, toolInputs, "F-088.json"), check: completed("Seen.", 2, told("a␀b\uFFFD\uFFFDcx␀y"),
			func(t *testing.T, _ *modeltest.Server, _ contract.TaskRecord, stored []contract.EventRecord) {
				t.Helper()
				if !slices.ContainsFunc(stored, func(e contract.EventRecord) bool {
					return e.EventType == contract.RecordStep && strings.Contains(string(e.Content), "a␀b\uFFFD\uFFFDcx␀y")
				}) {
					t.Error("the output is not stored as it was shown")
				}
			})},
		"F-106":          {replies: turns(t, openAIInputs, "F-106.json"), check: completed(allDone, 3, told("token limit", "token limit"), absent("a.txt"))},
		"F-110":          {replies: list(sse("F-110.sse")), check: completed("Fine.", 1, spent(&contract.Usage{InputTokens: 12, TotalTokens: 12}))},
		"F-110, unknown": {replies: list(modeltest.Answer("Fine.", nil, "stop", nil)), check: completed("Fine.", 1, spent(nil))},
		"F-110, budget": {replies: unknown, agent: "frugal", check: func(t *testing.T, s *modeltest.Server, rec contract.TaskRecord, stored []contract.EventRecord) {
			t.Helper()
			capped(contract.StopTokenCapped, len(s.Requests()))(t, s, rec, stored)
			spent(nil)(t, s, rec, stored)
		}},
		"F-112":                 {replies: turns(t, openAIInputs, "F-112.json"), check: completed("ok", 1, spent(&contract.Usage{InputTokens: 20, OutputTokens: 500, TotalTokens: 520}))},
		"F-112, budget":         {replies: reasoned, agent: "frugal", check: capped(contract.StopTokenCapped, 2)},
		"F-114":                 {replies: list(sse("F-114.sse")), check: completed("before bad \uFFFD byte", 1)},
		"F-114, byte for byte":  {replies: list(sse("F-114.sse").ByByte()), check: completed("before bad \uFFFD byte", 1)},
		"F-116":                 {replies: list(broken, again), spec: twice, check: completed("there", 2, spent(&contract.Usage{InputTokens: 10, OutputTokens: 5, TotalTokens: 15}))},
		"F-116, again":          {replies: list(broken), repeat: true, spec: twice, check: llmError("busy")},
		"F-118":                 {replies: list(sse("F-118.sse").Hanging(), again), repeat: true, spec: impatient, check: completed("there", -2)},
		"F-118, no headers":     {replies: list(modeltest.Silence(), again), repeat: true, spec: impatient, check: completed("there", -2)},
		"F-118, comments":       {replies: list(modeltest.Comments(), again), repeat: true, spec: impatient, check: completed("there", -2)},
		"F-118, again":          {replies: list(sse("F-118.sse").Hanging()), repeat: true, spec: impatient, check: llmError("idle")},
		"F-120":                 {replies: list(sse("F-120.sse")), check: completed("OK!", 1, spent(&contract.Usage{InputTokens: 4, OutputTokens: 3, TotalTokens: 7}))},
		"F-120, byte for byte":  {replies: list(sse("F-120.sse").ByByte()), check: completed("OK!", 1, spent(&contract.Usage{InputTokens: 4, OutputTokens: 3, TotalTokens: 7}))},
		"F-122":                 {replies: append(busy, again), spec: func(s *open.Spec) { s.MaxRetries = len(busy) }, check: completed("there", len(busy)+1)},
		"F-126":                 {replies: list(modeltest.Calls(modeltest.Call{ID: "c", Name: "bash", Args: `{"command":"true","extra":` + deep + `}`}), again), check: completed("there", 2, told("nested too deeply"))},
		"error in prose":        {replies: list(modeltest.Text("Error: the model provider failed: 500")), check: completed("Error: the model provider failed: 500", 1)},
		"refused for good":      {replies: list(modeltest.JSON(401, `{"error":{"message":"no such key"}}`)), check: llmError("no such key")},
		"refused after a while": {replies: list(bash("echo half way", &text), modeltest.JSON(500, `{"error":{"message":"out of order"}}`)), repeat: true, spec: twice, check: llmError("out of order")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := modeltest.New(t, c.replies...)
			if c.repeat {
				s.RepeatLast()
			}
			f.routed.add(name, dial(t, "openai", s.URL(), func(spec *open.Spec) {
				if c.spec != nil {
					c.spec(spec)
				}
			}))
			req := Request(name)
			req.ThreadID, req.Subagent.MaxTurns = threadOf(name), 30
			if c.agent != "" {
				req.Subagent.Name = c.agent
			}
			f.Submit(req)
			stored := f.stored(t, req.TaskID)
			rec, _ := f.Record(req.TaskID)
			valid(t, s)
			for _, e := range stored {
				if !utf8.Valid(e.Content) || !utf8.Valid(e.Metadata) {
					t.Errorf("%s is no UTF-8: %q", e.EventType, e.Content)
				}
			}
			c.check(t, s, rec, stored)
		})
	}

	t.Run("F-116, the other protocol", func(t *testing.T) {
		t.Parallel()
		good := blocks("end_turn", json.RawMessage(`{"type":"text","text":"there"}`))
		s, url := messages(t, file(t, anthropicInputs, "F-116.sse"), good)
		f.routed.add(t.Name(), dial(t, "anthropic", url, twice))
		req := Request(t.Name())
		f.Submit(req)
		f.stored(t, req.TaskID)
		if rec, _ := f.Record(req.TaskID); rec.State != contract.StateCompleted || rec.Result != "there" || len(s.bodies) != 2 {
			t.Errorf("record = %+v after %d requests", rec, len(s.bodies))
		}
	})
	t.Run("F-124", func(t *testing.T) {
		t.Parallel()
		var script struct {
			Turns []struct {
				StopReason string `json:"stop_reason"`
				Content    []json.RawMessage
			}
		}
		if err := json.Unmarshal(file(t, anthropicInputs, "F-124.json", "list_files", "ls"), &script); err != nil {
			t.Fatal(err)
		}
		var streams [][]byte
		for _, turn := range script.Turns {
			streams = append(streams, blocks(turn.StopReason, turn.Content...))
		}
		s, url := messages(t, streams...)
		f.routed.add(t.Name(), dial(t, "anthropic", url))
		req := Request(t.Name())
		f.Submit(req)
		f.stored(t, req.TaskID)
		if rec, _ := f.Record(req.TaskID); rec.State != contract.StateCompleted || rec.Result != "Done." || len(s.bodies) != 2 {
			t.Fatalf("record = %+v after %d requests", rec, len(s.bodies))
		}
		var sent struct {
			Messages []struct {
				Role    string
				Content []json.RawMessage
			}
		}
		if err := json.Unmarshal(s.bodies[1], &sent); err != nil {
			t.Fatal(err)
		}
		reply := sent.Messages[1].Content
		if sent.Messages[1].Role != "assistant" || len(reply) != len(script.Turns[0].Content) {
			t.Fatalf("replayed: %s", s.bodies[1])
		}
		for i, want := range script.Turns[0].Content {
			var got, is map[string]any
			if json.Unmarshal(reply[i], &got) != nil || json.Unmarshal(want, &is) != nil || !reflect.DeepEqual(got, is) {
				t.Errorf("block %d comes back as %s, was %s", i, reply[i], want)
			}
		}
	})
}

// alive lists the command lines of processes that hold word.
func alive(word string) []string {
	var left []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		b, err := os.ReadFile(f)
		if line := strings.ReplaceAll(string(b), "\x00", " "); err == nil && strings.Contains(line, word) {
			left = append(left, line)
		}
	}
	return left
}

// F-070, F-072: compaction begins where a provider refuses what is too long, and does
// not begin again and again where one result, or its own summary, fills the window.
func TestFieldCasesOfCompaction(t *testing.T) {
	t.Parallel()
	long := modeltest.Load(t, "../../internal/compact/testdata/F-070.json")
	long[1] = modeltest.JSON(400, `{"error":{"message":"context length exceeded","type":"invalid_request_error","code":"context_length_exceeded"}}`)
	for name, c := range map[string]struct {
		replies  []modeltest.Reply
		tokens   float64 // that start compaction
		keep     float64
		requests int
	}{
		"F-070": {long, 5000, 20, 4},
		"F-072": {turns(t, ownInputs, "F-072.json"), 500, 1, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			settings := config.Default()
			settings.Summarization.Enabled = true
			settings.Summarization.Trigger = []config.Threshold{{Type: config.ThresholdTokens, Value: c.tokens}}
			settings.Summarization.Keep.Value = c.keep
			f := newField(t, &settings)
			s := modeltest.New(t, c.replies...)
			f.routed.rest = dial(t, "openai", s.URL())
			req := Request(name)
			f.Submit(req)
			f.stored(t, req.TaskID)
			rec, _ := f.Record(req.TaskID)
			if rec.State != contract.StateCompleted || len(s.Requests()) > c.requests || name == "F-070" && rec.Result != allDone {
				t.Errorf("record = %.2000s after %d requests", fmt.Sprintf("%+v", rec), len(s.Requests()))
			}
			for i, r := range s.Requests() {
				if len(r.Body) > 32<<10 {
					t.Errorf("request %d has %d bytes", i, len(r.Body))
				}
			}
		})
	}
}

// F-126: an event whose payload nests deeper than anybody has to read is put aside,
// in no time; what came before and after it is stored. As deep as we accept is what
// the store takes, too.
func TestDeepEvents(t *testing.T) {
	t.Parallel()
	s := New(t, Options{Unrecorded: true}) // no service would write such an event
	dir := t.TempDir()
	s.Sink("sink-1", dir)
	s.Admission("adm-1")
	s.Executor("ex-1", 1, time.Second)
	_, c := s.Lead("lead-1", dir)
	ended := func(id contract.TaskID) {
		t.Helper()
		natstest.Eventually(t, Timeout, func() (bool, string) {
			page, err := c.ListEvents(timeout(t), client.EventQuery{TaskID: id, Types: []string{contract.RecordEnd}}, 0)
			return err == nil && len(page.Events) == 1, fmt.Sprint("the end of ", id, " is not stored: ", err)
		})
	}
	first := Request("first")
	s.Submit(first)
	ended(first.TaskID)
	stored, err := s.Bus.Get(timeout(t), s.Bus.Names.EventStream(), 1)
	if err != nil {
		t.Fatal(err)
	}
	ev, err := envelope.Decode(stored.Data)
	if err != nil {
		t.Fatal(err)
	}
	publish := func(id string, depth int) {
		t.Helper()
		ev.ID, ev.Type = id, contract.EventTaskRunning
		ev.Data = json.RawMessage(`{"deep":"HERE"}`)
		b, err := envelope.Encode(ev)
		if err != nil {
			t.Fatal(err)
		}
		step := `{"task_id":"` + string(first.TaskID) + `","message_index":7,"message":{"kind":"ai","text":"x","truncated":false,"tool_calls":[{"name":"bash","args":{"x":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + `}}]}}`
		b = bytes.Replace(b, ev.Data, []byte(step), 1)
		if _, err := s.Bus.Publish(timeout(t), bus.Write{Subject: ev.NATSSubject(s.Bus.Names), Data: b, MsgID: id}); err != nil {
			t.Fatal(err)
		}
	}
	publish("deep", 20_000)
	const accepted = contract.MaxDepth - 6 // around it stand the envelope, the message and its call
	publish("shallow", accepted)
	last := Request("last")
	s.Submit(last)
	ended(last.TaskID)
	page, err := c.ListEvents(timeout(t), client.EventQuery{TaskID: first.TaskID, Types: []string{contract.RecordStep}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, e := range page.Events {
		if strings.Count(string(e.Content), "[") > 90 {
			found++
		}
		if len(e.Content) > 10_000 {
			t.Errorf("an event of %d bytes is stored", len(e.Content))
		}
	}
	if found != 1 {
		t.Errorf("%d events that nest %d levels are stored, want 1", found, accepted)
	}
	m, err := s.Bus.Last(timeout(t), s.Bus.Names.DeadStream(), s.Bus.Names.Dead("eventsink"))
	if err != nil || !strings.Contains(m.Header.Get("Herdgate-Reason"), "nested too deeply") {
		t.Errorf("dead letter: %+v, %v", m.Header, err)
	}
}
