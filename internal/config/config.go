package config

import (
	"fmt"

	"go.yaml.in/yaml/v3"
)

// Config is everything in herdgate.yaml. Get one from [Load] or [Default].
type Config struct {
	NATS            NATS            `yaml:"nats" jsonschema_description:"How to reach NATS, or how to embed it."`
	HTTP            HTTP            `yaml:"http" jsonschema_description:"The lead's HTTP API."`
	Models          []Model         `yaml:"models" jsonschema:"maxItems=100" jsonschema_description:"The models. The first one is the default."`
	Lead            Lead            `yaml:"lead" jsonschema_description:"The lead agent."`
	Subagents       Subagents       `yaml:"subagents" jsonschema_description:"Sub-agent types and their limits."`
	SubagentRuntime SubagentRuntime `yaml:"subagent_runtime" jsonschema_description:"The admission gate. Read once at start."`
	SubagentBatches SubagentBatches `yaml:"subagent_batches" jsonschema_description:"Durable batches. Read once at start."`
	Executor        Executor        `yaml:"executor" jsonschema_description:"Executor processes."`
	Workspace       Workspace       `yaml:"workspace" jsonschema_description:"Where the tools of agents work."`
	LoopDetection   LoopDetection   `yaml:"loop_detection" jsonschema_description:"Stops agents that repeat themselves."`
	Summarization   Summarization   `yaml:"summarization" jsonschema_description:"Compaction of long conversations, for lead and sub-agents alike."`
	Verification    Verification    `yaml:"verification" jsonschema_description:"Receipts of what tools did."`
	ToolSearch      ToolSearch      `yaml:"tool_search" jsonschema_description:"Tools that agents find on demand."`
	Skills          Skills          `yaml:"skills" jsonschema_description:"Skills for agents."`
	MCP             MCP             `yaml:"mcp" jsonschema_description:"MCP servers whose tools agents may use."`
	AgentStorage    AgentStorage    `yaml:"agent_storage" jsonschema_description:"Where managed sub-agent definitions are kept."`
	Eventsink       Eventsink       `yaml:"eventsink" jsonschema_description:"Where events are stored."`
	Telemetry       Telemetry       `yaml:"telemetry" jsonschema_description:"Traces and metrics."`
}

// NATS says where NATS is.
type NATS struct {
	URL       Address      `yaml:"url" jsonschema:"maxLength=2000" jsonschema_description:"Servers, joined by commas. Empty: a server embedded in the process."`
	Context   string       `yaml:"context" jsonschema:"maxLength=200" jsonschema_description:"A context of the nats command-line tool, in place of url."`
	CredsFile string       `yaml:"creds_file" jsonschema_extras:"x-path=true" jsonschema_description:"A file with user credentials."`
	NKeySeed  string       `yaml:"nkey_seed_file" jsonschema_extras:"x-path=true" jsonschema_description:"A file with an nkey seed."`
	TLS       TLS          `yaml:"tls" jsonschema_description:"Files of a TLS connection."`
	Prefix    string       `yaml:"prefix" jsonschema:"minLength=1,maxLength=259" jsonschema_description:"Prefix of all subjects; stream and bucket names derive from it."`
	Replicas  int          `yaml:"replicas" jsonschema:"minimum=1,maximum=5" jsonschema_description:"Copies of each stream and bucket."`
	Embedded  EmbeddedNATS `yaml:"embedded" jsonschema_description:"The embedded server."`
}

// TLS names the files of a TLS connection.
type TLS struct {
	CA   string `yaml:"ca" jsonschema_extras:"x-path=true" jsonschema_description:"Certificates of the authorities to trust, in PEM form."`
	Cert string `yaml:"cert" jsonschema_extras:"x-path=true" jsonschema_description:"Our certificate, together with key."`
	Key  string `yaml:"key" jsonschema_extras:"x-path=true" jsonschema_description:"The key of cert."`
}

// EmbeddedNATS configures the embedded server.
type EmbeddedNATS struct {
	Listen   string `yaml:"listen" jsonschema_description:"host:port at which other processes may join. Empty: none may."`
	StoreDir string `yaml:"store_dir" jsonschema_extras:"x-path=true" jsonschema_description:"Where JetStream keeps its files. Empty: nats in the data directory."`
}

// HTTP configures the lead's HTTP API.
type HTTP struct {
	Addr string `yaml:"addr" jsonschema:"minLength=1" jsonschema_description:"host:port to listen on. Without authentication it must be a loopback address."`
	Auth Auth   `yaml:"auth" jsonschema_description:"Who may use the API."`
}

// The modes of Auth.
const (
	AuthNone   = "none"
	AuthTokens = "tokens"
)

// Auth says who may use the API.
type Auth struct {
	Mode   string  `yaml:"mode" jsonschema:"enum=none,enum=tokens" jsonschema_description:"none: everybody on this machine. tokens: who sends one of tokens."`
	Tokens []Token `yaml:"tokens" jsonschema:"maxItems=10000" jsonschema_description:"The tokens."`
}

