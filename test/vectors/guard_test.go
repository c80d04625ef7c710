package vectors

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/guard"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/pkg/contract"
)

// GUARD-04 to GUARD-10
func runLoopDetection(t *testing.T, c vectorCase) {
	in := into[struct {
		Config struct {
			WarnThreshold     *int              `json:"warn_threshold"`
			HardLimit         *int              `json:"hard_limit"`
			WindowSize        *int              `json:"window_size"`
			ToolFreqWarn      *int              `json:"tool_freq_warn"`
			ToolFreqHardLimit *int              `json:"tool_freq_hard_limit"`
			ToolFreqOverrides map[string][2]int `json:"tool_freq_overrides"`
		} `json:"config"`
		Turns []struct {
			Type  string `json:"type"`
			Times *int   `json:"times"`
			Calls []struct {
				Name string `json:"name"`
				Args any    `json:"args"`
			} `json:"calls"`
			Text any `json:"text"`
		} `json:"turns"`
	}](t, c.inputs)
	cfg := config.Default().LoopDetection
	for to, v := range map[*int]*int{
		&cfg.WarnThreshold: in.Config.WarnThreshold, &cfg.HardLimit: in.Config.HardLimit, &cfg.WindowSize: in.Config.WindowSize,
		&cfg.ToolFreqWarn: in.Config.ToolFreqWarn, &cfg.ToolFreqHardLimit: in.Config.ToolFreqHardLimit,
	} {
		if v != nil {
			*to = *v
		}
	}
	cfg.ToolFreqOverrides = map[string]config.ToolFreq{}
	for name, o := range in.Config.ToolFreqOverrides {
		cfg.ToolFreqOverrides[name] = config.ToolFreq{Warn: o[0], HardLimit: o[1]}
	}

	loop := guard.NewLoop(cfg)
	outcomes := []any{}
	var stop any
	turn := 0
run:
	for _, tr := range in.Turns {
		times := 1
		if tr.Times != nil {
			times = *tr.Times
		}
		for i := range times {
			turn++
			msg := model.Message{ID: fmt.Sprint("m", turn), Role: model.RoleAssistant}
			if tr.Type != "" && tr.Type != "ai" {
				msg.Role = model.RoleUser
			}
			for n, call := range tr.Calls {
				args, isText := call.Args.(string)
				if !isText {
					args = short(call.Args)
				}
				msg.ToolCalls = append(msg.ToolCalls, model.ToolCall{ID: fmt.Sprintf("c%d_%d", turn, n), Name: call.Name, Args: strings.ReplaceAll(args, "%i", strconv.Itoa(i))})
			}
			v := loop.Observe(msg)
			if v != guard.VerdictNone {
				outcomes = append(outcomes, map[string]any{"turn": turn, "outcome": v})
			}
			if v == guard.VerdictStopSame || v == guard.VerdictStopFreq {
				stop = contract.StopLoopCapped
				break run
			}
		}
	}
	want := c.object(t, "outcomes", "stop_reason")
	equal(t, "outcomes", outcomes, want["outcomes"])
	equal(t, "stop_reason", stop, want["stop_reason"])
}

// spent is one message's usage as [id, [input, output]].
func spent(t *testing.T, list []any) []guard.Spent {
	t.Helper()
	var out []guard.Spent
	for _, e := range list {
		pair := into[[2]any](t, e)
		id, _ := pair[0].(string)
		s := guard.Spent{ID: id}
		if pair[1] != nil {
			n := into[[2]int64](t, pair[1])
			s.Input, s.Output = n[0], n[1]
		}
		out = append(out, s)
	}
	return out
}

