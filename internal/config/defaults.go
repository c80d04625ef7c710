package config

import (
	"github.com/herdgate/herdgate/pkg/contract"
	"go.yaml.in/yaml/v3"
)

// The default token budget of a task is smaller with compaction, because then
// the conversation is sent again less often.
const (
	budgetTokens            = 2_000_000
	budgetTokensCompaction  = 1_000_000
	defaultAgentTurns       = 50
	defaultAgentTimeoutSecs = 900
)

// DefaultDenials are the tools that no sub-agent gets unless its definition
// says otherwise. A fresh slice each time.
func DefaultDenials() []string { return []string{"task", "ask_clarification", "present_files"} }

// Default returns the configuration of an empty file.
func Default() Config {
	trim := 4000
	return Config{
		NATS: NATS{Prefix: contract.DefaultPrefix, Replicas: 1},
		HTTP: HTTP{Addr: "127.0.0.1:8484", Auth: Auth{Mode: AuthNone}},
		Lead: Lead{MaxTurns: 100},
		Subagents: Subagents{
			Enabled:        true,
			TimeoutSeconds: 1800,
			MaxTotalPerRun: 6,
		},
		SubagentRuntime: SubagentRuntime{
			MaxRunning:          3,
			MaxQueued:           64,
			AdmissionPolicy:     PolicyQueue,
			QueueTimeoutSeconds: 300,
			LeaseTTLSeconds:     15,
			LeaderTTLSeconds:    10,
		},
		SubagentBatches: SubagentBatches{
			Enabled:                 true,
			PollIntervalSeconds:     1,
			LeaseSeconds:            120,
			MaxItemsPerBatch:        5000,
			DefaultMaxLiveItems:     100,
			MaxLiveItemsPerBatch:    1000,
			DefaultMaxRunningItems:  3,
			MaxRunningItemsPerBatch: 64,
			MaxAttempts:             3,
			MaxResultChars:          100_000,
			ResultPreviewMaxChars:   2000,
		},
		Executor: Executor{MaxTasks: 8, DrainTimeoutSeconds: 60, StallTimeoutSeconds: 600, Pool: string(contract.DefaultPool), RetryLost: RetryNotStarted},
		Workspace: Workspace{
			Backend: WorkspaceLocal, Sandbox: SandboxLandlock, ToolOutputMaxChars: 20_000,
			Limits: WorkspaceLimits{Processes: 512, MemoryMB: 4096, FileMB: 4096, CPUSeconds: 3600},
		},
		LoopDetection: LoopDetection{
			Enabled:           true,
			WarnThreshold:     3,
			HardLimit:         5,
			WindowSize:        20,
			MaxTrackedThreads: 100,
			ToolFreqWarn:      30,
			ToolFreqHardLimit: 50,
		},
		Summarization: Summarization{
			Keep:                  Threshold{Type: ThresholdMessages, Value: 20},
			TrimTokensToSummarize: &trim,
			SkillFileReadTools:    []string{"read_file", "read", "view", "cat"},
		},
		Verification: Verification{ReceiptsEnabled: true, ReceiptsRenderMode: RenderDelegationOnly},
		ToolSearch:   ToolSearch{AutoPromoteTopK: 3},
		AgentStorage: AgentStorage{Backend: StorageNATS},
		Eventsink:    Eventsink{Store: StoreSQLite, Replicas: SinksStandBy, BatchSize: 500, FlushIntervalMS: 100},
		Telemetry:    Telemetry{SampleRatio: 1},
	}
}

// defaultTokenBudget is the budget of a task when nobody configured one, and
// what the keys left out of a configured one are.
func defaultTokenBudget(compaction bool) TokenBudget {
	b := TokenBudget{Enabled: true, MaxTokens: budgetTokens, WarnThreshold: 0.7, HardStopThreshold: 1}
	if compaction {
		b.MaxTokens = budgetTokensCompaction
	}
	return b
}

// The elements of lists and maps have defaults of their own. They are set
// before decoding, so that a key left out keeps its default.

func defaultModel() Model {
	return Model{RequestTimeoutSeconds: 600, IdleTimeoutSeconds: 60, MaxRetries: 3}
}

func defaultToken() Token { return Token{Tenant: string(contract.DefaultTenant)} }

func defaultCustomAgent() CustomAgent {
	return CustomAgent{
		DisallowedTools: DefaultDenials(),
		Model:           "inherit",
		MaxTurns:        defaultAgentTurns,
		TimeoutSeconds:  defaultAgentTimeoutSecs,
		Pool:            string(contract.DefaultPool),
	}
}

func defaultMCPServer() MCPServer { return MCPServer{Enabled: true} }

func defaultRouting() Routing { return Routing{Mode: "off"} }

// UnmarshalYAML implements yaml.Unmarshaler.
func (m *Model) UnmarshalYAML(n *yaml.Node) error {
	type plain Model
	p := plain(defaultModel())
	err := n.Decode(&p)
	*m = Model(p)
	return err
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (t *Token) UnmarshalYAML(n *yaml.Node) error {
	type plain Token
	p := plain(defaultToken())
	err := n.Decode(&p)
	*t = Token(p)
	return err
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (a *CustomAgent) UnmarshalYAML(n *yaml.Node) error {
	type plain CustomAgent
	p := plain(defaultCustomAgent())
	err := n.Decode(&p)
	if p.DisallowedTools == nil { // null in the file
		p.DisallowedTools = Names{}
	}
	*a = CustomAgent(p)
	return err
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (s *MCPServer) UnmarshalYAML(n *yaml.Node) error {
	type plain MCPServer
	p := plain(defaultMCPServer())
	err := n.Decode(&p)
	*s = MCPServer(p)
	return err
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (r *Routing) UnmarshalYAML(n *yaml.Node) error {
	type plain Routing
	p := plain(defaultRouting())
	err := n.Decode(&p)
	*r = Routing(p)
	return err
}

// UnmarshalYAML implements yaml.Unmarshaler. A max_tokens left out stays 0 here
// and is filled in when it is known whether conversations are compacted.
func (b *TokenBudget) UnmarshalYAML(n *yaml.Node) error {
	type plain TokenBudget
	p := plain(defaultTokenBudget(false))
	p.MaxTokens = 0
	err := n.Decode(&p)
	*b = TokenBudget(p)
	return err
}

// fillBudgets completes the budgets whose max_tokens was left out.
func (c *Config) fillBudgets() {
	def := defaultTokenBudget(c.Summarization.Enabled).MaxTokens
	budgets := []*TokenBudget{c.Subagents.TokenBudget, c.Lead.TokenBudget}
	for _, o := range c.Subagents.Agents {
		budgets = append(budgets, o.TokenBudget)
	}
	for _, b := range budgets {
		if b != nil && b.MaxTokens == 0 {
			b.MaxTokens = def
		}
	}
}