// Token is one bearer token and on whose behalf it acts.
type Token struct {
	Name     string   `yaml:"name" jsonschema:"required,minLength=1,maxLength=64" jsonschema_description:"Name of the token, for logs."`
	TokenEnv string   `yaml:"token_env" jsonschema:"required,maxLength=200,pattern=^[A-Za-z_][A-Za-z0-9_]*$" jsonschema_extras:"x-hide=true,x-rule=the name of an environment variable" jsonschema_description:"The environment variable that holds the token."`
	Tenant   string   `yaml:"tenant" jsonschema:"maxLength=64,pattern=^[A-Za-z0-9_-]+$" jsonschema_extras:"x-rule=1 to 64 characters of A-Z a-z 0-9 _ -" jsonschema_description:"The tenant it belongs to."`
	UserID   string   `yaml:"user_id" jsonschema:"maxLength=256" jsonschema_description:"The user it stands for."`
	Roles    []string `yaml:"roles" jsonschema:"maxItems=100" jsonschema_extras:"x-items=name" jsonschema_description:"Roles of the user."`
	// Attributes go into the identity of the user's tasks.
	Attributes map[string]string `yaml:"attributes,omitempty" jsonschema:"maxProperties=64" jsonschema_extras:"x-names=^[A-Za-z0-9_.-]+$" jsonschema_description:"What else is known of the user, for rules of authorisation."`
}

// The providers of models.
const (
	ProviderOpenAI    = "openai"
	ProviderAnthropic = "anthropic"
	ProviderScript    = "script"
)

// Model is one configured model.
type Model struct {
	Name      string `yaml:"name" jsonschema:"required,minLength=1,maxLength=128" jsonschema_description:"The name by which everything else refers to the model. Must be unique and not inherit."`
	Provider  string `yaml:"provider" jsonschema:"required,enum=openai,enum=anthropic,enum=script" jsonschema_description:"openai, anthropic: everything that speaks their APIs. script: the offline model."`
	Model     string `yaml:"model" jsonschema:"maxLength=256" jsonschema_description:"The provider's name of the model."`
	BaseURL   string `yaml:"base_url" jsonschema:"maxLength=2000" jsonschema_description:"Address of the API. Empty: the provider's own."`
	APIKeyEnv string `yaml:"api_key_env" jsonschema:"maxLength=200,pattern=^([A-Za-z_][A-Za-z0-9_]*)?$" jsonschema_extras:"x-hide=true,x-rule=the name of an environment variable" jsonschema_description:"The environment variable that holds the key."`
	// MaxInputTokens is 0 when it is not known.
	MaxInputTokens int `yaml:"max_input_tokens,omitempty" jsonschema:"minimum=1,maximum=1000000000" jsonschema_description:"How many tokens the model reads at most."`
	// MaxOutputTokens is 0 when the provider's default counts.
	MaxOutputTokens int    `yaml:"max_output_tokens,omitempty" jsonschema:"minimum=1,maximum=1000000000" jsonschema_description:"How many tokens one answer has at most. Empty: openai the model's own bound, anthropic 16384."`
	Price           *Price `yaml:"price,omitempty" jsonschema_description:"What tokens cost, in US dollars; usage then says so. Empty: it does not."`
	// Script is the file of the offline model.
	Script                string `yaml:"script,omitempty" jsonschema_extras:"x-path=true" jsonschema_description:"The rules of a model with provider script."`
	RequestTimeoutSeconds int    `yaml:"request_timeout_seconds" jsonschema:"minimum=1,maximum=86400" jsonschema_description:"How long one call may take."`
	IdleTimeoutSeconds    int    `yaml:"idle_timeout_seconds" jsonschema:"minimum=1,maximum=86400" jsonschema_description:"How long a call may be silent."`
	MaxRetries            int    `yaml:"max_retries" jsonschema:"minimum=0,maximum=20" jsonschema_description:"How often a failed call is repeated. 0: never."`
}

// Price is what a million tokens cost, in US dollars.
type Price struct {
	InputPerMillion  float64 `yaml:"input_per_million" jsonschema:"required,minimum=0,maximum=1000000" jsonschema_description:"Price of a million input tokens."`
	OutputPerMillion float64 `yaml:"output_per_million" jsonschema:"required,minimum=0,maximum=1000000" jsonschema_description:"Price of a million output tokens."`
	// CachedInputPerMillion is nil when cached input costs what other input does.
	CachedInputPerMillion *float64 `yaml:"cached_input_per_million,omitempty" jsonschema:"minimum=0,maximum=1000000" jsonschema_description:"Price of a million input tokens that the provider had cached. Empty: as other input."`
}

