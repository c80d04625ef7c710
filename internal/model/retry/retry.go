// Package retry asks a model again when its provider fails in passing.
package retry

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/pause"
	"github.com/herdgate/herdgate/internal/telemetry"
)

// Policy says how often and how patiently. Zero values take the defaults.
type Policy struct {
	// MaxRetries is how many calls may follow the first one; 0 is none.
	MaxRetries int
	// Base is the first wait, about; default 500 ms. Waits double up to Cap. No
	// wait is shorter than half of Base, whatever a provider asks for.
	Base time.Duration
	// Cap is the longest wait; default 30 s. It also bounds Retry-After.
	Cap time.Duration
	// MaxTotal bounds all calls and waits together: no retry begins that would
	// wait beyond it; default 10 min.
	MaxTotal time.Duration
}

func (p Policy) withDefaults() Policy {
	if p.Base <= 0 {
		p.Base = 500 * time.Millisecond
	}
	if p.Cap <= 0 {
		p.Cap = 30 * time.Second
	}
	p.Cap = max(p.Cap, p.Base)
	if p.MaxTotal <= 0 {
		p.MaxTotal = 10 * time.Minute
	}
	return p
}

// Retry returns m with retries. Only transient failures are retried, each with a
// span event model.retry on the span in ctx. Pieces that streamed in before a
// failure are void: the Response holds the last answer only, and a delta with
// Restart tells those who show them. A task keeps its slot while it waits here,
// because its conversation is in memory; the waits are therefore bounded.
func Retry(m model.Model, p Policy, log zerolog.Logger) model.Model {
	return &retrying{Model: m, policy: p.withDefaults(), log: log}
}

type retrying struct {
	model.Model
	policy Policy
	log    zerolog.Logger
}

func (r *retrying) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	if onDelta == nil {
		onDelta = func(model.Delta) {}
	}
	waits := backoff.NewExponentialBackOff()
	waits.InitialInterval, waits.MaxInterval, waits.Multiplier = r.policy.Base, r.policy.Cap, 2
	waits.Reset()
	start := time.Now()
	for attempt := 1; ; attempt++ {
		shown := false
		res, err := r.Model.Generate(ctx, req, func(d model.Delta) { shown = shown || d != (model.Delta{}); onDelta(d) })
		if err == nil {
			return res, nil
		}
		if ctx.Err() != nil {
			return model.Response{}, context.Cause(ctx)
		}
		var fault *model.Error
		if !errors.As(err, &fault) || fault.Kind != model.KindTransient || attempt > r.policy.MaxRetries {
			return model.Response{}, err
		}
		wait := r.policy.wait(waits.NextBackOff(), fault.RetryAfter)
		if time.Since(start)+wait > r.policy.MaxTotal {
			return model.Response{}, err
		}
		trace.SpanFromContext(ctx).AddEvent(telemetry.EventModelRetry, trace.WithAttributes(
			telemetry.AttrAttempt.Int(attempt),
			telemetry.AttrErrorType.String(fault.Code),
			telemetry.AttrWaitMS.Int64(wait.Milliseconds()),
		))
		r.log.Warn().Str("model", r.Name()).Int("attempt", attempt).Str("code", fault.Code).Dur("wait", wait).Msg("model call failed; asking again")
		if err := pause.For(ctx, wait); err != nil {
			return model.Response{}, err
		}
		if shown {
			onDelta(model.Delta{Restart: true})
		}
	}
}

// wait takes the longer of back-off and what the provider asked for, within
// floor and cap (F-122).
func (p Policy) wait(backoff, asked time.Duration) time.Duration {
	return min(max(backoff, asked, p.Base/2), p.Cap)
}
