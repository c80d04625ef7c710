package open_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/open"
)

const testKey = "sk-Secret-1234567890"

// both runs f for each protocol, with a model of the server that h is.
func both(t *testing.T, h http.HandlerFunc, f func(t *testing.T, protocol string, m model.Model)) {
	t.Helper()
	for _, protocol := range []string{"openai", "anthropic"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			s := httptest.NewServer(h)
			t.Cleanup(s.Close)
			f(t, protocol, dial(t, open.Spec{Provider: protocol, BaseURL: s.URL + "/v1"}))
		})
	}
}

func dial(t *testing.T, spec open.Spec) model.Model {
	t.Helper()
	spec.Name, spec.Model, spec.IdleTimeout = "main", "some-model", 10*time.Second
	r, err := open.Open([]open.Spec{spec})
	if err != nil {
		t.Fatal(err)
	}
	m, err := r.Get("")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func generate(t *testing.T, m model.Model) (model.Response, error) {
	t.Helper()
	return m.Generate(t.Context(), model.Request{Messages: []model.Message{{Role: model.RoleUser, Text: "hi"}}}, nil)
}

// failed asks and wants a failure that says want and nothing of what is secret.
func failed(t *testing.T, m model.Model, kind model.ErrorKind, code string, want ...string) *model.Error {
	t.Helper()
	res, err := generate(t, m)
	var e *model.Error
	if !errors.As(err, &e) {
		t.Fatalf("Generate = %+v, %v; want a *model.Error", res, err)
	}
	if e.Kind != kind || e.Code != code {
		t.Errorf("error = %+v, want %s %s", e, kind, code)
	}
	for _, w := range want {
		if !strings.Contains(e.Message, w) {
			t.Errorf("message %q, want %q in it", e.Message, w)
		}
	}
	if strings.Contains(fmt.Sprintf("%+v", e), testKey) || len(e.Message) > 800 || strings.Contains(e.Message, "\n") {
		t.Errorf("message %q holds a key, is long, or has several lines", e.Message)
	}
	return e
}

func answers(protocol string) string {
	if protocol == "openai" {
		return `data: {"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	}
	return `data: {"type":"message_start","message":{"usage":{"input_tokens":3}}}` + "\n\n" +
		`data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":"ok"}}` + "\n\n" +
		`data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}` + "\n\n" +
		`data: {"type":"message_stop"}` + "\n\n"
}

// A refusal is understood in every form that gateways and local servers give it,
// and tells what to do; of a web page there is the title alone.
func TestRefusals(t *testing.T) {
	t.Setenv("SOME_KEY", testKey+"\n")
	for name, c := range map[string]struct {
		status     int
		body, code string
		kind       model.ErrorKind
		want       []string
	}{
		"object":          {400, `{"error":{"message":"bad thing","type":"x","code":400}}`, "http_400", model.KindPermanent, []string{"400 Bad Request", "bad thing"}},
		"text as error":   {404, `{"error":"model 'q' not found"}`, "not_found", model.KindPermanent, []string{"model 'q' not found", `"some-model"`, "base_url", "http://127.0.0.1"}},
		"message":         {422, `{"object":"error","message":"bad thing"}`, "http_422", model.KindPermanent, []string{"bad thing"}},
		"detail":          {422, `{"detail":[{"msg":"bad thing"}]}`, "http_422", model.KindPermanent, []string{"bad thing"}},
		"list":            {400, `[{"error":{"message":"bad thing"}}]`, "http_400", model.KindPermanent, []string{"bad thing"}},
		"plain":           {400, "bad\n thing", "http_400", model.KindPermanent, []string{"bad thing"}},
		"nothing":         {400, "", "http_400", model.KindPermanent, []string{"400 Bad Request"}},
		"web page":        {503, "<html><head><title>Down for\n maintenance</title></head>" + strings.Repeat("<p>", 5000), "http_503", model.KindTransient, []string{`a web page with the title "Down for maintenance"`}},
		"wrong key":       {401, `{"error":{"message":"bad key ` + testKey + `"}}`, "unauthorized", model.KindPermanent, []string{"bad key [key]", "SOME_KEY"}},
		"not allowed":     {403, `{"error":{"message":"no"}}`, "unauthorized", model.KindPermanent, []string{"SOME_KEY", `"some-model"`}},
		"no such path":    {404, "<html>x</html>", "not_found", model.KindPermanent, []string{"a web page", "check base_url"}},
		"too long, code":  {400, `{"error":{"message":"no","code":"context_length_exceeded"}}`, "context_length_exceeded", model.KindPermanent, []string{"no"}},
		"too long, local": {400, `{"error":{"message":"no","type":"exceed_context_size_error"}}`, "context_length_exceeded", model.KindPermanent, []string{"no"}},
		"too large":       {413, `<html><title>413</title>`, "context_length_exceeded", model.KindPermanent, nil},
	} {
		for _, protocol := range []string{"openai", "anthropic"} {
			t.Run(name+"/"+protocol, func(t *testing.T) {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					w.WriteHeader(c.status)
					_, _ = io.WriteString(w, c.body)
				}))
				defer s.Close()
				e := failed(t, dial(t, open.Spec{Provider: protocol, BaseURL: s.URL + "/v1", APIKeyEnv: "SOME_KEY"}), c.kind, c.code, c.want...)
				if got, want := model.TooLong(e), e.Code == "context_length_exceeded"; got != want {
					t.Errorf("TooLong(%v) = %v, want %v", e, got, want)
				}
			})
		}
	}
}

