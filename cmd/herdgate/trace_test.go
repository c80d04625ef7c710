package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/waterfall"
	"github.com/herdgate/herdgate/internal/client/wire"
)

// traced checks how a run with one task, and a task alone that was cancelled, are drawn.
func traced(t *testing.T, do func(...string) result, run, alone string) {
	t.Helper()
	r := do("trace", run).want(t, 0)
	matches(t, "trace", r.stdout, `^run `+run+`  trace [0-9a-f]{32}$`, `^completed, .*, 4 turns, 1 tool call, 1 task that waited .*, 62 tokens$`,
		`^lead +\|-+\| .*62 tokens, 2 turns`, `^  task 1 look \\x1b\[31mred +\| *-+ *\| .*21 tokens, 2 turns`,
		`^    model scripted +\| *=+ *\| .*calls ls$`, `^    ls +\| *#+ *\| `)
	if strings.ContainsRune(r.stdout, '\x1b') {
		t.Errorf("an escape character: %q", r.stdout)
	}
	chart := decode[waterfall.Chart](t, do("trace", run, "--output", "json").want(t, 0).stdout)
	if len(chart.Rows) < 7 || chart.Rows[0].Kind != waterfall.KindRun || len(chart.TraceID) != 32 {
		t.Errorf("as JSON: trace %q, %d rows", chart.TraceID, len(chart.Rows))
	}

	single := string(decode[wire.Task](t, do("tasks", "show", alone, "--output", "json").want(t, 0).stdout).RunID)
	matches(t, "trace of a task alone", do("trace", single).want(t, 0).stdout, `  trace [0-9a-f]{32}$`, `^task 1 alone +\|-+!\| .*cancelled`, `^  model scripted .*no answer$`)
	contains(t, "stderr", do("trace", "r_none").want(t, 1).stderr, "not_found")

	// Jaeger has the trace under the id that the run says, and nothing of it is believed.
	asked := make(chan string, 10)
	jaeger := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		switch {
		case strings.HasSuffix(r.URL.Path, chart.TraceID):
			fmt.Fprintf(w, `{"result":{"resourceSpans":[{"resource":{"attributes":[{"key":"service.name","value":{"stringValue":"herdgate-lead"}}]},"scopeSpans":[{"spans":[
				{"traceId":"%s","spanId":"a1","name":"chat \u001b[31m","startTimeUnixNano":"1000000000","endTimeUnixNano":"3000000000","attributes":[{"key":"gen_ai.operation.name","value":{"stringValue":"chat"}}]}]}]}]}}`, chart.TraceID)
		case strings.HasSuffix(r.URL.Path, "0"):
			http.Error(w, "broken \x1b[2J", http.StatusInternalServerError)
		default:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"error":{"httpCode":404,"message":"No traces found"}}`)
		}
	}))
	defer jaeger.Close()
	matches(t, "trace --jaeger", do("trace", run, "--jaeger", jaeger.URL).want(t, 0).stdout, `^run `+run+`  trace `+chart.TraceID+`$`, `^2\.0 s, 1 span, 1 service`, `^chat \\x1b\[31m \|=+\|     2\.0 s  lead$`)
	if path := <-asked; path != "/api/v3/traces/"+chart.TraceID {
		t.Errorf("Jaeger was asked for %s", path)
	}
	contains(t, "stderr", do("trace", strings.Repeat("a", 32), "--jaeger", jaeger.URL).want(t, 1).stderr, "no span of trace aaaa", "No traces found")
	contains(t, "stderr", do("trace", strings.Repeat("0", 32), "--jaeger", jaeger.URL).want(t, 1).stderr, "500", `broken \x1b[2J`)
	contains(t, "stderr", do("trace", run, "--jaeger", "127.0.0.1:16686").want(t, 1).stderr, "is no address")
	down := httptest.NewServer(nil)
	down.Close()
	contains(t, "stderr", do("trace", run, "--jaeger", down.URL).want(t, 1).stderr, "nobody answers")
}