// Lead configures the lead agent.
type Lead struct {
	Model            string `yaml:"model" jsonschema:"maxLength=128" jsonschema_description:"A name out of models. Empty: the first one."`
	MaxTurns         int    `yaml:"max_turns" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Model calls in one run."`
	SystemPromptFile string `yaml:"system_prompt_file" jsonschema_extras:"x-path=true" jsonschema_description:"A file with a system prompt of your own, put before ours."`
	// TokenBudget is nil when a run has none.
	TokenBudget *TokenBudget `yaml:"token_budget" jsonschema_description:"What the lead itself may spend in one run. null: not bounded. Keys left out are as in subagents.token_budget."`
}

// Subagents configures sub-agent types and their limits.
type Subagents struct {
	Enabled        bool `yaml:"enabled" jsonschema_description:"Whether the lead may delegate at all."`
	TimeoutSeconds int  `yaml:"timeout_seconds" jsonschema:"minimum=1,maximum=31536000" jsonschema_description:"How long a task of a built-in type may run."`
	// MaxTurns is nil when the built-in types keep their own.
	MaxTurns *int `yaml:"max_turns" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Model calls of a task of a built-in type. null: the type's own."`
	// MaxTotalPerRun and MaxConcurrent bound the delegations of the lead.
	MaxTotalPerRun int `yaml:"max_total_per_run" jsonschema:"minimum=1,maximum=50" jsonschema_description:"Delegations in one run of a lead."`
	// MaxConcurrent is nil when the gate's capacity alone counts.
	MaxConcurrent *int `yaml:"max_concurrent" jsonschema:"minimum=1,maximum=64" jsonschema_description:"Delegations in one answer of the lead's model, never more than subagent_runtime.max_running. null: that number."`
	// TokenBudget is nil unless the user gave one; see [Config.TokenBudget].
	TokenBudget *TokenBudget `yaml:"token_budget" jsonschema_description:"Budget of one task. null: 2000000 tokens, 1000000 with summarization. Keys left out are as in that budget."`
	// Agents are overrides by type name.
	Agents map[string]AgentOverride `yaml:"agents" jsonschema_extras:"x-names=^[A-Za-z0-9_-]{1\\,64}$" jsonschema_description:"Overrides for types, by name."`
	// CustomAgents are the types of the file by name; CustomAgentNames has the
	// names in the order of the file.
	CustomAgents     map[string]CustomAgent `yaml:"custom_agents" jsonschema_extras:"x-names=^[A-Za-z0-9_-]{1\\,64}$" jsonschema_description:"Further types, by name."`
	CustomAgentNames []string               `yaml:"-"`
	Paths            []string               `yaml:"paths" jsonschema:"maxItems=100" jsonschema_extras:"x-path=true,x-items=text" jsonschema_description:"Folders with definitions as Markdown files."`
}

// TokenBudget bounds the tokens of one task.
type TokenBudget struct {
	Enabled   bool `yaml:"enabled" jsonschema_description:"Whether the budget is enforced."`
	MaxTokens int  `yaml:"max_tokens" jsonschema:"minimum=1000,maximum=1000000000000" jsonschema_description:"Input and output together."`
	// MaxInputTokens and MaxOutputTokens are nil when they are not bounded.
	MaxInputTokens    *int    `yaml:"max_input_tokens" jsonschema:"minimum=1,maximum=1000000000000" jsonschema_description:"Input alone. null: not bounded."`
	MaxOutputTokens   *int    `yaml:"max_output_tokens" jsonschema:"minimum=1,maximum=1000000000000" jsonschema_description:"Output alone. null: not bounded."`
	WarnThreshold     float64 `yaml:"warn_threshold" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the budget at which the agent is warned."`
	HardStopThreshold float64 `yaml:"hard_stop_threshold" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the budget at which the agent is stopped. Not below warn_threshold."`
}

// AgentOverride lays values on top of a type. Nil fields leave the definition
// as it is.
type AgentOverride struct {
	TimeoutSeconds *int    `yaml:"timeout_seconds" jsonschema:"minimum=1,maximum=31536000" jsonschema_description:"How long a task may run."`
	MaxTurns       *int    `yaml:"max_turns" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Model calls of a task."`
	Model          *string `yaml:"model" jsonschema:"minLength=1,maxLength=128,pattern=\\S" jsonschema_description:"A name out of models, or inherit."`
	Pool           *string `yaml:"pool" jsonschema:"minLength=1,maxLength=64" jsonschema_description:"Pool in which its tasks run: default, or a name out of subagent_runtime.pools."`
	// Skills: nil leaves the definition's, empty means none.
	Skills      Names        `yaml:"skills" jsonschema:"maxItems=1000" jsonschema_extras:"x-items=name" jsonschema_description:"Skills of the type. null: the definition's. []: none."`
	TokenBudget *TokenBudget `yaml:"token_budget" jsonschema_description:"Budget of a task of this type, in place of subagents.token_budget."`
	Network     *bool        `yaml:"network" jsonschema_description:"Whether commands of the type may use the network."`
}

