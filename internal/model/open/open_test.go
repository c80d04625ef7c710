package open_test

import (
	"bufio"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/fakeserver"
	"github.com/herdgate/herdgate/internal/model/modeltest"
	"github.com/herdgate/herdgate/internal/model/open"
	"github.com/herdgate/herdgate/internal/model/script"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

func ask(t *testing.T, r *model.Registry, name string) (string, error) {
	t.Helper()
	m, err := r.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	res, err := m.Generate(t.Context(), model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: "hi"}}}, nil)
	return res.Message.Text, err
}

func TestOpen(t *testing.T) {
	t.Setenv("TEST_MODEL_KEY", "k1")
	s := modeltest.New(t, modeltest.JSON(503, `{}`), modeltest.Text("from the server"))
	path := filepath.Join(t.TempDir(), "s.yaml")
	if err := os.WriteFile(path, []byte(`default: {turns: [{fault: http_500}, {text: from the script}]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := open.Open([]open.Spec{
		{Name: "main", Provider: "openai", Model: "fake-1", BaseURL: s.URL(), APIKeyEnv: "TEST_MODEL_KEY", MaxRetries: 1, RetryBase: time.Millisecond},
		{Name: "offline", Provider: "script", Script: path, MaxRetries: 1},
		{Name: "data", Provider: "script", ScriptData: []byte(`default: {turns: [{text: data}]}`)},
		{Name: "claude", Provider: "anthropic", Model: "fake-2", BaseURL: served(t, `default: {turns: [{text: from the other server}]}`), APIKeyEnv: "TEST_MODEL_KEY"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"": "from the server", "offline": "from the script", "data": "data", "claude": "from the other server"} {
		if got, err := ask(t, r, name); err != nil || got != want {
			t.Errorf("%q answers %q, %v; want %q", name, got, err, want)
		}
	}
	if got := s.Requests()[1].Header.Get("Authorization"); got != "Bearer k1" {
		t.Errorf("Authorization = %q", got)
	}
}

// served runs a strict server with a script and gives its base URL.
func served(t *testing.T, rules string) string {
	t.Helper()
	parsed, err := script.Parse("rules", []byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	fake := fakeserver.New(parsed)
	s := httptest.NewServer(fake)
	t.Cleanup(func() {
		fake.Close()
		s.Close()
	})
	return s.URL + "/v1"
}

// F-122: every odd Retry-After leads to a bounded wait, and then to the answer.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	f, err := os.Open("../openai/testdata/F-122.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	n := 0
	for lines.Scan() {
		value := lines.Text()
		if strings.HasPrefix(value, "#") {
			continue
		}
		n++
		t.Run(value, func(t *testing.T) {
			t.Parallel()
			busy := modeltest.JSON(429, `{"error":{"message":"busy"}}`).With("Retry-After", value)
			s := modeltest.New(t, busy, busy, modeltest.Text("ok"))
			r, err := open.Open([]open.Spec{{Name: "m", Provider: "openai", Model: "f", BaseURL: s.URL(), MaxRetries: 5, RetryBase: 20 * time.Millisecond, RetryCap: 60 * time.Millisecond}})
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			if got, err := ask(t, r, "m"); err != nil || got != "ok" {
				t.Errorf("answer = %q, %v", got, err)
			}
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("took %v", took)
			}
			times := s.Times()
			for i := 1; i < len(times); i++ {
				if gap := times[i].Sub(times[i-1]); gap < 10*time.Millisecond {
					t.Errorf("pause %d is %v, want at least half of the base", i, gap)
				}
			}
		})
	}
	if n < 8 {
		t.Errorf("%d values, want all of the file", n)
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]open.Spec{
		"name is empty":   {Provider: "openai", Model: "m"},
		"want one of":     {Name: "a", Provider: "nope"},
		"model is empty":  {Name: "a", Provider: "openai"},
		"script is empty": {Name: "a", Provider: "script"},
		"no such file":    {Name: "a", Provider: "script", Script: "/nonexistent"},
	} {
		if _, err := open.Open([]open.Spec{s}); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "models[0]") {
			t.Errorf("Open(%+v) = %v, want %q", s, err, want)
		}
	}
}

// The script in the documentation is one, and both protocols serve it.
func TestDocumentedScript(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "```yml\n")
	rules, _, end := strings.Cut(rest, "```")
	if !ok || !end {
		t.Fatal("docs/configuration.md has no script")
	}
	for _, protocol := range []string{"openai", "anthropic"} {
		r, err := open.Open([]open.Spec{{Name: "m", Provider: protocol, Model: "f", BaseURL: served(t, rules), MaxRetries: 1, RetryBase: time.Millisecond, RetryCap: 10 * time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		m, err := r.Get("")
		if err != nil {
			t.Fatal(err)
		}
		req := model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: "please look around"}}, Tools: []model.ToolSpec{{Name: "task"}}}
		res, err := m.Generate(t.Context(), req, nil)
		if err != nil || len(res.Message.ToolCalls) != 1 || res.Message.ToolCalls[0].Name != "task" {
			t.Fatalf("%s: first answer = %+v, %v; want a call of task", protocol, res, err)
		}
		req.Messages = append(req.Messages, res.Message, model.Message{Role: model.RoleTool, ToolCallID: res.Message.ToolCalls[0].ID, Text: "a lake"})
		res, err = m.Generate(t.Context(), req, nil)
		if err != nil || res.Message.Text != "It says: a lake" || res.Usage == nil || res.Usage.InputTokens != 10 || res.Usage.CacheReadTokens != 4 {
			t.Errorf("%s: second answer = %+v, usage %+v, %v; want It says: a lake", protocol, res, res.Usage, err)
		}
		if got, err := ask(t, r, ""); err != nil || got != "I do not know." {
			t.Errorf("%s: %q, %v; want the default", protocol, got, err)
		}
	}
}
