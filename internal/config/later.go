package config

// later lists the sections and keys that are read and checked, so that files can
// be written for them, but that nothing acts on yet.
var later = []struct {
	key  string
	used func(c, def Config) bool
}{
	{"subagent_batches", func(c, def Config) bool { return c.SubagentBatches != def.SubagentBatches }},
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
