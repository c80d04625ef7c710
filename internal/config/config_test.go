package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

func mustCheck(t *testing.T, doc string, env ...string) Config {
	t.Helper()
	cfg, faults := Check("h.yaml", []byte(doc), env)
	for _, f := range faults {
		t.Errorf("fault: %s", f)
	}
	return cfg
}

func checkFaults(t *testing.T, doc string, env ...string) []string {
	t.Helper()
	_, faults := Check("h.yaml", []byte(doc), env)
	out := make([]string, len(faults))
	for i, f := range faults {
		out[i] = f.String()
	}
	return out
}

func TestEmptyFileIsTheDefault(t *testing.T) {
	t.Parallel()
	for _, doc := range []string{"", "# nothing\n", "---\n", "null\n", "subagent_runtime:\nmodels:\nsubagents:\n  agents:\n  paths:\n"} {
		if got := mustCheck(t, doc); !reflect.DeepEqual(got, Default()) {
			t.Errorf("Check(%q) = %v, want the defaults", doc, got)
		}
	}
}

// CONFIG-02, CONFIG-03, CONFIG-04, CONFIG-06, CONFIG-07, CONFIG-08: the defaults.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := Default()
	for _, d := range []struct {
		name      string
		got, want any
	}{
		{"nats.prefix", c.NATS.Prefix, "hg.v1"},
		{"http.addr", c.HTTP.Addr, "127.0.0.1:8484"},
		{"lead.max_turns", c.Lead.MaxTurns, 100},
		{"subagents.timeout_seconds", c.Subagents.TimeoutSeconds, 1800},
		{"subagents.max_turns", c.Subagents.MaxTurns, (*int)(nil)},
		{"subagents.max_concurrent", c.Subagents.MaxConcurrent, (*int)(nil)},
		{"subagents.max_total_per_run", c.Subagents.MaxTotalPerRun, 6},
		{"subagent_runtime", c.SubagentRuntime, SubagentRuntime{3, 64, "queue", 300, 15, 10, RuntimeLimits{}, nil}},
		{"subagent_batches", c.SubagentBatches, SubagentBatches{true, 1, 120, 5000, 100, 1000, 3, 64, 3, 100000, 2000}},
		{"executor", c.Executor, Executor{8, 60, 600, "default", "not_started", ""}},
		{"workspace", c.Workspace, Workspace{"", "local", "landlock", false, 20000, WorkspaceLimits{512, 4096, 4096, 3600}, WebFetch{}}},
		{"loop_detection", c.LoopDetection, LoopDetection{true, 3, 5, 20, 100, 30, 50, nil}},
		{"summarization.keep", c.Summarization.Keep, Threshold{"messages", 20}},
		{"summarization.trim", *c.Summarization.TrimTokensToSummarize, 4000},
		{"verification", c.Verification, Verification{true, "delegation_only"}},
		{"tool_search", c.ToolSearch, ToolSearch{false, 3}},
		{"eventsink", c.Eventsink, Eventsink{"sqlite", "", "standby", 500, 100, 0}},
		{"telemetry", c.Telemetry, Telemetry{"", 1, false, ""}},
	} {
		if !reflect.DeepEqual(d.got, d.want) {
			t.Errorf("default of %s = %v, want %v", d.name, d.got, d.want)
		}
	}
}

// CONFIG-02, CONFIG-03, CONFIG-04, CONFIG-05, CONFIG-06, CONFIG-08, CONFIG-01:
// every bound of every number, from both sides, through the file and, where
// there is a variable, through the environment.
func TestRanges(t *testing.T) {
	t.Parallel()
	for _, r := range []struct {
		path      string
		low, high float64 // high 0: none worth testing
		step      float64
	}{
		{"subagent_runtime.max_running", 1, 64, 1},
		{"subagent_runtime.max_queued", 0, 10000, 1},
		{"subagent_runtime.queue_timeout_seconds", 1, 86400, 1},
		{"subagent_runtime.lease_ttl_seconds", 3, 300, 1},
		{"subagent_runtime.limits.per_tenant", 0, 64, 1},
		{"subagent_runtime.limits.per_thread", 0, 64, 1},
		{"subagent_runtime.leader_ttl_seconds", 3, 300, 1},
		{"subagents.timeout_seconds", 1, 0, 1},
		{"subagents.max_turns", 1, 0, 1},
		{"subagents.max_total_per_run", 1, 50, 1},
		{"subagents.max_concurrent", 1, 64, 1},
		{"subagents.token_budget.max_tokens", 1000, 0, 1},
		{"subagents.token_budget.max_input_tokens", 1, 0, 1},
		{"subagents.token_budget.max_output_tokens", 1, 0, 1},
		{"subagents.token_budget.hard_stop_threshold", 0.7, 1, 0.1},
		{"subagents.token_budget.warn_threshold", 0, 1, 0.1},
		{"subagents.agents.x.timeout_seconds", 1, 0, 1},
		{"subagents.agents.x.max_turns", 1, 0, 1},
		{"subagent_batches.poll_interval_seconds", 0.1, 60, 0.05},
		{"subagent_batches.lease_seconds", 10, 3600, 1},
		{"subagent_batches.max_items_per_batch", 1, 100000, 1},
		{"subagent_batches.default_max_live_items", 3, 1000, 1},
		{"subagent_batches.max_live_items_per_batch", 100, 100000, 1},
		{"subagent_batches.default_max_running_items", 1, 64, 1},
		{"subagent_batches.max_running_items_per_batch", 3, 1000, 1},
		{"subagent_batches.max_attempts", 1, 10, 1},
		{"subagent_batches.max_result_chars", 2000, 1000000, 1},
		{"subagent_batches.result_preview_max_chars", 64, 100000, 1},
		{"executor.max_tasks", 1, 1024, 1},
		{"executor.drain_timeout_seconds", 0, 86400, 1},
		{"executor.stall_timeout_seconds", 1, 86400, 1},
		{"lead.max_turns", 1, 0, 1},
		{"loop_detection.warn_threshold", 1, 5, 1},
		{"loop_detection.hard_limit", 3, 0, 1},
		{"loop_detection.tool_freq_warn", 1, 50, 1},
		{"loop_detection.tool_freq_hard_limit", 30, 0, 1},
		{"loop_detection.window_size", 1, 0, 1},
		{"tool_search.auto_promote_top_k", 1, 5, 1},
		{"eventsink.batch_size", 1, 10000, 1},
		{"eventsink.flush_interval_ms", 1, 60000, 1},
		{"eventsink.retention_days", 0, 0, 1},
		{"telemetry.sample_ratio", 0, 1, 0.01},
		{"nats.replicas", 1, 5, 1},
		{"workspace.tool_output_max_chars", 100, 0, 1},
	} {
		t.Run(r.path, func(t *testing.T) {
			t.Parallel()
			env := "HERDGATE_" + strings.ToUpper(strings.ReplaceAll(r.path, ".", "__")) + "="
			hasEnv := slices.Contains(EnvKeys(), strings.TrimSuffix(env, "="))
			if named := strings.Contains(r.path, "agents.x"); hasEnv == named {
				t.Fatalf("has a variable: %v, want %v", hasEnv, !named)
			}
			try := func(v float64, ok bool) {
				t.Helper()
				keys := strings.Split(r.path, ".")
				doc := strings.Join(keys, ": {") + ": " + plain(v) + strings.Repeat("}", len(keys)-1)
				faults := checkFaults(t, doc)
				if (len(faults) == 0) != ok {
					t.Errorf("%s: faults %q, want none: %v", doc, faults, ok)
				}
				if !ok && (len(faults) != 1 || !strings.HasPrefix(faults[0], "h.yaml:1:") || !strings.Contains(faults[0], r.path) || !strings.Contains(faults[0], ": must ")) {
					t.Errorf("%s: faults %q, want one with place, path and rule", doc, faults)
				}
				if !hasEnv {
					return
				}
				faults = checkFaults(t, "", env+plain(v))
				if (len(faults) == 0) != ok {
					t.Errorf("%s%v: faults %q, want none: %v", env, v, faults, ok)
				}
				if !ok && (!strings.HasPrefix(faults[0], env[:len(env)-1]+": ") || !strings.Contains(faults[0], r.path)) {
					t.Errorf("%s%v: fault %q, want one that names the variable", env, v, faults[0])
				}
			}
			try(r.low, true)
			try(r.low-r.step, false)
			if r.high != 0 {
				try(r.high, true)
				try(r.high+r.step, false)
			}
		})
	}
}