// CustomAgent is a sub-agent type of the file.
type CustomAgent struct {
	Description  string `yaml:"description" jsonschema:"required,minLength=1,maxLength=10000,pattern=\\S" jsonschema_description:"What the type is for; the lead's model reads it."`
	SystemPrompt string `yaml:"system_prompt" jsonschema:"required,minLength=1,maxLength=100000,pattern=\\S" jsonschema_description:"The type's system prompt."`
	// Tools: nil means all that are offered, empty means none.
	Tools Names `yaml:"tools" jsonschema:"maxItems=1000" jsonschema_extras:"x-items=name" jsonschema_description:"Tools the type may use. Missing or null: all that are offered. []: none."`
	// DisallowedTools is resolved: missing in the file gives the default
	// denials, null and [] give an empty list.
	DisallowedTools Names `yaml:"disallowed_tools" jsonschema:"maxItems=1000" jsonschema_extras:"x-items=name,x-null=keep" jsonschema_description:"Tools the type may not use. Missing: task, ask_clarification and present_files. null or []: no denials; task is never offered all the same."`
	// Skills: nil means all, empty means none.
	Skills         Names  `yaml:"skills" jsonschema:"maxItems=1000" jsonschema_extras:"x-items=name" jsonschema_description:"Skills of the type. Missing or null: all that are enabled. []: none."`
	Model          string `yaml:"model" jsonschema:"minLength=1,maxLength=128,pattern=\\S" jsonschema_description:"A name out of models, or inherit: the parent's."`
	MaxTurns       int    `yaml:"max_turns" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Model calls of a task."`
	TimeoutSeconds int    `yaml:"timeout_seconds" jsonschema:"minimum=1,maximum=31536000" jsonschema_description:"How long a task may run."`
	Pool           string `yaml:"pool" jsonschema:"minLength=1,maxLength=64" jsonschema_description:"Pool in which its tasks run: default, or a name out of subagent_runtime.pools."`
	Network        bool   `yaml:"network" jsonschema_description:"Whether commands of the type may use the network."`
}

// The admission policies.
const (
	PolicyQueue  = "queue"
	PolicyReject = "reject"
)

// SubagentRuntime configures the admission gate.
type SubagentRuntime struct {
	MaxRunning          int    `yaml:"max_running" jsonschema:"minimum=1,maximum=64" jsonschema_description:"Tasks that run at the same time in the whole deployment."`
	MaxQueued           int    `yaml:"max_queued" jsonschema:"minimum=0,maximum=10000" jsonschema_description:"Tasks that may wait. 0: none, what finds no slot is refused at once."`
	AdmissionPolicy     string `yaml:"admission_policy" jsonschema:"enum=queue,enum=reject" jsonschema_description:"queue: wait for a slot. reject: refuse what finds none."`
	QueueTimeoutSeconds int    `yaml:"queue_timeout_seconds" jsonschema:"minimum=1,maximum=86400" jsonschema_description:"How long a task may wait."`
	LeaseTTLSeconds     int    `yaml:"lease_ttl_seconds" jsonschema:"minimum=3,maximum=300" jsonschema_description:"After this time without a sign of life a running task counts as lost."`
	LeaderTTLSeconds    int    `yaml:"leader_ttl_seconds" jsonschema:"minimum=3,maximum=300" jsonschema_description:"After this time without a sign of life another admission process takes over."`
	// Limits are those of the default pool.
	Limits RuntimeLimits          `yaml:"limits" jsonschema_description:"How many tasks of one key may run at the same time. What is at its limit is passed over and keeps its place."`
	Pools  map[string]RuntimePool `yaml:"pools" jsonschema_extras:"x-names=^[A-Za-z0-9_-]{1\\,64}$" jsonschema_description:"Further pools of executors by name, each with a capacity of its own."`
}

// RuntimeLimits hold back tasks of one key. 0 is no limit.
type RuntimeLimits struct {
	PerTenant int            `yaml:"per_tenant" jsonschema:"minimum=0,maximum=64" jsonschema_description:"Tasks of one tenant. 0: no limit."`
	PerThread int            `yaml:"per_thread" jsonschema:"minimum=0,maximum=64" jsonschema_description:"Tasks of one thread of a tenant. 0: no limit."`
	PerType   map[string]int `yaml:"per_type" jsonschema_extras:"x-names=^[A-Za-z0-9_-]{1\\,64}$" jsonschema_description:"Tasks of a sub-agent type, by its name."`
}

// RuntimePool is a pool of executors beside the default one.
type RuntimePool struct {
	MaxRunning int           `yaml:"max_running" jsonschema:"required,minimum=1,maximum=64" jsonschema_description:"Tasks of the pool that run at the same time in the whole deployment."`
	Limits     RuntimeLimits `yaml:"limits" jsonschema_description:"Limits within the pool. Those of subagent_runtime.limits are for the default pool."`
}

