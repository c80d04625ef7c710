package config

import (
	"strings"
	"testing"
)

// COMPACT-01: who switches compaction on and yet gets none is told why.
func TestCompactionThatNeverActsIsTold(t *testing.T) {
	for file, want := range map[string]string{
		"summarization: { enabled: true }":                                                                            "summarization.trigger is not set",
		"summarization: { enabled: true, trigger: { type: messages, value: 50 } }":                                    "",
		"summarization: { trigger: { type: fraction, value: 0.5 } }":                                                  "",
		"summarization: { enabled: true, trigger: { type: fraction, value: 0.5 } }":                                   "models.main has no max_input_tokens",
		"summarization: { enabled: true, trigger: { type: tokens, value: 9 }, keep: { type: fraction, value: 0.5 } }": "models.main has no max_input_tokens",
	} {
		cfg, faults := Check("herdgate.yaml", []byte("models: [{ name: main, provider: openai, model: m }]\n"+file), nil)
		if len(faults) > 0 {
			t.Fatal(faults)
		}
		notes := strings.Join(cfg.Notes(), "\n")
		if want == "" && notes != "" || !strings.Contains(notes, want) {
			t.Errorf("%s: notes = %q, want %q", file, notes, want)
		}
	}
}

// What nothing acts on yet is said, and only when the user has set it.
func TestKeysWithoutEffectAreTold(t *testing.T) {
	if got := Default().withoutEffect(); len(got) != 0 {
		t.Errorf("the defaults have no effect: %v", got)
	}
	file := `
subagent_batches: { enabled: false }
`
	cfg, faults := Check("herdgate.yaml", []byte(file), nil)
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	if got := cfg.withoutEffect(); len(got) != len(later) {
		t.Errorf("told are %v, want all of %d", got, len(later))
	}
	if notes := strings.Join(cfg.Notes(), "\n"); !strings.Contains(notes, "subagent_batches is set, but has no effect in this version") {
		t.Errorf("notes = %s", notes)
	}
}