// F-186: zero and negative numbers are refused with name and range; where 0
// means something, it is accepted.
func TestZeroAndNegative(t *testing.T) {
	t.Parallel()
	got := checkFaults(t, `
subagent_runtime: {max_running: -1, max_queued: -1, queue_timeout_seconds: -5, lease_ttl_seconds: 0, leader_ttl_seconds: 20.5}
subagents: {timeout_seconds: -5s, max_turns: 0, token_budget: {max_tokens: -1}}
loop_detection: {hard_limit: 0}
eventsink: {batch_size: 0, flush_interval_ms: -1}
executor: {drain_timeout_seconds: 0}
`)
	want := []string{
		`h.yaml:2:33: subagent_runtime.max_running: must be an integer (1 to 64), got -1`,
		`h.yaml:2:49: subagent_runtime.max_queued: must be an integer (0 to 10000), got -1`,
		`h.yaml:2:76: subagent_runtime.queue_timeout_seconds: must be an integer (1 to 86400), got -5`,
		`h.yaml:2:99: subagent_runtime.lease_ttl_seconds: must be an integer (3 to 300), got 0`,
		`h.yaml:2:122: subagent_runtime.leader_ttl_seconds: must be an integer (3 to 300), got 20.5`,
		`h.yaml:3:30: subagents.timeout_seconds: must be an integer (1 to 31536000), got "-5s"`,
		`h.yaml:3:46: subagents.max_turns: must be an integer (1 to 1000000) or null, got 0`,
		`h.yaml:3:76: subagents.token_budget.max_tokens: must be an integer (1000 to 1000000000000), got -1`,
		`h.yaml:4:30: loop_detection.hard_limit: must be an integer (1 to 1000000), got 0`,
		`h.yaml:5:25: eventsink.batch_size: must be an integer (1 to 10000), got 0`,
		`h.yaml:5:47: eventsink.flush_interval_ms: must be an integer (1 to 60000), got -1`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("faults:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestIntegersKeepTheirForm(t *testing.T) {
	t.Parallel()
	for value, ok := range map[string]bool{
		"3": true, "0x10": true, "1_0": true, "'3'": false, "true": false, "3.0": false, "3.5": false, "1e1": false,
		".inf": false, ".nan": false, "null": false, "~": false, "": false, "[3]": false, "{a: 3}": false, "yes": false,
		"99999999999999999999": false, "9223372036854775807": false, "2026-01-01": false,
	} {
		if faults := checkFaults(t, "subagent_runtime: {max_running: "+value+"}"); (len(faults) == 0) != ok {
			t.Errorf("max_running: %s: faults %q, want none: %v", value, faults, ok)
		}
	}
}

func TestTypes(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]string{
		"subagents: {enabled: yes}":                         `1:22: subagents.enabled: must be true or false, got "yes"`,
		"subagents: {enabled: 1}":                           `1:22: subagents.enabled: must be true or false, got 1`,
		"lead: {model: 5}":                                  `1:15: lead.model: must be a text (0 to 128 characters), got 5`,
		"lead: {model: }":                                   `1:15: lead.model: must be a text (0 to 128 characters), got null`,
		"lead: []":                                          `1:7: lead: must be a mapping, got a list of 0`,
		"models: {name: x}":                                 `1:9: models: must be a list (at most 100 elements), got a mapping`,
		"telemetry: {sample_ratio: all}":                    `1:27: telemetry.sample_ratio: must be a number (0 to 1), got "all"`,
		"telemetry: {sample_ratio: .nan}":                   `1:27: telemetry.sample_ratio: must be a number (0 to 1), got .nan`,
		"eventsink: {store: mysql}":                         `1:20: eventsink.store: must be one of sqlite, postgres, got "mysql"`,
		"subagent_runtime: {admission_policy: drop}":        `1:38: subagent_runtime.admission_policy: must be one of queue, reject, got "drop"`,
		"executor: {time_zone: Mars/Base}":                  `1:23: executor.time_zone: must be the name of a time zone, as Europe/Berlin or UTC, or empty, got "Mars/Base"`,
		"executor: {retry_lost: maybe}":                     `1:24: executor.retry_lost: must be one of not_started, never, always, got "maybe"`,
		"subagents: {agents: {x: {model: ''}}}":             `1:33: subagents.agents.x.model: must be a text (1 to 128 characters) or null, got ""`,
		"subagents: {agents: {a b: {}}}":                    `1:22: subagents.agents.a b: must be a name that matches ^[A-Za-z0-9_-]{1,64}$ (at most 128 characters), got "a b"`,
		"nats: {prefix: 'a b'}":                             `1:16: nats.prefix: must be 1 to 4 names of A-Z a-z 0-9 _ - joined by dots, got "a b"`,
		"- a":                                               `1:1: must be a mapping of sections, got a list of 1`,
		"just text":                                         `1:1: must be a mapping of sections, got "just text"`,
		"subagents: {custom_agents: {x: {description: d}}}": `1:32: subagents.custom_agents.x.system_prompt: is required and must be a text (1 to 100000 characters)`,
		"subagents: {custom_agents: {x: {description: d, system_prompt: ' '}}}": `1:64: subagents.custom_agents.x.system_prompt: must be a text (1 to 100000 characters), got " "`,
	} {
		if got := checkFaults(t, doc); len(got) != 1 || got[0] != "h.yaml:"+want {
			t.Errorf("%s:\n got %q\nwant h.yaml:%s", doc, got, want)
		}
	}
}

// A name that cannot be is told with its own place, whatever else is wrong: next to
// other faults the validator tells another one.
func TestBadNamesAmongOtherFaults(t *testing.T) {
	t.Parallel()
	const name = "must be a name that matches ^[A-Za-z0-9_-]{1,64}$ (at most 128 characters)"
	doc := "executor: {time_zone: Mars/Base, max_tasks: 0}\n" +
		"subagents: {agents: {a b: {}}, custom_agents: {a b: {description: x}, c: {description: d, system_prompt: p}}}\n" +
		"loop_detection: {tool_freq_overrides: {bash: {warn: 0, hard_limit: 2}}}\n"
	for range 20 { // the validator walks maps in any order
		got := checkFaults(t, doc)
		for _, want := range []string{
			`h.yaml:2:22: subagents.agents.a b: ` + name + `, got "a b"`,
			`h.yaml:2:48: subagents.custom_agents.a b: ` + name + `, got "a b"`,
			`h.yaml:1:23: executor.time_zone: must be the name of a time zone, as Europe/Berlin or UTC, or empty, got "Mars/Base"`,
		} {
			if !slices.Contains(got, want) {
				t.Fatalf("no fault %s among\n%s", want, strings.Join(got, "\n"))
			}
		}
		if n := strings.Count(strings.Join(got, "\n"), name); n != 2 {
			t.Fatalf("%d faults of names:\n%s", n, strings.Join(got, "\n"))
		}
	}
}

func TestUnknownKeysGetAHint(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]string{
		"subagent_runtime: {max_runing: 3}": `1:20: subagent_runtime.max_runing: is not a key of subagent_runtime; did you mean max_running?`,
		"subagent_runtim: {}":               `1:1: subagent_runtim: is not a key of the top level; did you mean subagent_runtime?`,
		"executor: {max_running: 3}":        `1:12: executor.max_running: is not a key of executor; did you mean subagent_runtime.max_running?`,
		"lead: {zzzzzz: 3}":                 `1:8: lead.zzzzzz: is not a key of lead`,
		"models: [{name: a, provider: openai, model: m, api_key: sk-live-1}]": `1:48: models[0].api_key: is not a key of models[0]; did you mean api_key_env?`,
	} {
		if got := checkFaults(t, doc); len(got) != 1 || got[0] != "h.yaml:"+want {
			t.Errorf("%s:\n got %q\nwant h.yaml:%s", doc, got, want)
		}
	}
}