// SubagentBatches configures durable batches.
type SubagentBatches struct {
	Enabled                 bool    `yaml:"enabled" jsonschema_description:"Whether batches are offered."`
	PollIntervalSeconds     float64 `yaml:"poll_interval_seconds" jsonschema:"minimum=0.1,maximum=60" jsonschema_description:"Without effect: batches are pushed, not polled. Kept so that older files load."`
	LeaseSeconds            int     `yaml:"lease_seconds" jsonschema:"minimum=10,maximum=3600" jsonschema_description:"After this time without a sign of life an item counts as lost."`
	MaxItemsPerBatch        int     `yaml:"max_items_per_batch" jsonschema:"minimum=1,maximum=100000" jsonschema_description:"Items of one batch."`
	DefaultMaxLiveItems     int     `yaml:"default_max_live_items" jsonschema:"minimum=1,maximum=10000" jsonschema_description:"Items of a batch that are queued or running, unless the batch says otherwise."`
	MaxLiveItemsPerBatch    int     `yaml:"max_live_items_per_batch" jsonschema:"minimum=1,maximum=100000" jsonschema_description:"The most that a batch may ask for."`
	DefaultMaxRunningItems  int     `yaml:"default_max_running_items" jsonschema:"minimum=1,maximum=64" jsonschema_description:"Items of a batch that run, unless the batch says otherwise."`
	MaxRunningItemsPerBatch int     `yaml:"max_running_items_per_batch" jsonschema:"minimum=1,maximum=1000" jsonschema_description:"The most that a batch may ask for."`
	MaxAttempts             int     `yaml:"max_attempts" jsonschema:"minimum=1,maximum=10" jsonschema_description:"Attempts of one item."`
	MaxResultChars          int     `yaml:"max_result_chars" jsonschema:"minimum=1000,maximum=1000000" jsonschema_description:"Characters kept of a result."`
	ResultPreviewMaxChars   int     `yaml:"result_preview_max_chars" jsonschema:"minimum=64,maximum=100000" jsonschema_description:"Characters of a result in lists."`
}

// What happens to a task whose executor was lost.
const (
	RetryNotStarted = "not_started"
	RetryNever      = "never"
	RetryAlways     = "always"
)

// Executor configures executor processes.
type Executor struct {
	MaxTasks            int    `yaml:"max_tasks" jsonschema:"minimum=1,maximum=1024" jsonschema_description:"Tasks that one process runs at the same time."`
	DrainTimeoutSeconds int    `yaml:"drain_timeout_seconds" jsonschema:"minimum=0,maximum=86400" jsonschema_description:"How long running tasks may go on after SIGTERM. 0: they are handed back at once."`
	StallTimeoutSeconds int    `yaml:"stall_timeout_seconds" jsonschema:"minimum=1,maximum=86400" jsonschema_description:"A running task in which nothing happens for this long ends as failed: no piece of an answer, no output, no step."`
	Pool                string `yaml:"pool" jsonschema:"minLength=1,maxLength=64,pattern=^[A-Za-z0-9_-]+$" jsonschema_description:"Pool whose tasks the process runs."`
	RetryLost           string `yaml:"retry_lost" jsonschema:"enum=not_started,enum=never,enum=always" jsonschema_description:"Which tasks run again when their executor was lost."`
	TimeZone            string `yaml:"time_zone" jsonschema:"maxLength=100" jsonschema_description:"Time zone of the date that sub-agents are told, as Europe/Berlin. Empty: that of the machine."`
}

// Where workspaces lie and what confines the processes in them.
const (
	WorkspaceLocal       = "local"
	WorkspaceObjectStore = "object_store"
	SandboxLandlock      = "landlock"
	SandboxNone          = "none"
)

// Workspace configures where the tools of agents work.
type Workspace struct {
	Root               string `yaml:"root" jsonschema_extras:"x-path=true" jsonschema_description:"Folder of all workspaces. Empty: workspaces in the data directory."`
	Backend            string `yaml:"backend" jsonschema:"enum=local,enum=object_store" jsonschema_description:"local: all executors see the same folder. object_store: snapshots travel through NATS."`
	Sandbox            string `yaml:"sandbox" jsonschema:"enum=landlock,enum=none" jsonschema_description:"What confines the processes that tools start."`
	AllowHostBash      bool   `yaml:"allow_host_bash" jsonschema_description:"Offer bash although nothing confines it."`
	ToolOutputMaxChars int    `yaml:"tool_output_max_chars" jsonschema:"minimum=100,maximum=10000000" jsonschema_description:"Characters of a tool's output that the model sees."`

	Limits   WorkspaceLimits `yaml:"limits" jsonschema_description:"Bounds of one command that a tool runs."`
	WebFetch WebFetch        `yaml:"web_fetch" jsonschema_description:"The tool that fetches pages of the web."`
}

