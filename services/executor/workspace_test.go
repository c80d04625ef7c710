package executor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/internal/workspace"
	"github.com/herdgate/herdgate/pkg/contract"
)

// ownCopies gives the tasks of a world copies of workspaces that hold two files.
// dirs gets the folder of each copy that is made.
func (w *world) ownCopies(dirs chan string) {
	w.Helper()
	store, err := workspace.Open(workspace.Config{Bus: w.svc.bus, Root: w.TempDir(), Limits: workspace.Limits{Files: 2, FileBytes: 100, Bytes: 200}})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { store.Close() })
	w.svc.deps.Workspaces = store
	w.svc.deps.ToolsIn = func(_ contract.TaskRequest, dir string) ([]tool.Tool, func(), error) {
		dirs <- dir
		return nil, func() {}, nil
	}
}

// see lists what a new task of the thread would begin with.
func (w *world) see() string {
	w.Helper()
	c, err := w.svc.deps.Workspaces.Checkout(w.ctx, contract.DefaultTenant, "th_1", "see")
	if err != nil {
		w.Fatal(err)
	}
	defer c.Close()
	var out []string
	names, _ := filepath.Glob(filepath.Join(c.Dir(), "*"))
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			w.Fatal(err)
		}
		out = append(out, filepath.Base(n)+"="+string(b))
	}
	return strings.Join(out, " ")
}

// I5, CTX-01: what a task changed is kept when its work ends by itself, well or
// not; never when it was stopped from outside or its lease was lost. That changes
// were not kept stands in the result.
func TestTaskKeepsItsFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	dirs := make(chan string, 1)
	w.ownCopies(dirs)
	run := func(id string, answer func(ctx context.Context, dir string, g contract.Grant) (model.Response, error)) contract.TaskRecord {
		t.Helper()
		g := w.granted(id, 1)
		work := w.begin(g)
		dir := <-dirs
		w.model.answers(func(ctx context.Context, _ int) (model.Response, error) { return answer(ctx, dir, g) })
		w.background(work)()
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: its copy is still there", id)
		}
		rec, _ := w.record(id)
		return rec
	}
	put := func(dir string, names ...string) {
		for _, n := range names {
			name, content, _ := strings.Cut(n, "=")
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Error(err)
			}
		}
	}
	said := func(text string) (model.Response, error) {
		return model.Response{Message: model.Message{Text: text}}, nil
	}

	rec := run("t_well", func(_ context.Context, dir string, _ contract.Grant) (model.Response, error) {
		put(dir, "a=1")
		return said("done")
	})
	if rec.State != contract.StateCompleted || rec.Result != "done" || w.see() != "a=1" {
		t.Errorf("record %+v, files %s", rec, w.see())
	}
	rec = run("t_many", func(_ context.Context, dir string, _ contract.Grant) (model.Response, error) {
		put(dir, "a=2", "b=2", "c=2")
		return said("done")
	})
	if rec.State != contract.StateCompleted || !strings.HasPrefix(rec.Result, "done\n\nNote on the workspace: what this task changed in it was not kept: ") ||
		!strings.Contains(rec.Result, "more than 2 files") || w.see() != "a=1" {
		t.Errorf("record %+v, files %s", rec, w.see())
	}
	rec = run("t_stopped", func(ctx context.Context, dir string, _ contract.Grant) (model.Response, error) {
		put(dir, "a=3")
		for _, a := range w.attempts() {
			a.cancel(errCancelled)
		}
		<-ctx.Done()
		return model.Response{}, context.Cause(ctx)
	})
	if rec.State != contract.StateCancelled || w.see() != "a=1" {
		t.Errorf("record %+v, files %s", rec, w.see())
	}
	rec = run("t_fenced", func(_ context.Context, dir string, _ contract.Grant) (model.Response, error) {
		put(dir, "a=4")
		for _, a := range w.attempts() {
			a.until.Store(0) // by its own clock the lease is over
		}
		return said("done")
	})
	if rec.State.Terminal() || w.see() != "a=1" {
		t.Errorf("record %+v, files %s", rec, w.see())
	}
}

// attempts are those that run.
func (w *world) attempts() (list []*attempt) {
	w.svc.mu.Lock()
	defer w.svc.mu.Unlock()
	for a := range w.svc.attempts {
		list = append(list, a)
	}
	return list
}

// Pages are fetched only where it is enabled, and only by types that name the tool.
func TestWhoMayFetch(t *testing.T) {
	t.Parallel()
	on := config.WebFetch{Enabled: true}
	for _, c := range []struct {
		cfg   config.WebFetch
		tools []string
		want  bool
	}{
		{on, []string{"web_fetch"}, true},
		{on, nil, false},
		{on, []string{"read_file"}, false},
		{config.WebFetch{AllowPrivate: true}, []string{"web_fetch"}, false},
	} {
		got := fetchFor(c.cfg, contract.TaskRequest{Subagent: contract.Subagent{Tools: c.tools}})
		if (got != nil) != c.want || (got != nil && got.AllowPrivate) {
			t.Errorf("%+v, tools %q: %+v, want %v", c.cfg, c.tools, got, c.want)
		}
	}
	if got := fetchFor(config.WebFetch{Enabled: true, AllowPrivate: true}, contract.TaskRequest{Subagent: contract.Subagent{Tools: []string{"web_fetch"}}}); got == nil || !got.AllowPrivate {
		t.Errorf("private addresses are not allowed: %+v", got)
	}
}