// All faults come at once, cross-field ones as well, and one fault does not
// drag others with it.
func TestAllFaultsAtOnce(t *testing.T) {
	t.Parallel()
	got := checkFaults(t, `
lead: {model: nope}
models:
  - {name: main, provider: openai}
  - wrong
  - {name: main, provider: script, script: s.yaml}
loop_detection: {warn_threshold: x, hard_limit: 2}
subagent_batches:
  max_live_items_per_batch: 50
`, "HERDGATE_EXECUTOR__MAX_TASKS=0")
	want := []string{
		`h.yaml:4:28: models[0].model: is required: the provider's name of the model`,
		`h.yaml:5:5: models[1]: must be a mapping, got "wrong"`,
		`h.yaml:6:12: models[2].name: must be unique; element 0 has the same, got "main"`,
		`h.yaml:7:34: loop_detection.warn_threshold: must be an integer (1 to 1000000), got "x"`,
		`h.yaml:9:29: subagent_batches.default_max_live_items: must not exceed subagent_batches.max_live_items_per_batch (50), got 100 (the default)`,
		`HERDGATE_EXECUTOR__MAX_TASKS: executor.max_tasks: must be an integer (1 to 1024), got 0`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("faults:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// CONFIG-04, CONFIG-05, CONFIG-06, GUARD-17 and the pairs of keys.
func TestCrossFieldRules(t *testing.T) {
	t.Parallel()
	const model = "models: [{name: m, provider: openai, model: x}]\n"
	for _, c := range []struct{ doc, want string }{
		{"subagent_batches: {default_max_live_items: 200, max_live_items_per_batch: 150}", "subagent_batches.default_max_live_items: must not exceed subagent_batches.max_live_items_per_batch (150), got 200"},
		{"subagent_batches: {default_max_running_items: 20, max_running_items_per_batch: 10}", "subagent_batches.default_max_running_items: must not exceed subagent_batches.max_running_items_per_batch (10), got 20"},
		{"subagent_batches: {default_max_running_items: 20, default_max_live_items: 10}", "subagent_batches.default_max_running_items: must not exceed subagent_batches.default_max_live_items (10), got 20"},
		{"subagent_batches: {max_result_chars: 1000, result_preview_max_chars: 1001}", "result_preview_max_chars: must not exceed subagent_batches.max_result_chars (1000), got 1001"},
		{"subagents: {token_budget: {warn_threshold: 0.9, hard_stop_threshold: 0.8}}", "subagents.token_budget.hard_stop_threshold: must be at least subagents.token_budget.warn_threshold (0.9), got 0.8"},
		{"subagents: {agents: {bash: {token_budget: {hard_stop_threshold: 0.1}}}}", "subagents.agents.bash.token_budget.hard_stop_threshold: must be at least"},
		{"loop_detection: {warn_threshold: 6}", "loop_detection.hard_limit: must be at least loop_detection.warn_threshold (6), got 5 (the default)"},
		{"loop_detection: {tool_freq_warn: 60}", "loop_detection.tool_freq_hard_limit: must be at least"},
		{"loop_detection: {tool_freq_overrides: {bash: {warn: 3, hard_limit: 2}}}", "loop_detection.tool_freq_overrides.bash.hard_limit: must be at least"},
		{"nats: {tls: {cert: a}}", "nats.tls.key: is required with nats.tls.cert"},
		{"nats: {tls: {key: a}}", "nats.tls.cert: is required with nats.tls.key"},
		{"nats: {creds_file: a, nkey_seed_file: b}", "nats.nkey_seed_file: must not be set together with nats.creds_file"},
		{"nats: {url: 'nats://h:1', context: c}", "nats.context: must not be set together with nats.url"},
		{"nats: {url: 'http://h:1'}", "nats.url: must be server addresses"},
		{"nats: {url: 'h:1,,h:2'}", "nats.url: must be server addresses"},
		{"nats: {embedded: {listen: '4222'}}", "nats.embedded.listen: must be host:port"},
		{"http: {addr: '0.0.0.0:80'}", "http.addr: must be a loopback address"},
		{"http: {addr: ':80'}", "http.addr: must be a loopback address"},
		{"http: {addr: '127.0.0.1:70000'}", "http.addr: must be host:port"},
		{"http: {auth: {mode: tokens}}", "http.auth.tokens: must have at least one element"},
		{"http: {auth: {mode: tokens, tokens: [{name: a, token_env: A}, {name: a, token_env: B}]}}", "http.auth.tokens[1].name: must be unique; element 0 has the same, got \"a\""},
		{"http: {auth: {mode: tokens, tokens: [{name: a, token_env: A}, {name: b, token_env: A}]}}", "http.auth.tokens[1].token_env: must be unique"},
		{"models: [{name: inherit, provider: openai, model: x}]", "models[0].name: must not be inherit"},
		{"models: [{name: a, provider: script}]", "models[0].script: is required"},
		{"models: [{name: a, provider: anthropic, model: x, script: y}]", "models[0].script: must not be set"},
		{"models: [{name: a, provider: openai, model: x, base_url: 'ftp://x'}]", "models[0].base_url: must begin with http:// or https://"},
		{"models: [{name: a, provider: openai, model: x, base_url: 'http://u:hush@x'}]", "models[0].base_url: must not hold a user or password"},
		{"models: [{name: a, provider: openai, model: x, price: {input_per_million: 1}}]", "models[0].price.output_per_million: is required"},
		{"models: [{name: a, provider: openai, model: x, price: {input_per_million: -1, output_per_million: 1}}]", "models[0].price.input_per_million: must be a number (0 to 1000000), got -1"},
		{model + "lead: {model: n}", "lead.model: must be a name out of models (m); did you mean m?"},
		{model + "summarization: {model_name: zzz}", "summarization.model_name: must be a name out of models (m), got \"zzz\""},
		{model + "subagents: {agents: {bash: {model: zzz}}}", "subagents.agents.bash.model: must be a name out of models (m) or inherit"},
		{model + "subagents: {custom_agents: {x: {description: d, system_prompt: p, model: zzz}}}", "subagents.custom_agents.x.model: must be a name out of models (m) or inherit"},
		{"summarization: {keep: {type: fraction, value: 2}}", "summarization.keep.value: must be a number above 0 and at most 1 while type is fraction, got 2"},
		{"summarization: {trigger: [{type: tokens, value: 0.5}]}", "summarization.trigger[0].value: must be a whole number (at least 1) while type is tokens, got 0.5"},
		{"summarization: {trigger: {type: words, value: 5}}", "summarization.trigger[0].type: must be one of tokens, messages, fraction, got \"words\""},
		{"executor: {pool: big}", "executor.pool: must be a name out of subagent_runtime.pools, or default, got \"big\""},
		{"subagent_runtime: {pools: {big: {max_running: 2}}}\nexecutor: {pool: bug}", "executor.pool: must be a name out of subagent_runtime.pools, or default; did you mean big?, got \"bug\""},
		{"subagents: {agents: {bash: {pool: big}}}", "subagents.agents.bash.pool: must be a name out of subagent_runtime.pools"},
		{"subagents: {custom_agents: {x: {description: d, system_prompt: p, pool: big}}}", "subagents.custom_agents.x.pool: must be a name out of subagent_runtime.pools"},
		{"subagent_runtime: {pools: {default: {max_running: 2}}}", "subagent_runtime.pools.default: must have another name"},
		{"subagent_runtime: {pools: {big: {}}}", "subagent_runtime.pools.big.max_running: is required"},
		{"subagent_runtime: {pools: {big: {max_running: 65}}}", "subagent_runtime.pools.big.max_running: must be an integer (1 to 64), got 65"},
		{"subagent_runtime: {pools: {a.b: {max_running: 2}}}", "subagent_runtime.pools.a.b: must be a name that matches"},
		{"subagent_runtime: {limits: {per_type: {bash: 0}}}", "subagent_runtime.limits.per_type.bash: must be 1 to 64, got 0"},
		{"subagent_runtime: {pools: {big: {max_running: 2, limits: {per_type: {bash: 65}}}}}", "subagent_runtime.pools.big.limits.per_type.bash: must be 1 to 64, got 65"},
		{"mcp: {servers: {a: {}}}", "mcp.servers.a: must have a command or a url"},
		{"mcp: {servers: {a: {command: x, url: 'http://h'}}}", "mcp.servers.a: must not have both"},
		{"mcp: {servers: {a: {command: x, headers: {A: b}}}}", "mcp.servers.a.headers: must not be set with command"},
		{"mcp: {servers: {a: {url: 'http://h', args: [b]}}}", "mcp.servers.a.args: must not be set with url"},
		{"mcp: {servers: {a: {url: 'http://h', env: {B: b}}}}", "mcp.servers.a.env: must not be set with url"},
		{"mcp: {servers: {a: {url: 'http://h', transport: stdio}}}", "mcp.servers.a.transport: must be http or sse"},
		{"mcp: {servers: {a: {command: x, transport: http}}}", "mcp.servers.a.transport: must be stdio"},
		{"mcp: {servers: {" + strings.Repeat("a", 41) + ": {command: x}}}", "must have a name of at most 40 characters"},
		{"mcp: {servers: {a__b: {command: x}}}", "mcp.servers.a__b: must be a name that matches"},
		{"eventsink: {store: postgres}", "eventsink.dsn: is required"},
		{"eventsink: {dsn: 'postgres://h/d'}", "eventsink.dsn: must be a file"},
		{"eventsink: {replicas: share}", "eventsink.replicas: must be standby while eventsink.store is sqlite"},
		{"eventsink: {replicas: both}", "eventsink.replicas: "},
		{"telemetry: {otlp_endpoint: 'grpc://h:1'}", "telemetry.otlp_endpoint: must be host:port"},
		{"telemetry: {otlp_endpoint: 'http://u:hush@h:1'}", "telemetry.otlp_endpoint: must not hold a user"},
		{"telemetry: {metrics_addr: here}", "telemetry.metrics_addr: must be host:port"},
	} {
		got := checkFaults(t, c.doc)
		if len(got) != 1 || !strings.Contains(got[0], ": "+c.want) && !strings.Contains(got[0], c.want) || !strings.HasPrefix(got[0], "h.yaml:") {
			t.Errorf("%s:\n got %q\nwant %s", c.doc, got, c.want)
		}
		if strings.Contains(strings.Join(got, ""), "hush") {
			t.Errorf("%s: fault shows the password: %q", c.doc, got)
		}
	}
	if got := checkFaults(t, "eventsink: {store: postgres}", "PGHOST=db"); len(got) != 0 {
		t.Errorf("postgres with PGHOST: faults %q, want none", got)
	}
}

// REG-05, F-188: missing, null and empty lists of a sub-agent type.
func TestListsOfTypes(t *testing.T) {
	t.Parallel()
	agent := func(keys string) (CustomAgent, []string) {
		doc := "subagents: {custom_agents: {x: {description: d, system_prompt: p" + keys + "}}}"
		cfg, faults := Check("h.yaml", []byte(doc), nil)
		var out []string
		for _, f := range faults {
			out = append(out, f.String())
		}
		return cfg.Subagents.CustomAgents["x"], out
	}
	want := CustomAgent{
		Description: "d", SystemPrompt: "p", DisallowedTools: DefaultDenials(),
		Model: "inherit", MaxTurns: 50, TimeoutSeconds: 900, Pool: "default",
	}
	if got, faults := agent(""); len(faults) > 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("missing: %+v %q, want %+v", got, faults, want)
	}
	if got, faults := agent(", tools: , disallowed_tools: , skills: ~"); len(faults) > 0 ||
		got.Tools != nil || got.Skills != nil || got.DisallowedTools == nil || len(got.DisallowedTools) != 0 {
		t.Errorf("null: %+v %q, want tools and skills nil, no denials", got, faults)
	}
	if got, faults := agent(", tools: [], disallowed_tools: [], skills: []"); len(faults) > 0 ||
		got.Tools == nil || len(got.Tools) != 0 || got.Skills == nil || len(got.Skills) != 0 || got.DisallowedTools == nil || len(got.DisallowedTools) != 0 {
		t.Errorf("empty: %+v %q, want three lists that are empty and not nil", got, faults)
	}
	for keys, want := range map[string]string{
		", tools: [null]":             "tools[0]: must be a name, got null",
		", tools: ['']":               `tools[0]: must be a name, got ""`,
		", tools: [' ']":              `tools[0]: must be a name, got " "`,
		", tools: bash":               `tools: must be a list (at most 1000 elements), got "bash"`,
		", tools: [[bash]]":           "tools[0]: must be a name, got a list of 1",
		", tools: [no_such_tool]":     "tools[0]: must be a tool (bash, read_file",
		", tools: [bsh]":              "did you mean bash?",
		", tools: [gh__issues]":       "there is none called gh",
		", disallowed_tools: [bsah]":  "did you mean bash?",
		", skills: [null]":            "skills[0]: must be a name, got null",
		", skills: ['']":              `skills[0]: must be a name, got ""`,
		", mcp_servers: []":           "mcp_servers: is not a key of",
		", max_turns: 0":              "max_turns: must be an integer (1 to",
		", timeout_seconds: 0":        "timeout_seconds: must be an integer (1 to",
		", model: ''":                 "model: must be a text",
		", tools: [bash, 5, no_such]": "tools[1]: must be a name, got 5",
	} {
		if _, faults := agent(keys); len(faults) != 1 || !strings.Contains(faults[0], want) {
			t.Errorf("%s: faults %q, want one with %s", keys, faults, want)
		}
	}
}

// REG-10: a null override leaves the definition, an empty list means none.
func TestOverrideSkills(t *testing.T) {
	t.Parallel()
	cfg := mustCheck(t, "subagents: {agents: {a: {skills: null}, b: {skills: []}, c: {}}}")
	a := cfg.Subagents.Agents
	if a["a"].Skills != nil || a["c"].Skills != nil || a["b"].Skills == nil {
		t.Errorf("skills: null %v, missing %v, [] %v; want nil, nil, empty", a["a"].Skills, a["c"].Skills, a["b"].Skills)
	}
}

// REG-11: config types keep the order of the file.
func TestCustomAgentOrder(t *testing.T) {
	t.Parallel()
	cfg := readFull(t)
	var names []string
	for _, a := range cfg.Subagents.CustomAgentList() {
		names = append(names, a.Name+"="+a.Description)
	}
	if got := strings.Join(names, " "); got != "zeta=Z alpha=A mid=M" {
		t.Errorf("order %s, want that of the file", got)
	}
}

// CONFIG-05, CONFIG-10, GUARD-01, GUARD-16: which budget counts, and that a
// budget equal to the default still counts as set by the user.
func TestTokenBudget(t *testing.T) {
	t.Parallel()
	const on = "summarization: {enabled: true}\n"
	def := TokenBudget{Enabled: true, MaxTokens: 2_000_000, WarnThreshold: 0.7, HardStopThreshold: 1}
	half := def
	half.MaxTokens = 1_000_000
	set := def
	set.MaxTokens, set.WarnThreshold = 500_000, 0.8
	off := half
	off.Enabled = false
	for _, c := range []struct {
		doc, typ string
		want     TokenBudget
	}{
		{"", "bash", def},
		{on, "bash", half},
		{"subagents: {token_budget: null}", "bash", def},
		{on + "subagents: {token_budget: {max_tokens: 2000000}}", "bash", def},
		{on + "subagents: {token_budget: {max_tokens: 500000, warn_threshold: 0.8}}", "bash", set},
		{"subagents: {token_budget: {max_tokens: 500000, warn_threshold: 0.8}}", "bash", set},
		{on + "subagents: {token_budget: {enabled: false}}", "bash", off},
		{"subagents: {agents: {bash: {token_budget: {max_tokens: 500000, warn_threshold: 0.8}}}}", "bash", set},
		{"subagents: {agents: {bash: {token_budget: {max_tokens: 500000}}}}", "general-purpose", def},
	} {
		if got := mustCheck(t, c.doc).TokenBudget(c.typ); got != c.want {
			t.Errorf("%q: budget of %s = %+v, want %+v", c.doc, c.typ, got, c.want)
		}
	}
}

func readFull(t *testing.T) Config {
	t.Helper()
	data, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg, faults := Check("/etc/herdgate/herdgate.yaml", data, nil)
	for _, f := range faults {
		t.Errorf("fault: %s", f)
	}
	return cfg
}

// Every key of the documented file is read: no field may keep its default.
func TestFullFile(t *testing.T) {
	t.Parallel()
	cfg := readFull(t)
	untouched := map[string]bool{
		".NATS.Context": true, ".NATS.NKeySeed": true, ".NATS.Embedded.StoreDir": true,
		".LoopDetection.MaxTrackedThreads": true, ".Summarization.SkillFileReadTools": true,
	}
	var compare func(path string, a, b reflect.Value)
	compare = func(path string, a, b reflect.Value) {
		if a.Kind() == reflect.Struct {
			for i := range a.NumField() {
				compare(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
			}
			return
		}
		if same := reflect.DeepEqual(a.Interface(), b.Interface()); same != untouched[path] {
			t.Errorf("%s = %v, default %v; want it read: %v", path, a, b, !untouched[path])
		}
	}
	compare("", reflect.ValueOf(cfg), reflect.ValueOf(Default()))
	if m := cfg.Models[1]; m.RequestTimeoutSeconds != 600 || m.IdleTimeoutSeconds != 60 || m.MaxRetries != 3 {
		t.Errorf("second model %+v, want the defaults of a model", m)
	}
	if m := cfg.Models[0]; m.RequestTimeoutSeconds != 100 || m.MaxRetries != 0 || m.Price.OutputPerMillion != 10 {
		t.Errorf("first model %+v, want the values of the file", m)
	}
	if tok := cfg.HTTP.Auth.Tokens[1]; tok.Tenant != "default" {
		t.Errorf("token without a tenant has %q, want default", tok.Tenant)
	}
	if got := cfg.Summarization.Trigger; len(got) != 1 || got[0] != (Threshold{"fraction", 0.8}) {
		t.Errorf("a lone trigger gives %v, want a list of it", got)
	}
	if s := cfg.MCP.Servers; !s["github"].Enabled || s["web"].Enabled {
		t.Errorf("servers enabled: github %v, web %v; want true, false", s["github"].Enabled, s["web"].Enabled)
	}
}

func TestRelativePaths(t *testing.T) {
	t.Parallel()
	cfg := readFull(t)
	for got, want := range map[string]string{
		cfg.NATS.CredsFile:                      "/etc/herdgate/secrets/lead.creds",
		cfg.NATS.TLS.Key:                        "/abs/key.pem",
		cfg.NATS.Embedded.StoreDir:              "",
		cfg.Models[2].Script:                    "/etc/herdgate/scripts/offline.yaml",
		cfg.Lead.SystemPromptFile:               "/etc/herdgate/prompts/lead.md",
		cfg.Subagents.Paths[0]:                  "/etc/herdgate/agents",
		cfg.Subagents.Paths[1]:                  "/abs/agents",
		cfg.Workspace.Root:                      "/etc/herdgate/ws",
		cfg.Skills.Paths[0]:                     "/etc/herdgate/skills",
		cfg.MCP.Servers["github"].Command:       "/etc/herdgate/bin/github-mcp",
		string(cfg.MCP.Servers["web"].URL):      "https://mcp.example/sse",
		cfg.MCP.Servers["github"].Args[0]:       "stdio",
		cfg.Subagents.CustomAgents["mid"].Model: "inherit",
	} {
		if got != want {
			t.Errorf("path %q, want %q", got, want)
		}
	}
	// A value of the environment is meant from where the program runs.
	if cfg := mustCheck(t, "", "HERDGATE_WORKSPACE__ROOT=ws"); cfg.Workspace.Root != "ws" {
		t.Errorf("workspace.root from the environment = %q, want ws", cfg.Workspace.Root)
	}
	cfg, _ = Check("conf/h.yaml", []byte("mcp: {servers: {a: {command: npx}, b: {command: ./b}}}\nworkspace: {root: w}"), nil)
	if a, b := cfg.MCP.Servers["a"].Command, cfg.MCP.Servers["b"].Command; a != "npx" || b != "./conf/b" || cfg.Workspace.Root != "./conf/w" {
		t.Errorf("commands %q and %q, root %q; want npx, ./conf/b, ./conf/w", a, b, cfg.Workspace.Root)
	}
}

// CONFIG-01: default < file < environment.
func TestPrecedence(t *testing.T) {
	t.Parallel()
	const doc = "subagent_runtime: {max_running: 4, max_queued: 5}"
	cfg := mustCheck(t, doc, "HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING=6", "HERDGATE_LEAD__MODEL=x", "OTHER=1",
		"HERDGATE_SUBAGENTS__MAX_TURNS=7", "HERDGATE_TELEMETRY__SAMPLE_RATIO=0.25", "HERDGATE_SUBAGENTS__ENABLED=false",
		"HERDGATE_SUBAGENTS__TOKEN_BUDGET__MAX_TOKENS=5000", "HERDGATE_NATS__CONTEXT=2026")
	r := cfg.SubagentRuntime
	if r.MaxRunning != 6 || r.MaxQueued != 5 || r.QueueTimeoutSeconds != 300 {
		t.Errorf("runtime %+v, want max_running 6 (env), max_queued 5 (file), queue_timeout_seconds 300 (default)", r)
	}
	if cfg.Lead.Model != "x" || *cfg.Subagents.MaxTurns != 7 || cfg.Telemetry.SampleRatio != 0.25 || cfg.Subagents.Enabled ||
		cfg.Subagents.TokenBudget.MaxTokens != 5000 || !cfg.Subagents.TokenBudget.Enabled || cfg.NATS.Context != "2026" {
		t.Errorf("values of the environment: %+v", cfg)
	}
	cfg = mustCheck(t, "subagents: {max_turns: 7}\nlead:\n", "HERDGATE_SUBAGENTS__MAX_TURNS=null", "HERDGATE_LEAD__MAX_TURNS= 9 ")
	if cfg.Subagents.MaxTurns != nil || cfg.Lead.MaxTurns != 9 {
		t.Errorf("max_turns %v and %d, want nil and 9", cfg.Subagents.MaxTurns, cfg.Lead.MaxTurns)
	}
}

func TestEnvironmentFaults(t *testing.T) {
	t.Parallel()
	for env, want := range map[string]string{
		"HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING=":     `HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING: subagent_runtime.max_running: must be an integer (1 to 64), got ""`,
		"HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING=true": `HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING: subagent_runtime.max_running: must be an integer (1 to 64), got true`,
		"HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING=[3]":  `HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING: subagent_runtime.max_running: must be an integer (1 to 64), got "[3]"`,
		"HERDGATE_SUBAGENT_RUNTIME__MAX_RUNING=3":     `HERDGATE_SUBAGENT_RUNTIME__MAX_RUNING: must be the variable of a configuration key; there is no key of that name; did you mean HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING?`,
		"HERDGATE_MODELS=x":                           `HERDGATE_MODELS: must be set in the file: models is a list`,
		"HERDGATE_SUBAGENTS__AGENTS__BASH__MODEL=x":   `HERDGATE_SUBAGENTS__AGENTS__BASH__MODEL: must be set in the file: subagents.agents holds names of your own`,
		"HERDGATE_LEAD=x":                             `HERDGATE_LEAD: must name a key: lead is a section`,
		"HERDGATE_HTTP__ADDR=0.0.0.0:1":               `HERDGATE_HTTP__ADDR: http.addr: must be a loopback address (127.0.0.1, [::1] or localhost) while http.auth.mode is none, got "0.0.0.0:1"`,
		"HERDGATE_EVENTSINK__STORE=postgres":          `HERDGATE_EVENTSINK__STORE: eventsink.dsn: is required while eventsink.store is postgres, unless PGHOST is set`,
		"HERDGATE_EVENTSINK__DSN=postgres://u:hush@h": `HERDGATE_EVENTSINK__DSN: eventsink.dsn: must be a file while eventsink.store is sqlite, got "postgres://(hidden)@h"`,
	} {
		got := checkFaults(t, "", env)
		if len(got) == 0 || !strings.HasPrefix(got[0], strings.SplitN(want, "; did", 2)[0]) || len(got) > 1 {
			t.Errorf("%s:\n got %q\nwant %s", env, got, want)
		}
	}
}

func TestVariablesThatAreNotSettings(t *testing.T) {
	t.Parallel()
	mustCheck(t, `
models: [{name: a, provider: openai, model: m, api_key_env: HERDGATE_MODEL_KEY}]
http: {auth: {mode: tokens, tokens: [{name: a, token_env: HERDGATE_ALICE}]}}
mcp: {servers: {a: {command: x, env: {K: $HERDGATE_GH}}}}
`,
		"HERDGATE_VECTORS=/x", "HERDGATE_TEST_ANYTHING=1", "HERDGATE_MODEL_KEY=k", "HERDGATE_ALICE=t", "HERDGATE_GH=g",
		// What Kubernetes sets for a service called herdgate-lead.
		"HERDGATE_LEAD_SERVICE_HOST=10.0.0.1", "HERDGATE_LEAD_SERVICE_PORT=80", "HERDGATE_LEAD_SERVICE_PORT_HTTP=80",
		"HERDGATE_LEAD_PORT=tcp://10.0.0.1:80", "HERDGATE_LEAD_PORT_80_TCP=tcp://10.0.0.1:80", "HERDGATE_LEAD_PORT_80_TCP_ADDR=10.0.0.1",
		"HERDGATE_PORT=tcp://10.0.0.1:80")
}

func TestForm(t *testing.T) {
	t.Parallel()
	bomb := "subagents:\n  paths: &a0 [x]\n"
	var b strings.Builder
	b.WriteString("skills:\n  paths:\n    - &b0 [x, x, x, x, x, x, x, x, x, x]\n")
	for i := range 10 {
		ref := fmt.Sprintf("*b%d", i)
		fmt.Fprintf(&b, "    - &b%d [%s]\n", i+1, strings.TrimSuffix(strings.Repeat(ref+", ", 10), ", "))
	}
	for name, c := range map[string]struct{ doc, want string }{
		"duplicate":       {"lead: {max_turns: 1, max_turns: 2}", "h.yaml:1:22: lead.max_turns: must be given once; it stands in line 1 already"},
		"duplicate top":   {"lead: {}\nlead: {}", "h.yaml:2:1: lead: must be given once; it stands in line 1 already"},
		"two documents":   {"lead: {}\n---\nlead: {}\n", "must hold one document"},
		"syntax":          {"lead: {\n", "must be YAML: "},
		"tabs":            {"lead:\n\tmax_turns: 1\n", "must be YAML: "},
		"bomb":            {b.String(), "must have at most 10000 values"},
		"self":            {"lead: &a {model: *a}", "must not refer to itself"},
		"tag":             {"lead: {model: !secret x}", "h.yaml:1:15: lead.model: must not have a tag, got !secret"},
		"binary":          {"lead: {model: !!binary eA==}", "must not have a tag"},
		"key":             {"{[a]: b}", "must have plain keys"},
		"deep":            {"lead: " + strings.Repeat("[", 100) + strings.Repeat("]", 100), "must not be nested deeper than 32 levels"},
		"deep for parser": {strings.Repeat("[", 100_000), "must not be nested deeper than 32 levels"},
		"utf-8":           {"lead:\n  model: \xff\n", "h.yaml:2:1: must be UTF-8 text"},
		"large":           {"#" + strings.Repeat("x", MaxFileBytes), "must have at most 1048576 bytes"},
	} {
		got := checkFaults(t, c.doc)
		if !slices.ContainsFunc(got, func(f string) bool { return strings.Contains(f, c.want) }) || len(got) > 60 {
			t.Errorf("%s: faults %q, want one with %s", name, got, c.want)
		}
	}
	// Aliases and merge keys as such are fine.
	cfg := mustCheck(t, bomb+"skills: {paths: *a0}\nmodels:\n  - &m {name: a, provider: openai, model: m, max_retries: 7}\n  - {<<: *m, name: b}\n  - {<<: [*m, {name: z}], name: c}\n")
	if cfg.Skills.Paths[0] != "./x" || cfg.Models[1].Name != "b" || cfg.Models[1].MaxRetries != 7 || cfg.Models[2].Name != "c" {
		t.Errorf("aliases: %+v", cfg.Models)
	}
	// A file that is something else altogether does not flood the terminal.
	var junk strings.Builder
	for i := range 500 {
		fmt.Fprintf(&junk, "key%d: 1\n", i)
	}
	if got := checkFaults(t, junk.String()); len(got) != maxFaults+1 || !strings.Contains(got[maxFaults], "at least 400 more faults") {
		t.Errorf("%d faults, want %d and a last line with the number of the others", len(got), maxFaults)
	}
}

// Whatever a file holds, it is judged in a moment.
func TestLargeFilesAreJudgedQuickly(t *testing.T) {
	t.Parallel()
	fill := func(head, line string) string {
		var b strings.Builder
		b.WriteString(head)
		for i := 0; b.Len() < MaxFileBytes/2; i++ {
			fmt.Fprintf(&b, line, i)
		}
		return b.String()
	}
	for name, doc := range map[string]string{
		"unknown keys": fill("", "a%d:\n"),
		"agents":       fill("subagents:\n  custom_agents:\n", "    a%d: {tools: [x]}\n"),
		"few agents":   fill("subagents:\n  custom_agents:\n", "    a%d: {tools: [x]}\n")[:50_003],
	} {
		began := time.Now()
		faults := checkFaults(t, doc)
		// Generous: without the bounds it is minutes.
		if took := time.Since(began); len(faults) == 0 || took > 30*time.Second {
			t.Errorf("%s: %d faults after %s, want some at once", name, len(faults), took)
		}
	}
}

// No secret gets out through any text form of a configuration or a fault.
func TestNothingSecretIsShown(t *testing.T) {
	t.Parallel()
	cfg := readFull(t)
	asJSON, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	forms := map[string]string{
		"String": cfg.String(), "json": string(asJSON), "%v": fmt.Sprintf("%v", cfg), "%+v": fmt.Sprintf("%+v", cfg), "%#v": fmt.Sprintf("%#v", cfg),
	}
	for name, text := range forms {
		if strings.Contains(text, "pw-") {
			t.Errorf("%s shows a secret: %s", name, text)
		}
		for _, want := range []string{"nats.example:4222", "db/herdgate", "$GH"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s lacks %s", name, want)
			}
		}
	}
	if got := cfg.Eventsink.DSN.Reveal(); !strings.Contains(got, "pw-dsn") {
		t.Errorf("Reveal() = %q, want the whole address", got)
	}
	for _, doc := range []string{
		"models: [{name: a, provider: openai, model: m, api_key_env: 'sk-pw-1 x'}]",
		"models: [{name: a, provider: openai, model: m, api_key: sk-pw-1}]",
		"mcp: {servers: {a: {command: x, env: {K: [pw-1]}}}}",
		"mcp: {servers: {a: {url: 'http://x', headers: {K: 5pw-1, 'b c': pw-2}}}}",
		"mcp: {servers: {a: {url: 'ftp://u:pw-1@x?key=pw-2'}}}",
		"eventsink: {store: 'postgres://u:pw-1@h', dsn: [a]}",
		"nats: {url: 'http://u:pw-1@h:1,nats://v:pw-2@h'}",
		"http: {auth: {mode: tokens, tokens: [{name: a, token_env: pw-1-secret}]}}",
	} {
		if got := strings.Join(checkFaults(t, doc), "\n"); strings.Contains(got, "pw-") {
			t.Errorf("%s: faults show a secret: %s", doc, got)
		}
	}
}

func TestAddressText(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                                "",
		"events.db":                       "events.db",
		"nats://h:4222":                   "nats://h:4222",
		"nats://u:p@h:1,nats://v:p,q@h:2": "nats://(hidden)@h:1,nats://(hidden)@h:2",
		"u:p@h:1":                         "(hidden)@h:1",
		"postgres://u:p@@h/d?sslmode=require&password=x": "postgres://(hidden)@h/d?sslmode=require&password=(hidden)",
		"host=h user=u password=p dbname=d":              "host=h user=u password=(hidden) dbname=d",
		"host=h password='p q' dbname=d":                 "host=h password=(hidden) dbname=d",
	} {
		if got := Address(in).String(); got != want {
			t.Errorf("Address(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestSecretResolve(t *testing.T) {
	t.Parallel()
	lookup := func(name string) (string, bool) { return "v-" + name, name == "SET" }
	for in, want := range map[Secret]string{"$SET": "v-SET", "plain": "plain", "$$SET": "$SET", "a$SET": "a$SET", "": ""} {
		if got, err := in.Resolve(lookup); err != nil || got != want {
			t.Errorf("Resolve(%q) = %q, %v; want %q", string(in), got, err, want)
		}
	}
	if _, err := Secret("$UNSET").Resolve(lookup); err == nil || !strings.Contains(err.Error(), "UNSET") {
		t.Errorf("Resolve($UNSET) = %v, want an error that names it", err)
	}
}

// The published schema is valid, documents every key, accepts what Check
// accepts and refuses what it refuses.
func TestSchema(t *testing.T) {
	t.Parallel()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(Schema())))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("s.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("s.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text string) error {
		var v any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			t.Fatal(err)
		}
		return s.Validate(v)
	}
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"{}", Default().String(), string(full), "lead: null\nmodels: null\nsubagents: {agents: null, max_turns: null}"} {
		if err := validate(text); err != nil {
			t.Errorf("schema refuses %.60s…: %v", text, err)
		}
	}
	for _, text := range []string{"lead: {max_turns: 0}", "x: 1", "lead: {max_turns: null}", "subagents: {agents: {a b: {}}}", "summarization: {trigger: 5}"} {
		if validate(text) == nil {
			t.Errorf("schema accepts %s", text)
		}
	}
	var walk func(path string, s schema)
	walk = func(path string, s schema) {
		for key := range s {
			if strings.HasPrefix(key, "x-") {
				t.Errorf("%s: published schema has %s", path, key)
			}
		}
		for name, p := range s.properties() {
			if p["description"] == nil || p["description"] == "" {
				t.Errorf("%s.%s has no description", path, name)
			}
			walk(path+"."+name, p)
		}
		for _, k := range []string{"items", "additionalProperties"} {
			if sub, ok := s[k].(map[string]any); ok {
				walk(path+"[]", sub)
			}
		}
	}
	var root map[string]any
	if err := json.Unmarshal(Schema(), &root); err != nil {
		t.Fatal(err)
	}
	walk("", root)
	running, _ := schema(root).property("subagent_runtime")
	if p, _ := running.property("max_running"); p["default"] != 3.0 || p["minimum"] != 1.0 || p["maximum"] != 64.0 {
		t.Errorf("schema of max_running = %v, want default 3, 1 to 64", p)
	}
}