// WebFetch configures the tool that fetches pages.
type WebFetch struct {
	Enabled      bool `yaml:"enabled" jsonschema_description:"Offer web_fetch to the sub-agent types that name it in their tools. Whatever a task knows can leave with an address."`
	AllowPrivate bool `yaml:"allow_private" jsonschema_description:"Allow addresses inside private networks and of the machine itself."`
}

// WorkspaceLimits bound the commands that tools run.
type WorkspaceLimits struct {
	Processes  int `yaml:"processes" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Processes of one command."`
	MemoryMB   int `yaml:"memory_mb" jsonschema:"minimum=16,maximum=100000000" jsonschema_description:"MiB of memory that each process of a command may fill."`
	FileMB     int `yaml:"file_mb" jsonschema:"minimum=1,maximum=100000000" jsonschema_description:"MiB of the largest file that a command may write."`
	CPUSeconds int `yaml:"cpu_seconds" jsonschema:"minimum=1,maximum=31536000" jsonschema_description:"Processor time of each process of a command."`
}

// LoopDetection configures the guard against repetition.
type LoopDetection struct {
	Enabled           bool                `yaml:"enabled" jsonschema_description:"Whether the guard is on."`
	WarnThreshold     int                 `yaml:"warn_threshold" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Answers with the same calls and the same results after which the agent is warned."`
	HardLimit         int                 `yaml:"hard_limit" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Answers with the same calls and the same results after which the agent is stopped. Not below warn_threshold."`
	WindowSize        int                 `yaml:"window_size" jsonschema:"minimum=1,maximum=100000" jsonschema_description:"Latest answers with calls that are compared."`
	MaxTrackedThreads int                 `yaml:"max_tracked_threads" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Without effect: what a guard remembers belongs to one run or task and ends with it. Kept so that older files load."`
	ToolFreqWarn      int                 `yaml:"tool_freq_warn" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Calls of one tool after which the agent is warned."`
	ToolFreqHardLimit int                 `yaml:"tool_freq_hard_limit" jsonschema:"minimum=1,maximum=1000000" jsonschema_description:"Calls of one tool after which the agent is stopped. Not below tool_freq_warn."`
	ToolFreqOverrides map[string]ToolFreq `yaml:"tool_freq_overrides" jsonschema_extras:"x-names=\\S" jsonschema_description:"Other numbers for single tools, by name."`
}

// ToolFreq is how often one tool may be called.
type ToolFreq struct {
	Warn      int `yaml:"warn" jsonschema:"required,minimum=1,maximum=1000000" jsonschema_description:"Calls after which the agent is warned."`
	HardLimit int `yaml:"hard_limit" jsonschema:"required,minimum=1,maximum=1000000" jsonschema_description:"Calls after which the agent is stopped. Not below warn."`
}

// The types of Threshold.
const (
	ThresholdTokens   = "tokens"
	ThresholdMessages = "messages"
	ThresholdFraction = "fraction"
)

// Threshold is an amount of conversation.
type Threshold struct {
	Type  string  `yaml:"type" jsonschema:"required,enum=tokens,enum=messages,enum=fraction" jsonschema_description:"tokens, messages, or a fraction of the model's max_input_tokens."`
	Value float64 `yaml:"value" jsonschema:"required,minimum=0,maximum=1000000000" jsonschema_description:"A whole number from 1, or for fraction a number above 0 up to 1."`
}

// Summarization configures compaction.
type Summarization struct {
	Enabled bool `yaml:"enabled" jsonschema_description:"Whether conversations are compacted."`
	// ModelName is nil for the agent's own model.
	ModelName *string `yaml:"model_name" jsonschema:"minLength=1,maxLength=128" jsonschema_description:"A name out of models. null: the agent's own."`
	// Trigger: any one of them suffices; none means never.
	Trigger []Threshold `yaml:"trigger" jsonschema:"maxItems=10" jsonschema_extras:"x-single=true" jsonschema_description:"When to compact: one or many, any of which suffices. null: never."`
	Keep    Threshold   `yaml:"keep" jsonschema_description:"How much of the end stays as it is."`
	// TrimTokensToSummarize is nil for no trim.
	TrimTokensToSummarize *int     `yaml:"trim_tokens_to_summarize" jsonschema:"minimum=1,maximum=1000000000" jsonschema_description:"Tokens of the old part that the summarising model gets. null: all."`
	SummaryPrompt         *string  `yaml:"summary_prompt" jsonschema:"maxLength=100000" jsonschema_description:"A prompt of your own for the summary. null: ours."`
	SkillFileReadTools    []string `yaml:"skill_file_read_tool_names" jsonschema:"maxItems=100" jsonschema_extras:"x-items=name" jsonschema_description:"Tools whose reads of skill files are kept."`
}

// When receipts are shown to the lead.
const (
	RenderDelegationOnly = "delegation_only"
	RenderAlways         = "always"
)