// A key that is missing is told of; what may be a key in the place of the
// variable's name is not.
func TestRefusalWithoutKey(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) }))
	defer s.Close()
	for env, want := range map[string]string{"": "no api_key_env", "HERDGATE_TEST_UNSET": "HERDGATE_TEST_UNSET is empty or not set", "gskAbc123": "that api_key_env names is empty"} {
		e := failed(t, dial(t, open.Spec{Provider: "openai", BaseURL: s.URL, APIKeyEnv: env}), model.KindPermanent, "unauthorized", want)
		if strings.Contains(e.Message, "gskAbc123") {
			t.Errorf("message %q repeats what may be a key", e.Message)
		}
	}
}

// A redirect is not followed: the other server would get the conversation and, in
// a header of the vendor's own, the key.
func TestRedirect(t *testing.T) {
	t.Setenv("SOME_KEY", testKey)
	var reached atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer other.Close()
	for _, status := range []int{301, 302, 307, 308} {
		for _, protocol := range []string{"openai", "anthropic"} {
			t.Run(fmt.Sprint(status, protocol), func(t *testing.T) {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					http.Redirect(w, r, other.URL+"/there?token=hidden", status)
				}))
				defer s.Close()
				e := failed(t, dial(t, open.Spec{Provider: protocol, BaseURL: s.URL + "/v1", APIKeyEnv: "SOME_KEY"}), model.KindPermanent, "redirected", other.URL+"/there", "base_url")
				if strings.Contains(e.Message, "hidden") {
					t.Errorf("message %q holds the query", e.Message)
				}
			})
		}
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("the other server got %d requests", n)
	}
}

// Of a refusal without end only the beginning is read.
func TestEndlessRefusal(t *testing.T) {
	t.Parallel()
	sent := make(chan int, 1)
	both(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(500)
		block := bytes.Repeat([]byte("x"), 1<<20)
		n := 0
		for ; n < 200; n++ {
			if _, err := w.Write(block); err != nil {
				break
			}
		}
		select {
		case sent <- n:
		default:
		}
	}, func(t *testing.T, _ string, m model.Model) {
		failed(t, m, model.KindTransient, "http_500", "xxx")
		select {
		case n := <-sent:
			if n == 200 {
				t.Error("all 200 MiB of a refusal were read")
			}
		case <-time.After(30 * time.Second):
			t.Error("the server still sends")
		}
	})
}

