package telemetry

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Events on spans. A span keeps the newest [maxSpanEvents] of them.
const (
	EventLeaseRenewed = "lease.renewed"
	EventLeaseOver    = "lease.over"
	EventFenced       = "fence.rejected"
	EventCancelled    = "task.cancelled"
	EventHandedBack   = "task.handed_back"
	EventCapped       = "agent.capped"
	EventWriteRetry   = "write.retry"
	EventModelRetry   = "model.retry"
	EventDeltaRestart = "model.restart"
)

// Destination templates of the messages that carry a task: subjects with
// placeholders for what differs from task to task.

// RequestTemplate is that of requests; prefix is the one of all subjects.
func RequestTemplate(prefix string) string { return prefix + ".task.request.{tenant}.{task_id}" }

// GrantTemplate is that of grants.
func GrantTemplate(prefix string) string { return prefix + ".task.grant.{pool}.{task_id}" }

// EventTemplate is that of events.
func EventTemplate(prefix string) string {
	return prefix + ".event.{tenant}.{thread_id}.{run_id}.{task_id}.{type}"
}

// StartPublish starts the span of publishing a message to a destination. What
// [Inject] writes into the message with the context that it returns makes the
// consumer's span a child of it.
func StartPublish(ctx context.Context, t trace.Tracer, template string, attrs ...attribute.KeyValue) (context.Context, trace.Span) {
	return t.Start(ctx, "publish "+template, trace.WithSpanKind(trace.SpanKindProducer), trace.WithAttributes(append(attrs,
		AttrMessagingSystem.String(MessagingSystem), AttrMessagingTemplate.String(template),
		AttrMessagingOperation.String("publish"), AttrMessagingOperationType.String("send"),
	)...))
}

// StartProcess starts the span of handling one delivery of a message whose trace
// context is the remote parent in ctx: its child, with a link to it. Each delivery
// has a span of its own, with its number from 1; 0 is one that is not known.
func StartProcess(ctx context.Context, t trace.Tracer, template, consumer string, delivery int, attrs ...attribute.KeyValue) (context.Context, trace.Span) {
	attrs = append(attrs,
		AttrMessagingSystem.String(MessagingSystem), AttrMessagingTemplate.String(template),
		AttrMessagingOperation.String("process"), AttrMessagingOperationType.String("process"),
		AttrMessagingConsumer.String(consumer),
	)
	if delivery > 0 {
		attrs = append(attrs, AttrDeliveryAttempt.Int(delivery))
	}
	opts := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attrs...)}
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		opts = append(opts, trace.WithLinks(trace.Link{SpanContext: sc}))
	}
	return t.Start(ctx, "process "+template, opts...)
}

// Fail marks a span as failed: what is said of it, and its class, which is one of
// few, such as an error code.
func Fail(span trace.Span, class, text string) {
	if class == "" {
		class = "_OTHER"
	}
	span.SetStatus(codes.Error, text)
	span.SetAttributes(AttrErrorType.String(class))
}

// ErrorClass is the class of an error for [Fail]: timeout, cancelled, or the type
// of the innermost error.
func ErrorClass(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "cancelled"
	}
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return fmt.Sprintf("%T", err)
		}
		err = next
	}
}

// TracerOf returns a tracer of the provider that the span in ctx comes from.
func TracerOf(ctx context.Context, name string) trace.Tracer {
	span := trace.SpanFromContext(ctx)
	if !span.SpanContext().IsValid() {
		return noop.NewTracerProvider().Tracer(name)
	}
	return Tracer(span.TracerProvider(), name)
}