// Verification configures receipts.
type Verification struct {
	ReceiptsEnabled    bool   `yaml:"receipts_enabled" jsonschema_description:"Whether there are receipts at all: made of tool calls, shown, stored, and compared with the citations of reports."`
	ReceiptsRenderMode string `yaml:"receipts_render_mode" jsonschema:"enum=delegation_only,enum=always" jsonschema_description:"When the lead sees the receipts of its calls: only after a delegation of the current turn, or always. Sub-agents always see theirs."`
}

// ToolSearch configures tools that are found on demand.
type ToolSearch struct {
	Enabled         bool `yaml:"enabled" jsonschema_description:"Whether MCP tools are offered by search alone."`
	AutoPromoteTopK int  `yaml:"auto_promote_top_k" jsonschema:"minimum=1,maximum=5" jsonschema_description:"Tools that a matching request brings in by itself."`
}

// Skills says where skills lie.
type Skills struct {
	Paths []string `yaml:"paths" jsonschema:"maxItems=100" jsonschema_extras:"x-path=true,x-items=text" jsonschema_description:"Folders that hold NAME/SKILL.md."`
}

// MCP configures MCP servers.
type MCP struct {
	Servers map[string]MCPServer `yaml:"servers" jsonschema_extras:"x-names=^[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*$" jsonschema_description:"The servers by name. A tool is offered as NAME__TOOL."`
}

// The transports of MCP servers.
const (
	TransportStdio = "stdio"
	TransportHTTP  = "http"
	TransportSSE   = "sse"
)

// MCPServer is one MCP server: a process to start, or an address.
type MCPServer struct {
	Command string   `yaml:"command,omitempty" jsonschema_extras:"x-path=dotted" jsonschema_description:"A program to start, in place of url."`
	Args    []string `yaml:"args,omitempty" jsonschema:"maxItems=1000" jsonschema_description:"Arguments of command."`
	// Env and Headers hold values or, as $NAME, names of environment variables.
	Env     map[string]Secret `yaml:"env,omitempty" jsonschema_extras:"x-hide=true,x-names=^[A-Za-z_][A-Za-z0-9_]*$" jsonschema_description:"Environment of command. $NAME takes a variable of ours."`
	URL     Address           `yaml:"url,omitempty" jsonschema:"maxLength=2000" jsonschema_description:"Address of a server that is running, in place of command."`
	Headers map[string]Secret `yaml:"headers,omitempty" jsonschema_extras:"x-hide=true,x-names=^[!#$%&'*+.^_|~0-9A-Za-z-]+$" jsonschema_description:"Headers for url. $NAME takes an environment variable."`
	// Transport is stdio for a command; for a url http or sse.
	Transport string `yaml:"transport,omitempty" jsonschema:"enum=stdio,enum=http,enum=sse" jsonschema_description:"stdio for command; http (the default) or sse for url."`
	Enabled   bool   `yaml:"enabled" jsonschema_description:"Whether the server is used."`
	// Routing hints when to bring in its tools.
	Routing *Routing `yaml:"routing,omitempty" jsonschema_description:"When tool search should bring in the server's tools by itself."`
}

// Routing hints when a server's tools fit.
type Routing struct {
	Mode     string   `yaml:"mode" jsonschema:"enum=off,enum=prefer" jsonschema_description:"prefer: bring the tools in when a keyword occurs."`
	Priority int      `yaml:"priority" jsonschema:"minimum=-1000000,maximum=1000000" jsonschema_description:"Higher comes first."`
	Keywords []string `yaml:"keywords" jsonschema:"maxItems=1000" jsonschema_extras:"x-items=name" jsonschema_description:"Words of a request that make the tools fit."`
}

// Where managed definitions are kept.
const (
	StorageNATS = "nats"
	StorageFile = "file"
	StorageSQL  = "sql"
)

// AgentStorage says where managed sub-agent definitions are kept.
type AgentStorage struct {
	Backend string `yaml:"backend" jsonschema:"enum=nats,enum=file,enum=sql" jsonschema_description:"Where managed definitions are kept."`
}

// The event stores.
const (
	StoreSQLite   = "sqlite"
	StorePostgres = "postgres"
)

// How several event sinks on one database get on.
const (
	SinksStandBy = "standby"
	SinksShare   = "share"
)

// Eventsink configures the event store.
type Eventsink struct {
	Store           string  `yaml:"store" jsonschema:"enum=sqlite,enum=postgres" jsonschema_description:"sqlite: one file, one machine. postgres: a fleet."`
	DSN             Address `yaml:"dsn" jsonschema:"maxLength=4000" jsonschema_description:"Address of the database. For sqlite a file; empty: events.db in the data directory."`
	Replicas        string  `yaml:"replicas" jsonschema:"enum=standby,enum=share" jsonschema_description:"Several event sinks on one database: standby lets one write and the others wait, share lets all write, with postgres."`
	BatchSize       int     `yaml:"batch_size" jsonschema:"minimum=1,maximum=10000" jsonschema_description:"Events written in one transaction at most."`
	FlushIntervalMS int     `yaml:"flush_interval_ms" jsonschema:"minimum=1,maximum=60000" jsonschema_description:"How long an event waits for others."`
	RetentionDays   int     `yaml:"retention_days" jsonschema:"minimum=0,maximum=36500" jsonschema_description:"Days that events are kept. 0: for ever."`
}

