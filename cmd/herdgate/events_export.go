package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
)

// exportPatience is how long an export waits for a lead or store that does not
// answer, or that has not stored yet what was published before.
const exportPatience = 30 * time.Second

func (a *app) eventsExportCommand() *cobra.Command {
	var f eventFilter
	var file string
	cmd := &cobra.Command{
		Use: "export", Short: "write all stored events as JSON lines", Args: cobra.NoArgs,
		Long: `Writes every stored event that matches, one JSON record a line, in ascending seq, up to
those that are there when it begins to read the last page, and ends. Nothing is left out
silently: what is no longer kept is told, and an export that breaks off says where.

With --file it writes to that file, and if the file is there already goes on behind its
last event: run it again, with the same filters, to bring the file up to date. A file that
holds anything else, or an event that does not match --run, --task, --thread and --type, is
left as it is. Whether it was begun with narrower filters, --after-seq or --all-attempts
does not show in it: nobody checks that.`,
		Example: `  herdgate events export > events.jsonl
  herdgate events export --file events.jsonl
  herdgate events export --thread THREAD_ID --type subagent.end`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			x := exporter{c: c, q: f.query(), filters: f.String(), after: f.after, out: cmd.OutOrStdout(), log: cmd.ErrOrStderr(), patience: exportPatience}
			if file == "" {
				return a.explain(x.run(cmd.Context(), ""))
			}
			return a.explain(x.toFile(cmd.Context(), file, f.matches))
		},
	}
	f.flags(cmd.Flags())
	cmd.Flags().StringVar(&file, "file", "", "write to this file, behind what it has already")
	return cmd
}

// openExport opens a file for more lines and returns the seq of its last event. Each of
// its lines must be an event that fits. A last line that is not whole, because an export
// was ended in the middle of it, is taken away, but only behind a whole one: nothing
// else tells it from a file of somebody else's, which must stay as it is.
func openExport(path string, fits func(contract.EventRecord) bool) (_ *os.File, last uint64, err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("--file: %s is no ordinary file; leave --file out to write to standard output", path)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("--file: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close() // the first error is the one that counts
		}
	}()
	r := bufio.NewReader(f)
	var size int64
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF) && (len(line) == 0 || size > 0):
			if err := f.Truncate(size); err != nil {
				return nil, 0, fmt.Errorf("--file: %w", err)
			}
			if _, err := f.Seek(size, io.SeekStart); err != nil {
				return nil, 0, fmt.Errorf("--file: %w", err)
			}
			return f, last, nil
		case err != nil && !errors.Is(err, io.EOF):
			return nil, 0, fmt.Errorf("--file: %w", err)
		}
		var rec contract.EventRecord
		if err != nil || json.Unmarshal(bytes.TrimSpace(line), &rec) != nil || rec.EventID == "" || rec.EventType == "" || rec.Seq <= last {
			return nil, 0, fmt.Errorf("--file: %s:%d is not the next event of an export (%.80q), and the file was left as it is; choose another file", path, n, line)
		}
		if !fits(rec) {
			return nil, 0, fmt.Errorf("--file: %s:%d, event %d, does not match the filters, so the file is of another export and was left as it is; choose another file, or the filters that it was begun with", path, n, rec.Seq)
		}
		last, size = rec.Seq, size+int64(len(line))
	}
}

// exporter writes what matches q after the seq after.
type exporter struct {
	c        *client.Client
	q        client.EventQuery
	filters  string // as they are given to the command
	after    uint64
	out      io.Writer
	log      io.Writer
	patience time.Duration
	count    int
}

// toFile writes behind what the file has already.
func (x *exporter) toFile(ctx context.Context, file string, fits func(contract.EventRecord) bool) error {
	out, last, err := openExport(file, fits)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(out)
	x.out, x.after = w, max(x.after, last)
	err = x.run(ctx, file)
	return errors.Join(err, w.Flush(), out.Sync(), out.Close())
}

func (x *exporter) run(ctx context.Context, file string) error {
	if err := x.pages(ctx); err != nil {
		again := fmt.Sprintf("herdgate events export%s --after-seq %d", x.filters, x.after)
		if file != "" {
			again = "the same command"
		}
		return fmt.Errorf("the export stopped after %d events, at seq %d; go on with %s: %w", x.count, x.after, again, err)
	}
	_, err := fmt.Fprintf(x.log, "%d events, up to seq %d\n", x.count, x.after)
	return err
}

func (x *exporter) pages(ctx context.Context) error {
	x.q.Limit = wire.DefaultEvents
	told := uint64(0) // up to where it was told that events are gone
	growing := pause.Growing(50*time.Millisecond, time.Second)
	good := time.Now()
	for {
		page, err := x.c.ListEvents(ctx, x.q, x.after)
		var refused *client.Error
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && (errors.As(err, &refused) && refused.Status < 500 || x.count == 0 || time.Since(good) > x.patience):
			return err
		case err == nil && page.PrunedSeq > max(x.after, told):
			// Retention may overtake an export more than once.
			if _, err := fmt.Fprintf(x.log, "the events %d to %d are no longer kept\n", max(x.after, told)+1, page.PrunedSeq); err != nil {
				return err
			}
			told = page.PrunedSeq
		}
		for _, rec := range page.Events {
			if err := printJSONLine(x.out, rec); err != nil {
				return err
			}
			x.count++
			x.after = rec.Seq
		}
		on := err == nil && page.NextAfterSeq > x.after || len(page.Events) > 0
		x.after = max(x.after, page.NextAfterSeq)
		if err == nil && !page.HasMore {
			return nil
		}
		if on {
			good = time.Now()
			growing.Reset()
			continue
		}
		if time.Since(good) > x.patience {
			return errors.New("the event store lags behind what was published; is the event sink at work?")
		}
		if err := pause.For(ctx, growing.NextBackOff()); err != nil {
			return err
		}
	}
}

// eventFilter is what selects events, for the verbs that do.
type eventFilter struct {
	run, task, thread string
	types             []string
	after             uint64
	allAttempts       bool
}

func (f *eventFilter) query() client.EventQuery {
	return client.EventQuery{
		RunID: contract.RunID(f.run), TaskID: contract.TaskID(f.task), ThreadID: contract.ThreadID(f.thread), Types: split(f.types), AllAttempts: f.allAttempts,
	}
}

// matches reports whether an event is one that the filter selects, as far as the event
// itself tells.
func (f *eventFilter) matches(rec contract.EventRecord) bool {
	types := split(f.types)
	return (f.run == "" || string(rec.RunID) == f.run) && (f.task == "" || string(rec.TaskID) == f.task) &&
		(f.thread == "" || string(rec.ThreadID) == f.thread) && (len(types) == 0 || slices.Contains(types, rec.EventType))
}

// String is the filter as it is given to the command, all but where to begin.
func (f *eventFilter) String() string {
	var b strings.Builder
	add := func(flag, value string) {
		if value != "" {
			fmt.Fprintf(&b, " --%s %s", flag, quoted(value))
		}
	}
	add("run", f.run)
	add("task", f.task)
	add("thread", f.thread)
	add("type", strings.Join(split(f.types), ","))
	if f.allAttempts {
		b.WriteString(" --all-attempts")
	}
	return b.String()
}

// quoted is an argument as a shell takes it.
func quoted(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.,:/") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
