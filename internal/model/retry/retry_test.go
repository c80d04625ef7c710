package retry

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake answers with errs in order, then with text.
type fake struct {
	errs  []error
	calls int
}

func (f *fake) Name() string      { return "main" }
func (f *fake) ModelName() string { return "fake" }
func (f *fake) Generate(_ context.Context, _ model.Request, onDelta func(model.Delta)) (model.Response, error) {
	f.calls++
	if f.calls <= len(f.errs) {
		onDelta(model.Delta{Text: "half"})
		return model.Response{}, f.errs[f.calls-1]
	}
	onDelta(model.Delta{Text: "whole"})
	return model.Response{Message: model.Message{Text: "whole"}}, nil
}

func transient(after time.Duration) error {
	return &model.Error{Kind: model.KindTransient, Code: "rate_limited", RetryAfter: after}
}

var quick = Policy{MaxRetries: 3, Base: time.Millisecond, Cap: 5 * time.Millisecond}

// F-116: after a failure in the middle the answer holds nothing twice, and those
// who show pieces are told; retries are seen in the trace and the log.
func TestRetry(t *testing.T) {
	t.Parallel()
	rec := tracetest.NewSpanRecorder()
	tp := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(rec))
	ctx, span := tp.Tracer("t").Start(t.Context(), "chat")
	var log bytes.Buffer
	f := &fake{errs: []error{transient(0), transient(0)}}
	shown := ""
	res, err := Retry(f, quick, zerolog.New(&log)).Generate(ctx, model.Request{}, func(d model.Delta) {
		if d.Restart {
			shown = ""
		}
		shown += d.Text
	})
	span.End()
	if err != nil || res.Message.Text != "whole" || f.calls != 3 || shown != "whole" {
		t.Errorf("Generate = %+v, %v after %d calls, shown %q", res, err, f.calls, shown)
	}
	events := rec.Ended()[0].Events()
	if len(events) != 2 || events[0].Name != "model.retry" {
		t.Errorf("events = %+v, want two model.retry", events)
	}
	if n := strings.Count(log.String(), "rate_limited"); n != 2 {
		t.Errorf("log = %s, want two lines", log.String())
	}
}

func TestNoRetry(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err   error
		p     Policy
		calls int
	}{
		"permanent":  {&model.Error{Kind: model.KindPermanent, Code: "unauthorized"}, quick, 1},
		"other":      {errors.New("ours"), quick, 1},
		"used up":    {transient(0), quick, 4},
		"none":       {transient(0), Policy{}, 1},
		"total time": {transient(time.Hour), Policy{MaxRetries: 3, Base: time.Millisecond, Cap: time.Hour, MaxTotal: time.Second}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fake{errs: []error{c.err, c.err, c.err, c.err, c.err}}
			_, err := Retry(f, c.p, zerolog.Nop()).Generate(t.Context(), model.Request{}, nil)
			if !errors.Is(err, c.err) || f.calls != c.calls {
				t.Errorf("error = %v after %d calls, want %v after %d", err, f.calls, c.err, c.calls)
			}
		})
	}
}

// F-122: whatever a provider asks for, the wait has a floor and a cap.
func TestWait(t *testing.T) {
	t.Parallel()
	p := Policy{Base: time.Second, Cap: 30 * time.Second}.withDefaults()
	for _, c := range []struct{ backoff, asked, want time.Duration }{
		{0, 0, 500 * time.Millisecond},
		{0, -5, 500 * time.Millisecond},
		{2 * time.Second, 0, 2 * time.Second},
		{2 * time.Second, 10 * time.Second, 10 * time.Second},
		{2 * time.Second, 24 * time.Hour, 30 * time.Second},
		{45 * time.Second, 0, 30 * time.Second},
	} {
		if got := p.wait(c.backoff, c.asked); got != c.want {
			t.Errorf("wait(%v, %v) = %v, want %v", c.backoff, c.asked, got, c.want)
		}
	}
}

// CANCEL-03: a wait ends with the context, with its cause.
func TestCancelWhileWaiting(t *testing.T) {
	t.Parallel()
	stop := errors.New("stopped")
	ctx, cancel := context.WithCancelCause(t.Context())
	f := &fake{errs: []error{transient(time.Hour)}}
	time.AfterFunc(20*time.Millisecond, func() { cancel(stop) })
	start := time.Now()
	_, err := Retry(f, Policy{MaxRetries: 1, Cap: time.Hour, MaxTotal: 2 * time.Hour}, zerolog.Nop()).Generate(ctx, model.Request{}, nil)
	if !errors.Is(err, stop) || time.Since(start) > 10*time.Second {
		t.Errorf("error = %v after %v, want the cause at once", err, time.Since(start))
	}
}