// Telemetry configures traces and metrics.
type Telemetry struct {
	OTLPEndpoint   string  `yaml:"otlp_endpoint" jsonschema:"maxLength=2000" jsonschema_description:"A collector that takes OTLP: host:4318 or a URL, grpc://host:4317 for gRPC. Empty: the one of OTEL_EXPORTER_OTLP_ENDPOINT, if any."`
	SampleRatio    float64 `yaml:"sample_ratio" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of new traces that are recorded."`
	CaptureContent bool    `yaml:"capture_content" jsonschema_description:"Put prompts, answers and arguments into spans, cut and without what looks like a secret."`
	MetricsAddr    string  `yaml:"metrics_addr" jsonschema_description:"host:port for metrics and health of services without an HTTP API. Empty: none."`
}

// Names is a list in which nil and empty differ. In YAML nil is null.
type Names []string

// MarshalYAML implements yaml.Marshaler.
func (n Names) MarshalYAML() (any, error) {
	if n == nil {
		return nil, nil // null is the value
	}
	return []string(n), nil
}

// CustomAgentList returns the names and definitions of custom_agents in the
// order of the file.
func (s Subagents) CustomAgentList() []NamedAgent {
	list := make([]NamedAgent, 0, len(s.CustomAgentNames))
	for _, name := range s.CustomAgentNames {
		list = append(list, NamedAgent{Name: name, CustomAgent: s.CustomAgents[name]})
	}
	return list
}

// NamedAgent is a CustomAgent with its name.
type NamedAgent struct {
	Name string
	CustomAgent
}

// TokenBudget returns the budget of a task of the given type: the type's own
// override, else what the user set for all, else the default, which depends on
// whether conversations are compacted.
func (c Config) TokenBudget(subagentType string) TokenBudget {
	if o, ok := c.Subagents.Agents[subagentType]; ok && o.TokenBudget != nil {
		return *o.TokenBudget
	}
	if c.Subagents.TokenBudget != nil {
		return *c.Subagents.TokenBudget
	}
	return defaultTokenBudget(c.Summarization.Enabled)
}

// Notes are the values that have less effect than they seem to, each with the
// reason, for the log at start.
func (c Config) Notes() []string {
	var notes []string
	if n := c.Subagents.MaxConcurrent; n != nil && *n > c.SubagentRuntime.MaxRunning {
		notes = append(notes, fmt.Sprintf("subagents.max_concurrent is %d, but %d is in effect: subagent_runtime.max_running is the most that can run", *n, c.SubagentRuntime.MaxRunning))
	}
	// Who left it at the default has made no mistake.
	if n := c.Executor.MaxTasks; n > c.SubagentRuntime.MaxRunning && n != Default().Executor.MaxTasks {
		notes = append(notes, fmt.Sprintf("executor.max_tasks is %d, but at most %d tasks run in the whole deployment (subagent_runtime.max_running)", n, c.SubagentRuntime.MaxRunning))
	}
	if c.HTTP.Auth.Mode == AuthNone && len(c.HTTP.Auth.Tokens) > 0 {
		notes = append(notes, "http.auth.tokens are not used: http.auth.mode is none")
	}
	notes = append(notes, c.Summarization.notes(c.Models)...)
	for _, key := range c.withoutEffect() {
		notes = append(notes, key+" is set, but has no effect in this version")
	}
	return notes
}

// notes tells what keeps compaction from acting.
func (s Summarization) notes(models []Model) []string {
	if !s.Enabled {
		return nil
	}
	if len(s.Trigger) == 0 {
		return []string{"summarization.enabled is true, but nothing is ever compacted: summarization.trigger is not set"}
	}
	fraction := s.Keep.Type == ThresholdFraction
	for _, t := range s.Trigger {
		fraction = fraction || t.Type == ThresholdFraction
	}
	var notes []string
	for _, m := range models {
		if fraction && m.MaxInputTokens == 0 {
			notes = append(notes, fmt.Sprintf("summarization measures a fraction, but models.%s has no max_input_tokens: for this model such a trigger has no effect, and such a keep is 20 messages", m.Name))
		}
	}
	return notes
}

// String returns the configuration as YAML, without secrets.
func (c Config) String() string {
	b, err := yaml.Marshal(c)
	if err != nil { // plain data: cannot happen
		return "config: " + err.Error()
	}
	return string(b)
}
