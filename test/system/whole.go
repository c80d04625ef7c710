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
	return s.SinkOf(name, eventsink.Config{}, sqlite.Opener(dir))
}

// SinkOf starts an event sink with the database that open opens.
func (s *System) SinkOf(name string, cfg eventsink.Config, open eventsink.OpenFunc) *Process {
	s.t.Helper()
	conn := s.connect(name)
	svc, err := eventsink.New(cfg, eventsink.Deps{Bus: conn, Open: open, Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.run(name, conn, svc.Run)
}

// Lead starts a lead with a free port and returns a client for it.
func (s *System) Lead(name, workspaces string) (*Process, *client.Client) {
	s.t.Helper()
	p, addr := s.LeadOf(name, workspaces, lead.HTTPConfig{AuthMode: "none"})
	return p, s.client(addr, "")
}

// client is a client with connections of its own.
func (s *System) client(addr, token string) *client.Client {
	s.t.Helper()
	transport := &http.Transport{}
	s.t.Cleanup(transport.CloseIdleConnections)
	c, err := client.New("http://"+addr, token, &http.Client{Transport: transport})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// LeadOf starts a lead whose API is served as web says, on a free port, and returns
// its address.
func (s *System) LeadOf(name, workspaces string, web lead.HTTPConfig) (*Process, string) {
	s.t.Helper()
	web.Addr = "127.0.0.1:0"
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
		Name: name, HTTP: web, SubagentsEnabled: true, ShellAllowed: true,
		WorkspaceRoot: workspaces, DrainTimeout: time.Second, RunLeaseTTL: 3 * time.Second,
	}, lead.Deps{Bus: conn, Models: models, Subagents: types, Log: s.Opts.Log, TracerProvider: s.Opts.TracerProvider, Content: s.Opts.Content})
	if err != nil {
		s.t.Fatal(err)
	}
	p := s.run(name, conn, svc.Run)
	select {
	case <-svc.Listening():
	case <-time.After(Timeout):
		s.t.Fatal("the lead does not listen")
	}
	return p, svc.Addr().String()
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
	s.gate = s.Admission("adm-1")
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
