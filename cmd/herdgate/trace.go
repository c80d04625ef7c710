package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/charmbracelet/x/term"
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/waterfall"
	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	// maxTraceEvents bounds what is drawn of one run.
	maxTraceEvents = 20_000
	// maxTraceBytes bounds an answer of Jaeger.
	maxTraceBytes = 64 << 20
	jaegerTimeout = 30 * time.Second
)

func (a *app) traceCommand() *cobra.Command {
	var jaeger string
	cmd := &cobra.Command{
		Use: "trace RUN_ID", Short: "draw what took how long in a run", Args: onlyArg("RUN_ID"),
		Long: `Draws a run from its stored events, a row for each thing and its bar under the time in
which it happened: the wait for a slot, each answer of a model, the tools that it called,
with turns, tokens, cost and why it ended. A run that has not ended is drawn up to now,
and its last row shows in what it is.

With --jaeger it draws the spans of the run's trace as Jaeger has them, with the service
and the errors of each. In place of RUN_ID it then also takes a trace id of 32 digits,
and asks nobody but Jaeger.

The picture is as wide as the terminal, and 100 columns elsewhere; COLUMNS changes that.`,
		Example: `  herdgate trace RUN_ID
  herdgate trace RUN_ID --jaeger http://127.0.0.1:16686`,
		RunE: func(cmd *cobra.Command, args []string) error {
			chart, err := a.trace(cmd.Context(), args[0], jaeger)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if a.json() {
				return printJSON(out, chart)
			}
			width, color := picture(out)
			return write(out, []byte(chart.Draw(width, color)))
		},
	}
	cmd.Flags().StringVar(&jaeger, "jaeger", "", "address of Jaeger's HTTP API; the trace is read from there")
	return cmd
}

// picture is how wide a picture on w is, and whether it may have colours.
func picture(w io.Writer) (width int, color bool) {
	if n := 0; os.Getenv("COLUMNS") != "" {
		if _, err := fmt.Sscan(os.Getenv("COLUMNS"), &n); err == nil && n > 0 {
			width = min(n, waterfall.MaxWidth)
		}
	}
	if !terminal(w) {
		return width, false
	}
	if columns, _, err := term.GetSize(w.(*os.File).Fd()); err == nil && columns > 0 {
		width = columns
	}
	return width, os.Getenv("NO_COLOR") == ""
}

var traceID = regexp.MustCompile(`^[0-9a-f]{32}$`)

func (a *app) trace(ctx context.Context, id, jaeger string) (waterfall.Chart, error) {
	if jaeger != "" && traceID.MatchString(id) {
		return fromJaeger(ctx, jaeger, "", id)
	}
	c, err := a.client()
	if err != nil {
		return waterfall.Chart{}, err
	}
	run := contract.RunID(id)
	trace, err := traceOf(ctx, c, run)
	if err != nil {
		return waterfall.Chart{}, a.explain(err)
	}
	if jaeger != "" {
		if trace == "" {
			return waterfall.Chart{}, fmt.Errorf("run %s has no trace id: it came with a trace context that says not to record, or before traces were on", printable.Line(id))
		}
		return fromJaeger(ctx, jaeger, run, trace)
	}
	records, all, err := eventsOf(ctx, c, run)
	if err != nil {
		return waterfall.Chart{}, a.explain(err)
	}
	if len(records) == 0 {
		return waterfall.Chart{}, fmt.Errorf("no event of run %s is stored: the sink is behind (`herdgate events verify --run` tells), or its retention has taken them", printable.Line(id))
	}
	chart := waterfall.FromEvents(run, records, time.Now())
	chart.TraceID = trace
	if !all {
		chart.Notes = append(chart.Notes, fmt.Sprintf("only the first %d events are drawn", maxTraceEvents))
	}
	return chart, nil
}

// traceOf is the trace id of a run, also of one that is only a task without a lead.
func traceOf(ctx context.Context, c *client.Client, id contract.RunID) (string, error) {
	run, err := c.GetRun(ctx, id)
	var api *client.Error
	if err == nil || !errors.As(err, &api) || api.Status != http.StatusNotFound {
		return run.TraceID, err
	}
	page, taskErr := c.ListTasks(ctx, client.TaskQuery{RunID: id, Limit: 1})
	if taskErr != nil || len(page.Tasks) == 0 {
		return "", err // there is no such run
	}
	return page.Tasks[0].TraceID, nil
}

// eventsOf reads the stored events of a run, and says whether these are all.
func eventsOf(ctx context.Context, c *client.Client, id contract.RunID) ([]contract.EventRecord, bool, error) {
	var records []contract.EventRecord
	q := client.EventQuery{RunID: id, Limit: wire.MaxEvents}
	for after := uint64(0); len(records) < maxTraceEvents; {
		page, err := c.ListEvents(ctx, q, after)
		if err != nil {
			return nil, false, err
		}
		records = append(records, page.Events...)
		if !page.HasMore || page.NextAfterSeq <= after {
			return records, true, nil
		}
		after = page.NextAfterSeq
	}
	return records[:maxTraceEvents], false, nil
}

// fromJaeger reads a trace from Jaeger's HTTP API.
func fromJaeger(ctx context.Context, address string, run contract.RunID, trace string) (waterfall.Chart, error) {
	base, err := url.Parse(strings.TrimSuffix(address, "/"))
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" {
		return waterfall.Chart{}, fmt.Errorf("--jaeger: %q is no address of an HTTP API; want one as http://127.0.0.1:16686", address)
	}
	ctx, cancel := context.WithTimeout(ctx, jaegerTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("api", "v3", "traces", trace).String(), nil)
	if err != nil {
		return waterfall.Chart{}, fmt.Errorf("--jaeger: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return waterfall.Chart{}, fmt.Errorf("--jaeger: nobody answers there: %w", err)
	}
	defer resp.Body.Close()
	body := io.LimitReader(resp.Body, maxTraceBytes)
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNotFound {
		text, _ := io.ReadAll(io.LimitReader(body, 300)) // only to say more
		return waterfall.Chart{}, fmt.Errorf("--jaeger: it answers %s: %s", resp.Status, printable.Cut(string(text), 200))
	}
	spans, err := waterfall.ReadSpans(body)
	if errors.Is(err, waterfall.ErrNoTrace) {
		return waterfall.Chart{}, fmt.Errorf("--jaeger: it has no span of trace %s: they come a moment after the end, or telemetry.otlp_endpoint leads elsewhere, or the trace was not sampled (%w)", trace, err)
	}
	if err != nil {
		return waterfall.Chart{}, fmt.Errorf("--jaeger: %w", err)
	}
	chart := waterfall.FromSpans(trace, spans)
	chart.RunID = run
	return chart, nil
}
