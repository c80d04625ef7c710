package eventapi

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/pkg/contract"
)

// EVT-17: the limits of a request, and what it means to name none.
func TestDecodeRequest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		body  string
		limit int
		wait  time.Duration
	}{
		{``, DefaultLimit, MaxWait},
		{`{}`, DefaultLimit, MaxWait},
		{`{"limit":1,"wait_ms":5,"thread_id":"any thing","some_new_field":1}`, 1, 5 * time.Millisecond},
		{`{"limit":2000,"wait_ms":2000}`, MaxLimit, MaxWait},
	} {
		r, err := DecodeRequest([]byte(c.body))
		if err != nil || r.Limit != c.limit || r.Wait() != c.wait {
			t.Errorf("DecodeRequest(%s) = limit %d, wait %v, %v; want %d, %v", c.body, r.Limit, r.Wait(), err, c.limit, c.wait)
		}
	}
	for body, want := range map[string]string{
		`{"limit":2001}`:      "limit is 2001; want 1 to 2000",
		`{"limit":-1}`:        "limit is -1",
		`{"wait_ms":-1}`:      "wait_ms is -1",
		`{"wait_ms":2001}`:    "wait_ms is 2001",
		`{"tenant":"a*"}`:     "tenant",
		`{"run_id":">"}`:      "run id",
		`{"task_id":"_"}`:     "task id",
		`{"thread_id":"a\n"}`: "thread id",
		`{"after_seq":-1}`:    "after_seq",
		`null null`:           "JSON",
		`{"types":["` + strings.Repeat(`","`, MaxTypes) + `"]}`: "types has 65 entries",
		strings.Repeat(" ", MaxRequestBytes+1):                  "at most",
		strings.Repeat("[", contract.MaxDepth+1):                "nested too deeply",
	} {
		if _, err := DecodeRequest([]byte(body)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("DecodeRequest(%.60s) = %v, want an error with %q", body, err, want)
		}
	}
	var e *Error
	if _, err := List(t.Context(), nil, ListRequest{Limit: -1}); !errors.As(err, &e) || e.Code != CodeInvalid {
		t.Errorf("List with a bad limit = %v, want invalid_request before anything is sent", err)
	}
}

// The filter has the name of the HTTP interface as well: a filter that is
// ignored in silence would answer with everything.
func TestDecodeRequestTypes(t *testing.T) {
	t.Parallel()
	for body, want := range map[string][]string{
		`{"types":["a","b"]}`:              {"a", "b"},
		`{"type":"a"}`:                     {"a"},
		`{"type":"a, b,"}`:                 {"a", "b"},
		`{"type":["a","b"]}`:               {"a", "b"},
		`{"type":"b","types":["a"]}`:       {"a", "b"},
		`{"type":"","types":null}`:         nil,
		`{"type":null,"run_id":"r_1"}`:     nil,
		`{"type":[],"task_id":"t_1"}`:      nil,
		`{"type":"a\u002cb"}`:              {"a", "b"},
		`{"tenant":"acme","type":[" a "]}`: {"a"},
	} {
		r, err := DecodeRequest([]byte(body))
		if err != nil || !slices.Equal(r.Types, want) {
			t.Errorf("DecodeRequest(%s) has the types %q, %v; want %q", body, r.Types, err, want)
		}
	}
	for _, body := range []string{`{"type":1}`, `{"type":{}}`, `{"type":[1]}`, `{"type":["` + strings.Repeat(`a,`, MaxTypes+1) + `"]}`} {
		if _, err := DecodeRequest([]byte(body)); err == nil || !strings.Contains(err.Error(), "type") {
			t.Errorf("DecodeRequest(%.40s) = %v, want an error that names the type", body, err)
		}
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for _, s := range []string{``, `{}`, `{"limit":5,"types":["subagent.end"],"barrier_seq":18446744073709551615}`, `{"limit":1e3}`, `[`, "\xff"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRequest(b)
		if err == nil && (r.Limit < 1 || r.Limit > MaxLimit || r.Wait() <= 0 || r.Wait() > MaxWait || len(r.Types) > MaxTypes || r.Validate() != nil) {
			t.Errorf("accepted %+v", r)
		}
	})
}
