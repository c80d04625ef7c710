package tool_test

import (
	"encoding/json"
	"sync/atomic"
	"testing"

	"github.com/herdgate/herdgate/internal/tool"
)

// F-014: a command tells of its output while it runs; one that prints nothing tells
// only that it has begun. Without a listener nothing happens.
func TestBashTellsProgress(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	told := func(command string) int64 {
		t.Helper()
		var n atomic.Int64
		ctx := tool.WithProgress(t.Context(), func() { n.Add(1) })
		args, err := json.Marshal(map[string]string{"command": command})
		if err != nil {
			t.Fatal(err)
		}
		if res, err := b.tools["bash"].Call(ctx, tool.Call{ID: "c", Args: args}); err != nil || res.IsError {
			t.Fatalf("%s: %+v, %v", command, res, err)
		}
		return n.Load()
	}
	if n := told("true"); n != 1 {
		t.Errorf("a silent command told %d times, want 1", n)
	}
	if n := told("echo out; echo err >&2"); n < 2 {
		t.Errorf("a command with output told %d times, want at least 2", n)
	}
	tool.Progress(t.Context())
}