// What an answer is shows in its first character, not in its content type.
func TestWrongContentType(t *testing.T) {
	t.Parallel()
	whole := map[string]string{
		"openai":    `{"choices":[{"index":0,"message":{"content":"ok"},"finish_reason":"stop"}]}`,
		"anthropic": `{"type":"message","content":[{"type":"text","text":"ok"}],"stop_reason":"end_turn"}`,
	}
	protocolOf := func(r *http.Request) string {
		if strings.HasSuffix(r.URL.Path, "/messages") {
			return "anthropic"
		}
		return "openai"
	}
	for name, h := range map[string]http.HandlerFunc{
		"stream as JSON": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, answers(protocolOf(r)))
		},
		"JSON as text": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, "\n "+whole[protocolOf(r)])
		},
		"byte order mark": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "\uFEFF"+answers(protocolOf(r)))
		},
		"gzip, by byte": func(w http.ResponseWriter, r *http.Request) {
			var packed bytes.Buffer
			z := gzip.NewWriter(&packed)
			_, _ = io.WriteString(z, answers(protocolOf(r)))
			_ = z.Close()
			w.Header().Set("Content-Encoding", "gzip")
			for _, b := range packed.Bytes() {
				_, _ = w.Write([]byte{b})
				_ = http.NewResponseController(w).Flush()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			both(t, h, func(t *testing.T, _ string, m model.Model) {
				if res, err := generate(t, m); err != nil || res.Message.Text != "ok" {
					t.Errorf("Generate = %+v, %v; want ok", res, err)
				}
			})
		})
	}
	t.Run("web page", func(t *testing.T) {
		t.Parallel()
		both(t, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<!DOCTYPE html><title>Sign in</title>"+strings.Repeat("<p>secret", 9000))
		}, func(t *testing.T, _ string, m model.Model) {
			failed(t, m, model.KindTransient, "malformed", `title "Sign in"`, "base_url")
		})
	})
	t.Run("one huge event", func(t *testing.T) {
		t.Parallel()
		both(t, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "data: {")
			block := bytes.Repeat([]byte(" "), 1<<20)
			for range 40 {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}, func(t *testing.T, _ string, m model.Model) {
			failed(t, m, model.KindPermanent, "too_large")
		})
	})
}

// An answer that was cut at the token limit stays one, whatever follows: a call
// that is half written is never taken for a whole one. What comes after the reason
// to stop counts nevertheless.
func TestAfterTheFinish(t *testing.T) {
	t.Parallel()
	both(t, func(w http.ResponseWriter, r *http.Request) {
		body := `data: {"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}` + "\n\n" +
			`data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"ls","arguments":"{}"}}]},"finish_reason":null}]}` + "\n\n" +
			`data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
		if strings.HasSuffix(r.URL.Path, "/messages") {
			body = `data: {"type":"message_start","message":{"usage":{"input_tokens":3}}}` + "\n\n" +
				`data: {"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":1}}` + "\n\n" +
				`data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"a","name":"ls","input":{}}}` + "\n\n" +
				`data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":0,"output_tokens":0}}` + "\n\n" +
				`data: {"type":"message_stop"}` + "\n\n"
		}
		_, _ = io.WriteString(w, body)
	}, func(t *testing.T, _ string, m model.Model) {
		res, err := generate(t, m)
		if err != nil || res.Message.FinishReason != "length" || len(res.Message.ToolCalls) != 1 {
			t.Errorf("Generate = %+v, %v; want a call cut at the limit", res, err)
		}
		if u := res.Usage; u == nil || u.InputTokens != 3 || u.OutputTokens != 1 {
			t.Errorf("usage = %+v, want 3 in, 1 out", u)
		}
	})
}

// However much of an answer came before the connection broke, it is no answer, and
// the error says that asking again may help.
func TestConnectionBrokenAnywhere(t *testing.T) {
	t.Parallel()
	for _, protocol := range []string{"openai", "anthropic"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			body := answers(protocol)
			// Where the reason to stop is in, the answer is whole without what follows.
			end := strings.LastIndex(body, `"finish_reason"`) + strings.LastIndex(body, `"stop_reason"`) + 1
			var at atomic.Int64
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if n := at.Load(); n >= 0 {
					_, _ = io.WriteString(w, body[:n])
					_ = http.NewResponseController(w).Flush()
				}
				panic(http.ErrAbortHandler)
			}))
			s.Config.ErrorLog = nil
			t.Cleanup(s.Close)
			m := dial(t, open.Spec{Provider: protocol, BaseURL: s.URL + "/v1"})
			for n := -1; n < end; n++ {
				at.Store(int64(n))
				_, err := generate(t, m)
				var e *model.Error
				if !errors.As(err, &e) || e.Kind != model.KindTransient {
					t.Fatalf("broken after %d bytes: %v, want a transient error", n, err)
				}
			}
		})
	}
}
