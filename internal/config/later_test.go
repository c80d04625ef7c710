package config

import (
	"strings"
	"testing"
)

// What nothing acts on yet is said, and only when the user has set it.
func TestKeysWithoutEffectAreTold(t *testing.T) {
	if got := Default().withoutEffect(); len(got) != 0 {
		t.Errorf("the defaults have no effect: %v", got)
	}
	file := `
subagents: { token_budget: { max_tokens: 5000 }, paths: [agents] }
subagent_batches: { enabled: false }
workspace: { backend: object_store }
loop_detection: { enabled: false }
summarization: { enabled: true }
verification: { receipts_enabled: false }
tool_search: { enabled: true }
skills: { paths: [skills] }
mcp: { servers: { x: { command: x } } }
agent_storage: { backend: file }
eventsink: { retention_days: 3 }
telemetry: { capture_content: true }
`
	cfg, faults := Check("herdgate.yaml", []byte(file), nil)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	if got := cfg.withoutEffect(); len(got) != len(later) {
		t.Errorf("told are %v, want all of %d", got, len(later))
	}
	if notes := strings.Join(cfg.Notes(), "\n"); !strings.Contains(notes, "summarization is set, but has no effect in this version") {
		t.Errorf("notes = %s", notes)
	}
}
