package agent

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/internal/tool"
)

// Chat asks a model under a span of its own, by the gen_ai conventions.
func Chat(ctx context.Context, tracer trace.Tracer, m model.Model, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	ctx, span := tracer.Start(ctx, "chat "+m.ModelName(), trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
		telemetry.AttrGenAIOperation.String("chat"), telemetry.AttrGenAIRequestModel.String(m.ModelName()),
		telemetry.AttrGenAIAgentName.String(req.Agent),
	))
	defer span.End()
	content := telemetry.ContentOf(ctx)
	if content != nil && span.IsRecording() {
		span.SetAttributes(telemetry.AttrGenAIInputMessages.String(content.Messages(said(req.Messages))))
	}
	resp, err := m.Generate(ctx, req, onDelta)
	if !span.IsRecording() {
		return resp, err
	}
	// A call that failed may have cost something too.
	if u := resp.Usage; u != nil {
		span.SetAttributes(telemetry.AttrGenAIInputTokens.Int64(u.InputTokens), telemetry.AttrGenAIOutputTokens.Int64(u.OutputTokens))
	}
	if err != nil {
		class := telemetry.ErrorClass(err)
		if fault, ok := errors.AsType[*model.Error](err); ok && fault.Code != "" {
			class = fault.Code
		}
		if ctx.Err() != nil { // whatever it was told
			class = "stopped"
		}
		telemetry.Fail(span, class, "model call failed")
		return resp, err
	}
	attrs := []attribute.KeyValue{telemetry.AttrGenAIFinishReasons.StringSlice([]string{resp.Message.FinishReason})}
	if resp.Model != "" {
		attrs = append(attrs, telemetry.AttrGenAIResponseModel.String(resp.Model))
	}
	if content != nil {
		attrs = append(attrs, telemetry.AttrGenAIOutputMessages.String(content.Messages(said([]model.Message{resp.Message}))))
	}
	span.SetAttributes(attrs...)
	return resp, nil
}

// startTool starts the span of one call of a tool.
func startTool(ctx context.Context, tracer trace.Tracer, call model.ToolCall, args []byte) (context.Context, trace.Span) {
	ctx, span := tracer.Start(ctx, "execute_tool "+call.Name, trace.WithAttributes(
		telemetry.AttrGenAIOperation.String("execute_tool"), telemetry.AttrGenAIToolName.String(call.Name),
		telemetry.AttrGenAIToolCallID.String(call.ID),
	))
	if content := telemetry.ContentOf(ctx); content != nil && span.IsRecording() {
		span.SetAttributes(telemetry.AttrGenAIToolArguments.String(content.Text(string(args))))
	}
	return ctx, span
}

// endTool tells on the span how a call of a tool went. The text of the result is
// content and not told as its error.
func endTool(ctx context.Context, span trace.Span, res tool.Result, err error) {
	switch {
	case err != nil:
		telemetry.Fail(span, "stopped", "the tool was stopped")
	case res.IsError:
		telemetry.Fail(span, "tool_error", "tool reported an error")
	}
	if content := telemetry.ContentOf(ctx); content != nil && span.IsRecording() {
		span.SetAttributes(telemetry.AttrGenAIToolResult.String(content.Text(res.Text)))
	}
}

// said is a conversation in the form of the conventions.
func said(messages []model.Message) []telemetry.Message {
	out := make([]telemetry.Message, len(messages))
	for i, m := range messages {
		s := telemetry.Message{Role: string(m.Role), FinishReason: m.FinishReason}
		if s.Role == "" {
			s.Role = string(model.RoleAssistant)
		}
		switch {
		case m.ToolCallID != "":
			s.Parts = append(s.Parts, telemetry.Part{Type: "tool_call_response", ID: m.ToolCallID, Result: m.Text})
		case m.Text != "":
			s.Parts = append(s.Parts, telemetry.Part{Type: "text", Content: m.Text})
		}
		for _, c := range m.ToolCalls {
			s.Parts = append(s.Parts, telemetry.Part{Type: "tool_call", ID: c.ID, Name: c.Name, Arguments: c.Args})
		}
		out[i] = s
	}
	return out
}
