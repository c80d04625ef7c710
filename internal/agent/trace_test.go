package agent

import (
	"context"
	"errors"
	"slices"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

type answering func(ctx context.Context) (model.Response, error)

func (answering) Name() string      { return "answering" }
func (answering) ModelName() string { return "answering-1" }
func (a answering) Generate(ctx context.Context, _ model.Request, _ func(model.Delta)) (model.Response, error) {
	return a(ctx)
}

// A model call's span tells the error's class, also that it was stopped, and what was
// spent all the same; and its use is told where it went well.
func TestChatSpan(t *testing.T) {
	t.Parallel()
	usage := &contract.Usage{InputTokens: 7, OutputTokens: 3}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx  context.Context //nolint:containedctx // a case
		resp model.Response
		err  error
		want attribute.KeyValue
	}{
		"answered": {t.Context(), model.Response{Usage: usage, Message: model.Message{FinishReason: "stop"}}, nil, telemetry.AttrGenAIFinishReasons.StringSlice([]string{"stop"})},
		"refused":  {t.Context(), model.Response{Usage: usage}, &model.Error{Kind: model.KindTransient, Code: "overloaded"}, telemetry.AttrErrorType.String("overloaded")},
		"stopped":  {over, model.Response{Usage: usage}, errors.New("whatever"), telemetry.AttrErrorType.String("stopped")},
		"late":     {t.Context(), model.Response{Usage: usage}, context.DeadlineExceeded, telemetry.AttrErrorType.String("timeout")},
	} {
		exporter := tracetest.NewInMemoryExporter()
		tracer := sdktrace.NewTracerProvider(sdktrace.WithSyncer(exporter)).Tracer("test")
		_, _ = Chat(c.ctx, tracer, answering(func(context.Context) (model.Response, error) { return c.resp, c.err }), model.Request{Agent: "scout"}, nil)
		spans := exporter.GetSpans()
		if len(spans) != 1 || spans[0].Name != "chat answering-1" {
			t.Fatalf("%s: spans %v", name, spans)
		}
		for _, want := range []attribute.KeyValue{c.want, telemetry.AttrGenAIInputTokens.Int64(7), telemetry.AttrGenAIAgentName.String("scout")} {
			if !slices.Contains(spans[0].Attributes, want) {
				t.Errorf("%s: %v has no %v", name, spans[0].Attributes, want)
			}
		}
		if failed := spans[0].Status.Code == codes.Error; failed != (c.err != nil) {
			t.Errorf("%s: status %v", name, spans[0].Status)
		}
	}
}
