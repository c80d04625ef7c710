package config

// later lists the sections and keys that are read and checked, so that files can
// be written for them, but that nothing acts on yet.
var later = []struct {
	key  string
	used func(c, def Config) bool
}{
	{"subagents.paths", func(c, _ Config) bool { return len(c.Subagents.Paths) > 0 }},
	{"subagent_batches", func(c, def Config) bool { return c.SubagentBatches != def.SubagentBatches }},
	{"tool_search", func(c, _ Config) bool { return c.ToolSearch.Enabled }},
	{"skills.paths", func(c, _ Config) bool { return len(c.Skills.Paths) > 0 }},
	{"mcp.servers", func(c, _ Config) bool { return len(c.MCP.Servers) > 0 }},
	{"agent_storage", func(c, def Config) bool { return c.AgentStorage != def.AgentStorage }},
	{"telemetry.capture_content", func(c, _ Config) bool { return c.Telemetry.CaptureContent }},
}

// withoutEffect names what the user has set and nothing acts on.
func (c Config) withoutEffect() []string {
	def := Default()
	var keys []string
	for _, l := range later {
		if l.used(c, def) {
			keys = append(keys, l.key)
		}
	}
	return keys
}
