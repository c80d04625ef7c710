package system

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/subagent"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
	"github.com/herdgate/herdgate/services/lead"
)

// Sink starts an event sink whose database lies in dir.
func (s *System) Sink(name, dir string) *Process {
	s.t.Helper()
	conn := s.connect(name)
	svc, err := eventsink.New(eventsink.Config{}, eventsink.Deps{Bus: conn, Open: sqlite.Opener(dir), Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.run(name, conn, svc.Run)
}

// Lead starts a lead with a free port and returns a client for it.
func (s *System) Lead(name, workspaces string) (*Process, *client.Client) {
	s.t.Helper()
	conn := s.connect(name)
	models, err := model.NewRegistry(s.Opts.Model)
	if err != nil {
		s.t.Fatal(err)
	}
	types, err := subagent.NewRegistry(s.Opts.Subagents)
	if err != nil {
		s.t.Fatal(err)
	}
	svc, err := lead.New(lead.Config{
		Name: name, HTTP: lead.HTTPConfig{Addr: "127.0.0.1:0", AuthMode: "none"}, SubagentsEnabled: true, ShellAllowed: true,
		WorkspaceRoot: workspaces, DrainTimeout: time.Second, RunLeaseTTL: 3 * time.Second,
	}, lead.Deps{Bus: conn, Models: models, Subagents: types, Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider})
	if err != nil {
		s.t.Fatal(err)
	}
	p := s.run(name, conn, svc.Run)
	select {
	case <-svc.Listening():
	case <-time.After(Timeout):
		s.t.Fatal("the lead does not listen")
	}
	transport := &http.Transport{}
	s.t.Cleanup(transport.CloseIdleConnections)
	c, err := client.New("http://"+svc.Addr().String(), "", &http.Client{Transport: transport})
	if err != nil {
		s.t.Fatal(err)
	}
	return p, c
}

// Whole starts one of each service.
func (s *System) Whole() *client.Client {
	s.t.Helper()
	dir := s.t.TempDir()
	work := filepath.Join(dir, "workspaces")
	if err := os.MkdirAll(work, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.Sink("sink-1", dir)
	s.Admission("adm-1")
	s.Executor("ex-1", 4, time.Second)
	_, c := s.Lead("lead-1", work)
	natstest.Eventually(s.t, Timeout, func() (bool, string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := c.ListEvents(ctx, client.EventQuery{Limit: 1}, 0)
		return err == nil, fmt.Sprint("the event store does not answer: ", err)
	})
	return c
}

func timeout(t interface{ Cleanup(func()) }) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	t.Cleanup(cancel)
	return ctx
}
