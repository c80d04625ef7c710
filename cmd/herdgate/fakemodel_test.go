package main

import (
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A lead and a sub-agent whose providers speak different protocols, over the
// network, with faults on the way; nothing that they send is refused.
func TestFakeModel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "rules.yaml"), `
rules:
  - agent: lead
    match: look around
    turns:
      - {text: x, fault: disconnect_mid_stream}
      - reasoning: Somebody should look.
        tool_calls: [{name: task, args: {description: look, subagent_type: looker, prompt: look there}}]
        usage: {input_tokens: 100, output_tokens: 10, cache_read_tokens: 40}
      - {text: "It says: {{.LastToolResult}}", usage: {input_tokens: 200, output_tokens: 20}}
  - agent: lead
    match: give up
    turns: [{fault: overloaded}, {fault: overloaded}, {fault: overloaded}]
  - agent: looker
    match: look there
    turns:
      - {fault: rate_limit, retry_after: "0"}
      - reasoning: What is there?
        tool_calls: [{name: ls, args: {path: .}}, {name: no_such_tool, args: {}}]
        usage: {input_tokens: 7, output_tokens: 3}
      - {text: x, fault: error_in_stream}
      - {text: nothing there, usage: {input_tokens: 9, output_tokens: 2}}
`)
	fake := start(t, dir, nil, "fake-model", "--script", "rules.yaml")
	base := fake.saw(&fake.stdout, `serving rules.yaml at (http://127\.0\.0\.1:\d+/v1)`)[1]
	writeFile(t, filepath.Join(dir, "herdgate.yaml"), fmt.Sprintf(`
models:
  - {name: one, provider: openai, model: fake-openai, base_url: %q, max_retries: 2, price: {input_per_million: 10000, output_per_million: 50000, cached_input_per_million: 1000}}
  - {name: two, provider: anthropic, model: fake-anthropic, base_url: %q, max_retries: 2, max_output_tokens: 2000, price: {input_per_million: 10, output_per_million: 20}}
  - {name: small, provider: openai, model: fake-small, base_url: %q, max_input_tokens: 50}
subagents:
  custom_agents:
    looker: {description: looks, system_prompt: Look., model: two}
`, base, base, base))
	p, server := up(t, dir, nil)
	r := herdgate(t, dir, nil, "run", "look around", "--server", server).want(t, 0)
	contains(t, "stdout", r.stdout, "It says:", "nothing there")
	// What it cost: 16 in and 5 out at the price of the one model; 260 in, 40 of them
	// cached, and 30 out at that of the other.
	matches(t, "stderr", r.stderr, `^task 1 +started +looker, fake-anthropic$`, `^task 1 +completed .* 21 tokens, \$0\.0003$`, `^run +completed .* 351 tokens, \$4\.14$`)
	run := regexp.MustCompile(`r_[a-z0-9]+`).FindString(r.stderr)
	shown := herdgate(t, dir, nil, "runs", "show", run, "--server", server).want(t, 0).stdout
	matches(t, "stdout", shown, `^tokens +351 \(316 in, of them 40 cached, 35 out\)$`, `^cost +\$4\.14$`)
	task := regexp.MustCompile(`t_[a-z0-9]+`).FindString(shown)
	matches(t, "stdout", herdgate(t, dir, nil, "tasks", "show", task, "--server", server).want(t, 0).stdout, `^cost +\$0\.0003$`)
	contains(t, "stdout", herdgate(t, dir, nil, "tasks", "show", task, "--server", server, "--output", "json").want(t, 0).stdout, `"cost_usd": 0.00026`)
	matches(t, "stdout", herdgate(t, dir, nil, "doctor", "--server", server).want(t, 0).stdout, `^ok +model one +fake-openai at .* is there`, `^ok +model two +fake-anthropic at .* is there`)
	// max_input_tokens: what is clearly too large for a model is not sent to it.
	r = herdgate(t, dir, nil, "run", "look around", "--model", "small", "--server", server).want(t, 1)
	contains(t, "stderr", r.stderr, `model "small" reads 50 (max_input_tokens)`, "llm_error")
	// STATUS-05: what fails for good ends the run as failed.
	r = herdgate(t, dir, nil, "run", "give up", "--server", server).want(t, 1)
	contains(t, "stderr", r.stderr, "529")
	stopped(t, p)
	if refused := fake.stderr.String(); refused != "" {
		t.Errorf("requests were refused:\n%s", refused)
	}

	res, err := http.Post(base+"/messages", "application/json", strings.NewReader(`{"model":"m"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusBadRequest {
		t.Errorf("status %d for half a request, want 400", res.StatusCode)
	}
	fake.saw(&fake.stderr, `refused /v1/messages: .*anthropic-version`)
	stopped(t, fake)
}

// No key is asked for, so nobody else may reach it.
func TestFakeModelRefusesToBePublic(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "rules.yaml"), `default: {turns: [{text: x}]}`)
	for _, addr := range []string{"0.0.0.0:0", ":0", "example.com:1"} {
		contains(t, "stderr", herdgate(t, dir, nil, "fake-model", "--script", "rules.yaml", "--listen", addr).want(t, 1).stderr, "--listen", "this machine")
	}
	contains(t, "stderr", herdgate(t, dir, nil, "fake-model", "--script", "no.yaml").want(t, 1).stderr, "no.yaml")
	contains(t, "stderr", herdgate(t, dir, nil, "fake-model").want(t, 1).stderr, "script")
}
