package guard

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
)

// EXEC-09, EXEC-10: a file that is there is replaced only by whom knows it as it
// is; each execution knows its own files alone.
func TestReadBeforeWrite(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ws, err := tool.NewWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ws.Close() })
	others := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(time.Hour) // whatever the clock's grain
		if err := os.Chtimes(filepath.Join(dir, name), at, at); err != nil {
			t.Fatal(err)
		}
	}
	// agentOf makes the calls of one execution, one after the other.
	agentOf := func(calls ...model.ToolCall) (results []model.Message) {
		t.Helper()
		m := &fake{answer: func(turn int) model.Response {
			if turn > len(calls) {
				return model.Response{Message: model.Message{Text: "done", FinishReason: "stop"}}
			}
			if turn == 4 { // between the third call and the fourth
				others("mine", "changed by somebody else")
			}
			return calling("", calls[turn-1])
		}}
		res, err := agent.Run(t.Context(), agent.Config{Model: m, Tools: tool.Tools(ws, tool.Options{}), MaxTurns: 20, Chain: []agent.Piece{ReadBeforeWrite()}},
			[]model.Message{{ID: "task", Role: model.RoleUser, Text: "go"}})
		if err != nil {
			t.Fatal(err)
		}
		for _, msg := range res.Messages {
			if msg.Role == model.RoleTool {
				results = append(results, msg)
			}
		}
		return results
	}
	call := func(name string, args map[string]any) model.ToolCall {
		b, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		return model.ToolCall{Name: name, Args: string(b)}
	}
	write := func(name, text string) model.ToolCall {
		return call("write_file", map[string]any{"path": name, "content": text})
	}
	read := func(name string) model.ToolCall { return call("read_file", map[string]any{"path": name}) }
	edit := func(name, from, to string) model.ToolCall {
		return call("str_replace", map[string]any{"path": name, "old_str": from, "new_str": to})
	}
	check := func(results []model.Message, want ...string) {
		t.Helper()
		for i, w := range want {
			if results[i].IsError != (w != "") || !strings.Contains(results[i].Text, w) {
				t.Errorf("call %d: error %v %q; want %q", i+1, results[i].IsError, results[i].Text, w)
			}
		}
	}

	others("theirs", "made by somebody else")
	others("empty", "")
	check(agentOf(
		write("mine", "1"), write("mine", "2"), write("theirs", "x"), // the second is its own file
		write("mine", "3"), read("mine"), write("mine", "4"), // changed meanwhile
		edit("theirs", "made", "written"), write("theirs", "x"), // an edit needs no reading, but is none
		read("./theirs"), edit("theirs", "written", "made"), write("theirs", "x"), write("empty", "x"),
	), "", "", "have not read it", "was changed since", "", "", "", "have not read it", "", "", "", "")
	check(agentOf(write("mine", "y")), "have not read it")
	b, err := os.ReadFile(filepath.Join(dir, "mine"))
	if err != nil || string(b) != "4" {
		t.Errorf("mine holds %q, %v", b, err)
	}
}
