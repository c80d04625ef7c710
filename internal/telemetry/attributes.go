package telemetry

import "go.opentelemetry.io/otel/attribute"

// Names of span attributes, all in this file because the conventions they come
// from are still marked "development": when a name moves, it moves here.

// Messaging, from the OpenTelemetry messaging conventions.
const (
	AttrMessagingSystem      = attribute.Key("messaging.system") // "nats"
	AttrMessagingDestination = attribute.Key("messaging.destination.name")
	// AttrMessagingTemplate is the subject with placeholders for what differs from message to message.
	AttrMessagingTemplate  = attribute.Key("messaging.destination.template")
	AttrMessagingOperation = attribute.Key("messaging.operation.name")
	// AttrMessagingOperationType is one of create, send, receive, process, settle.
	AttrMessagingOperationType = attribute.Key("messaging.operation.type")
	AttrMessagingMessageID     = attribute.Key("messaging.message.id")
	AttrMessagingConsumer      = attribute.Key("messaging.consumer.group.name")
	AttrMessagingBatchCount    = attribute.Key("messaging.batch.message_count")
	AttrMessagingBodySize      = attribute.Key("messaging.message.body.size")
	// AttrDeliveryAttempt counts the deliveries of a message from 1. The conventions
	// have it for other systems only.
	AttrDeliveryAttempt = attribute.Key("messaging.nats.message.delivery_attempt")
)

// Models, agents and tools, from the OpenTelemetry gen_ai conventions.
const (
	AttrGenAIOperation      = attribute.Key("gen_ai.operation.name") // chat, execute_tool, invoke_agent
	AttrGenAIProvider       = attribute.Key("gen_ai.provider.name")
	AttrGenAIRequestModel   = attribute.Key("gen_ai.request.model")
	AttrGenAIResponseModel  = attribute.Key("gen_ai.response.model")
	AttrGenAIFinishReasons  = attribute.Key("gen_ai.response.finish_reasons")
	AttrGenAIInputTokens    = attribute.Key("gen_ai.usage.input_tokens")
	AttrGenAIOutputTokens   = attribute.Key("gen_ai.usage.output_tokens")
	AttrGenAICacheRead      = attribute.Key("gen_ai.usage.cache_read.input_tokens")
	AttrGenAIAgentName      = attribute.Key("gen_ai.agent.name")
	AttrGenAIConversationID = attribute.Key("gen_ai.conversation.id")
	AttrGenAIToolName       = attribute.Key("gen_ai.tool.name")
	AttrGenAIToolCallID     = attribute.Key("gen_ai.tool.call.id")
	// The content of messages, only with telemetry.capture_content.
	AttrGenAIInputMessages  = attribute.Key("gen_ai.input.messages")
	AttrGenAIOutputMessages = attribute.Key("gen_ai.output.messages")
	AttrGenAIToolArguments  = attribute.Key("gen_ai.tool.call.arguments")
	AttrGenAIToolResult     = attribute.Key("gen_ai.tool.call.result")
)

// General conventions.
const (
	AttrErrorType = attribute.Key("error.type")
)

// Herdgate's own.
const (
	AttrTaskID       = attribute.Key("herdgate.task_id")
	AttrRunID        = attribute.Key("herdgate.run_id")
	AttrThreadID     = attribute.Key("herdgate.thread_id")
	AttrTenant       = attribute.Key("herdgate.tenant")
	AttrPool         = attribute.Key("herdgate.pool")
	AttrSubagentType = attribute.Key("herdgate.subagent_type")
	// AttrAttempt counts from 1.
	AttrAttempt    = attribute.Key("herdgate.attempt")
	AttrSlot       = attribute.Key("herdgate.slot")
	AttrEpoch      = attribute.Key("herdgate.epoch")
	AttrRequestSeq = attribute.Key("herdgate.request_seq")
	// AttrQueuePosition is the place in the queue of the pool at entry, from 1; 0 for
	// a task that found a free slot.
	AttrQueuePosition = attribute.Key("herdgate.queue_position")
	// AttrQueueDepth is how many waited in that queue at entry, the task among them.
	AttrQueueDepth = attribute.Key("herdgate.queue_depth")
	// AttrQueueMS is the wait for a slot, in milliseconds.
	AttrQueueMS      = attribute.Key("herdgate.queue_ms")
	AttrExecutor     = attribute.Key("herdgate.executor")
	AttrStatus       = attribute.Key("herdgate.status")
	AttrStopReason   = attribute.Key("herdgate.stop_reason")
	AttrErrorCode    = attribute.Key("herdgate.error_code")
	AttrEventType    = attribute.Key("herdgate.event_type")
	AttrMessageIndex = attribute.Key("herdgate.message_index")
	// AttrTurn counts the model calls of an agent from 1.
	AttrTurn        = attribute.Key("herdgate.turn")
	AttrRedelivered = attribute.Key("herdgate.redelivered")
	AttrBatchID     = attribute.Key("herdgate.batch_id")
	// AttrVoid: the message had been overtaken, and nothing was done.
	AttrVoid = attribute.Key("herdgate.void")
	// AttrTakeover: another process began it.
	AttrTakeover = attribute.Key("herdgate.takeover")
	AttrWaitMS   = attribute.Key("herdgate.wait_ms")
)

// MessagingSystem is the value of [AttrMessagingSystem].
const MessagingSystem = "nats"
