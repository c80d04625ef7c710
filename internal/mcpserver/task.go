package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/internal/client/wire"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/pkg/contract"
)

var (
	// errGone is why a call ends whose connection does.
	errGone = errors.New("the caller is gone")
	// errStopping is why calls end when the server does.
	errStopping = errors.New("the server is stopping")
)

// task submits a task and waits for its end.
func (s *server) task(ctx context.Context, req *sdk.CallToolRequest, in wire.TaskRequest) (*sdk.CallToolResult, any, error) {
	if n := s.waiting.Add(1); s.cfg.MaxTasks > 0 && n > int64(s.cfg.MaxTasks) {
		s.waiting.Add(-1)
		return s.refused(&wire.Problem{Code: wire.CodeUnavailable, Detail: fmt.Sprintf("%d calls wait for tasks here, which is the limit; try again later", s.cfg.MaxTasks)}), nil, nil
	}
	defer s.waiting.Add(-1)
	ctx, release := s.bound(ctx)
	defer release()
	after, err := s.b.Position(ctx)
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	if err != nil {
		return s.refused(err), nil, nil
	}
	acc, err := s.submit(ctx, in)
	if err != nil {
		return s.refused(err), nil, nil
	}
	p := newProgress(ctx, req, s.cfg.Heartbeat)
	t, err := s.await(ctx, acc.TaskID, after, p)
	p.close()
	switch {
	case err == nil:
		res := shown(t)
		res.IsError = t.Status != contract.TaskCompleted
		return res, stateOf(t), nil
	case ctx.Err() == nil:
		return s.lost(acc, err), nil, nil
	case errors.Is(context.Cause(ctx), errStopping):
		return s.lost(acc, &wire.Problem{Code: wire.CodeUnavailable, Detail: errStopping.Error()}), nil, nil
	}
	s.giveUp(ctx, acc.TaskID)
	return nil, nil, fmt.Errorf("the call was cancelled, and task %s with it", acc.TaskID)
}

// bound returns a context that ends with the call, its connection, or the server.
func (s *server) bound(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	undo := []func() bool{}
	if c := callOf(ctx); c != nil {
		undo = append(undo, context.AfterFunc(c.connection, func() { cancel(errGone) }))
	}
	if s.cfg.Stopping != nil {
		undo = append(undo, context.AfterFunc(s.cfg.Stopping, func() { cancel(errStopping) }))
	}
	return ctx, func() {
		for _, f := range undo {
			f()
		}
		cancel(context.Canceled)
	}
}

// submit hands the task over. It does not stop half-way when the caller goes: what
// is stored must be known, so that it can be taken back.
func (s *server) submit(ctx context.Context, in wire.TaskRequest) (wire.TaskAccepted, error) {
	sure, cancel := context.WithTimeout(context.WithoutCancel(ctx), submitTimeout)
	defer cancel()
	acc, err := s.b.SubmitTask(sure, in)
	if err != nil && acc.TaskID != "" {
		s.giveUp(ctx, acc.TaskID) // nobody would wait for it
	}
	return acc, err
}

// giveUp cancels a task that nobody waits for any more.
func (s *server) giveUp(ctx context.Context, id contract.TaskID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	retry := pause.Growing(100*time.Millisecond, 2*time.Second)
	for {
		err := s.b.CancelTask(ctx, id)
		var p *wire.Problem
		if err == nil || errors.As(err, &p) && (p.Code == wire.CodeNotFound || p.Code == wire.CodeAlreadyFinished) {
			return
		}
		if pause.For(ctx, retry.NextBackOff()) != nil {
			s.cfg.Log.Warn().Err(err).Str("task", string(id)).Msg("mcp: a task whose caller is gone could not be cancelled")
			return
		}
	}
}

// lost answers a call whose task goes on out of sight.
func (s *server) lost(acc wire.TaskAccepted, err error) *sdk.CallToolResult {
	res := s.refused(err)
	res.Content = append(res.Content, &sdk.TextContent{Text: fmt.Sprintf("Task %s goes on. Ask %s for it.", acc.TaskID, ToolTaskStatus)})
	return res
}