// What String writes can be read back, apart from secrets.
func TestStringIsReadable(t *testing.T) {
	t.Parallel()
	cfg := mustCheck(t, "subagents: {custom_agents: {x: {description: d, system_prompt: p}, y: {description: d, system_prompt: p, tools: [], skills: [a]}}}")
	if got := mustCheck(t, cfg.String()); !reflect.DeepEqual(mustCheck(t, got.String()), got) || got.Subagents.CustomAgents["x"].Tools != nil || got.Subagents.CustomAgents["y"].Tools == nil {
		t.Errorf("read back: %+v", got.Subagents)
	}
}

// F-190: values that have less effect than they seem to are told.
func TestNotes(t *testing.T) {
	t.Parallel()
	cfg := mustCheck(t, "subagents: {max_concurrent: 10}\nexecutor: {max_tasks: 2}\nhttp: {auth: {tokens: [{name: a, token_env: A}]}}")
	notes := strings.Join(cfg.Notes(), "\n")
	for _, want := range []string{"subagents.max_concurrent is 10, but 3 is in effect", "http.auth.tokens are not used"} {
		if !strings.Contains(notes, want) {
			t.Errorf("notes %q lack %q", notes, want)
		}
	}
	if strings.Contains(notes, "executor") {
		t.Errorf("notes %q, want none about the executor", notes)
	}
	if got := checkFaults(t, "subagents: {max_concurrent: 100}"); len(got) != 1 || !strings.Contains(got[0], "(1 to 64)") {
		t.Errorf("max_concurrent 100: %q, want a fault with the range", got)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if cfg, err := Load(Options{}); err != nil || !reflect.DeepEqual(cfg, Default()) {
		t.Errorf("Load without a file = %v, want the defaults", err)
	}
	if _, err := Load(Options{File: "nope.yaml", FileExplicit: true}); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "nope.yaml") {
		t.Errorf("Load of a named file that is not there: %v, want ErrNotExist with its name", err)
	}
	if _, err := Load(Options{File: dir, FileExplicit: true}); err == nil || !strings.Contains(err.Error(), "is a folder") {
		t.Errorf("Load of a folder: %v", err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("herdgate.yaml", "lead: {max_turns: 7}")
	if cfg, err := Load(Options{Env: []string{"HERDGATE_LEAD__MODEL=x"}}); err != nil || cfg.Lead.MaxTurns != 7 || cfg.Lead.Model != "x" {
		t.Errorf("Load of the default file = %+v, %v", cfg.Lead, err)
	}
	write("bad.yaml", "lead: {max_turns: 0}\nx: 1\n")
	_, err := Load(Options{File: "bad.yaml"})
	var e *Error
	if !errors.As(err, &e) || len(e.Faults) != 2 || err.Error() != `config: 2 faults:
  bad.yaml:1:19: lead.max_turns: must be an integer (1 to 1000000), got 0
  bad.yaml:2:1: x: is not a key of the top level` {
		t.Errorf("Load of a bad file: %v", err)
	}
	write("huge.yaml", strings.Repeat("#\n", MaxFileBytes))
	if _, err := Load(Options{File: "huge.yaml"}); err == nil || !strings.Contains(err.Error(), "1048576") {
		t.Errorf("Load of a huge file: %v", err)
	}
}

func FuzzCheck(f *testing.F) {
	full, err := os.ReadFile("testdata/full.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full, "")
	for _, doc := range []string{"", "a: &a [*a]", "lead: {<<: *x}", "{? [a] : b}", "lead: !!int x", "- - -", "models: [{<<: [1]}]", "a: b: c", "summarization: {trigger: {type: x}}", "subagents: {custom_agents: {x: }}"} {
		f.Add([]byte(doc), "HERDGATE_LEAD__MAX_TURNS=3")
	}
	f.Fuzz(func(t *testing.T, data []byte, env string) {
		cfg, faults := Check("h.yaml", data, []string{env})
		for _, fault := range faults {
			if fault.Rule == "" || strings.Contains(fault.Rule, "something else") || strings.Contains(fault.Rule, "cannot unmarshal") {
				t.Errorf("fault %+v of %q does not say what is wrong", fault, data)
			}
		}
		if len(faults) > 0 {
			return
		}
		// What was accepted is in range.
		if n := cfg.SubagentRuntime.MaxRunning; n < 1 || n > 64 {
			t.Errorf("max_running %d accepted from %q", n, data)
		}
		_ = cfg.String()
	})
}