// GUARD-01 to GUARD-03, GUARD-16, GUARD-17, CONFIG-05
func runTokenBudget(t *testing.T, c vectorCase) {
	in := into[struct {
		Config            map[string]any `json:"config"`
		BeforeRun         []any          `json:"before_run"`
		Steps             [][]any        `json:"steps"`
		GlobalBudget      map[string]any `json:"global_budget"`
		PerTypeBudget     map[string]any `json:"per_type_budget"`
		CompactionEnabled bool           `json:"compaction_enabled"`
		Schema            map[string]any `json:"schema"`
	}](t, c.inputs)
	// The file's own rules read every budget: JSON is YAML.
	check := func(global, perType map[string]any, compaction bool) (config.Config, bool) {
		doc := map[string]any{"subagents": map[string]any{"token_budget": global, "agents": map[string]any{"bash": map[string]any{"token_budget": perType}}}, "summarization": map[string]any{"enabled": compaction}}
		b, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		cfg, faults := config.Check("herdgate.yaml", b, nil)
		return cfg, len(faults) == 0
	}
	keys := c.inputs.(map[string]any)
	switch {
	case hasKey(keys, "schema"):
		_, ok := check(in.Schema, nil, false)
		equal(t, "accepted", ok, c.object(t, "accepted")["accepted"])
		return
	case hasKey(keys, "compaction_enabled"):
		cfg, ok := check(in.GlobalBudget, in.PerTypeBudget, in.CompactionEnabled)
		if !ok {
			t.Fatal("the budget is refused")
		}
		b := cfg.TokenBudget("bash")
		want := c.object(t, "enabled", "max_tokens", "max_input_tokens", "max_output_tokens", "warn_threshold", "hard_stop_threshold")
		got := map[string]any{
			"enabled": b.Enabled, "max_tokens": b.MaxTokens, "max_input_tokens": b.MaxInputTokens, "max_output_tokens": b.MaxOutputTokens,
			"warn_threshold": b.WarnThreshold, "hard_stop_threshold": b.HardStopThreshold,
		}
		for key, v := range want {
			if n, ok := v.(json.Number); ok { // 1 and 1.0 are the same threshold
				f, err := n.Float64()
				g, gerr := strconv.ParseFloat(fmt.Sprint(got[key]), 64)
				if err != nil || gerr != nil || f != g {
					t.Errorf("%s = %v, want %v", key, got[key], v)
				}
				continue
			}
			equal(t, key, got[key], v)
		}
		return
	}
	cfg, ok := check(in.Config, nil, false)
	if !ok {
		t.Fatal("the budget is refused")
	}
	tokens := guard.NewTokens(cfg.TokenBudget("other"))
	tokens.Before(spent(t, in.BeforeRun))
	outcomes := []any{}
	var stop any
	for i, step := range in.Steps {
		v := tokens.Observe(spent(t, step))
		if v != guard.VerdictNone {
			outcomes = append(outcomes, map[string]any{"step": i + 1, "outcome": v})
		}
		if v == guard.VerdictStop {
			stop = contract.StopTokenCapped
			break
		}
	}
	want := c.object(t, "outcomes", "stop_reason")
	equal(t, "outcomes", outcomes, want["outcomes"])
	equal(t, "stop_reason", stop, want["stop_reason"])
}

// STATUS-11 to STATUS-18, GUARD-23
func runStatusMetadata(t *testing.T, c vectorCase) {
	in := into[struct {
		Op         string              `json:"op"`
		Status     contract.ToolStatus `json:"status"`
		Result     string              `json:"result"`
		Error      string              `json:"error"`
		StopReason contract.StopReason `json:"stop_reason"`
		ModelName  string              `json:"model_name"`
		Usage      any                 `json:"usage"`
		Metadata   map[string]any      `json:"metadata"`
	}](t, c.inputs)
	if in.Op == "read" {
		var got any
		if s, ok := delegation.ReadMetadata(in.Metadata); ok {
			m := map[string]any{}
			for key, v := range map[string]string{
				"status": string(s.Status), "result_brief": s.ResultBrief, "result_sha256": s.ResultSHA256, "error": s.Error,
				"stop_reason": string(s.StopReason), "model_name": s.ModelName,
			} {
				if v != "" {
					m[key] = v
				}
			}
			if s.Usage != nil {
				m["token_usage"] = s.Usage
			}
			got = m
		}
		equal(t, "read", got, c.expected)
		return
	}
	if in.Op != "build" {
		t.Fatalf("unknown op %q", in.Op)
	}
	meta, err := delegation.Metadata(delegation.Facts{
		Status: in.Status, Result: in.Result, Error: in.Error, StopReason: in.StopReason, ModelName: in.ModelName, Usage: delegation.ReadUsage(in.Usage),
	})
	if c.expected == "refused" {
		if err == nil {
			t.Errorf("it was not refused: %v", meta)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	want := c.expected.(map[string]any)
	if of, ok := strings.CutPrefix(fmt.Sprint(want[delegation.ResultSHA256Key]), "sha256:"); ok {
		sum := sha256.Sum256([]byte(of))
		want[delegation.ResultSHA256Key] = hex.EncodeToString(sum[:])
	}
	equal(t, "metadata", meta, want)
}