// await follows a task to its end and returns it.
func (s *server) await(ctx context.Context, id contract.TaskID, after uint64, p *progress) (wire.Task, error) {
	retry, seen := pause.Growing(200*time.Millisecond, 5*time.Second), time.Now()
	for {
		ended := false
		err := s.b.Follow(ctx, id, after, func(rec contract.EventRecord) bool {
			after, seen = max(after, rec.Seq), time.Now()
			retry.Reset()
			ended = rec.TaskID == id && rec.EventType == contract.RecordEnd
			p.event(rec)
			return !ended
		})
		if ctx.Err() != nil {
			return wire.Task{}, ctx.Err()
		}
		if ended {
			return s.settled(ctx, id)
		}
		// What cannot be heard can maybe be read.
		t, getErr := s.b.GetTask(ctx, id)
		switch {
		case getErr == nil && t.Status.Terminal():
			return t, nil
		case time.Since(seen) > blindTimeout && (err != nil || getErr != nil):
			if err = errors.Join(err, getErr); !errors.As(err, new(*wire.Problem)) {
				err = &wire.Problem{Code: wire.CodeUnavailable, Detail: "the task cannot be followed: " + err.Error()}
			}
			return wire.Task{}, err
		}
		if err := pause.For(ctx, retry.NextBackOff()); err != nil {
			return wire.Task{}, err
		}
	}
}

// settled reads a task whose last event was seen.
func (s *server) settled(ctx context.Context, id contract.TaskID) (wire.Task, error) {
	limit, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	retry := pause.Growing(50*time.Millisecond, 2*time.Second)
	for {
		t, err := s.b.GetTask(limit, id)
		if err == nil && t.Status.Terminal() {
			return t, nil
		}
		if pause.For(limit, retry.NextBackOff()) != nil {
			if err == nil {
				err = &wire.Problem{Code: wire.CodeUnavailable, Detail: "the task has ended, but its end cannot be read yet"}
			}
			return t, err
		}
	}
}

// progress tells the caller of a task what it does, if the caller wants to know.
type progress struct {
	ctx     context.Context
	session *sdk.ServerSession
	token   any // nil: nobody wants to know
	quit    chan struct{}
	beat    sync.WaitGroup

	mu    sync.Mutex
	sent  int
	steps int
	quiet bool // nothing was sent since the last beat
	began time.Time
}

func newProgress(ctx context.Context, req *sdk.CallToolRequest, every time.Duration) *progress {
	p := &progress{ctx: ctx, session: req.Session, token: req.Params.GetProgressToken(), quit: make(chan struct{}), began: time.Now(), quiet: true}
	if p.token != nil {
		p.beat.Go(func() { p.beats(every) })
	}
	return p
}

// beats says something from time to time: callers give up on what is silent.
func (p *progress) beats(every time.Duration) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-p.quit:
			return
		case <-p.ctx.Done():
			return
		case <-t.C:
		}
		p.mu.Lock()
		if p.quiet {
			p.send(fmt.Sprintf("for %s, %d steps", time.Since(p.began).Round(time.Second), p.steps))
		}
		p.quiet = true
		p.mu.Unlock()
	}
}

func (p *progress) close() {
	close(p.quit)
	p.beat.Wait()
}

// send must be called with the lock. Progress is told in the call's own stream, and
// its failure is the connection's.
func (p *progress) send(message string) {
	p.sent++
	_ = p.session.NotifyProgress(p.ctx, &sdk.ProgressNotificationParams{ProgressToken: p.token, Progress: float64(p.sent), Message: message})
}

func (p *progress) event(rec contract.EventRecord) {
	if p.token == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if rec.EventType == contract.RecordStart {
		p.steps = 0
	}
	if rec.EventType == contract.RecordStep {
		p.steps++
	}
	if text := told(rec, p.steps); text != "" {
		p.quiet = false
		p.send(text)
	}
}

// told is what an event says to whoever watches; empty for those that say nothing.
func told(rec contract.EventRecord, steps int) string {
	var c struct {
		SubagentType  string                  `json:"subagent_type"`
		ModelName     string                  `json:"model_name"`
		QueuePosition int                     `json:"queue_position"`
		Kind          string                  `json:"kind"`
		ToolCalls     []struct{ Name string } `json:"tool_calls"`
		Status        string                  `json:"status"`
		ErrorCode     string                  `json:"error_code"`
	}
	if len(rec.Content) > 0 && json.Unmarshal(rec.Content, &c) != nil {
		return ""
	}
	var out string
	switch rec.EventType {
	case contract.RecordQueued:
		out = "queued"
		if c.QueuePosition > 0 {
			out += fmt.Sprintf(" at place %d", c.QueuePosition)
		}
	case contract.RecordAdmitted:
		out = "admitted"
	case contract.RecordStart:
		out = "started"
		if c.ModelName != "" {
			out += " with " + c.ModelName
		}
	case contract.RecordStep:
		if c.Kind != contract.StepAI || len(c.ToolCalls) == 0 {
			return ""
		}
		var names []string
		for _, call := range c.ToolCalls {
			names = append(names, call.Name)
		}
		out = fmt.Sprintf("step %d: %s", steps, strings.Join(names, ", "))
	case contract.RecordEnd:
		out = c.Status
		if c.ErrorCode != "" {
			out += " (" + c.ErrorCode + ")"
		}
	}
	return line(out, 200)
}
