package event

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/herdgate/herdgate/internal/model"
)

// STEP-02, STEP-03, STEP-04, STEP-09: whatever is appended, replayed or
// compacted away between two looks, every message is captured once, in order
// and with the next index.
func TestCaptureMissesNothing(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var capture Capture
		var history []model.Message
		var want, got []string
		last, seen := 0, 0
		for n := 0; n < 40; {
			for range rnd.IntN(4) { // appended since the last look
				m := model.Message{ID: fmt.Sprintf("m%d", n), Role: []model.Role{model.RoleUser, model.RoleAssistant, model.RoleTool}[rnd.IntN(3)], Text: "same"}
				history = append(history, m)
				if m.Role != model.RoleUser {
					want = append(want, m.ID)
				}
				n++
			}
			if rnd.IntN(4) == 0 { // compacted: what was seen may go, what is new stays
				history = slices.Clone(history[rnd.IntN(min(seen, len(history))+1):])
			}
			var steps []CapturedStep
			steps, seen = capture.Snapshot(history...)
			for _, s := range steps {
				if last++; s.Index != last {
					t.Fatalf("seed %d: index %d, want %d", seed, s.Index, last)
				}
				got = append(got, s.Message.ID)
			}
		}
		steps, _ := capture.Snapshot(history...)
		for _, s := range steps {
			got = append(got, s.Message.ID)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("seed %d: captured %q, want %q", seed, got, want)
		}
	}
}

// STEP-01, STEP-03: system messages are no steps; two messages without an id
// count as one only if all of their content is the same.
func TestCaptureWithoutIDs(t *testing.T) {
	t.Parallel()
	var c Capture
	tool := func(call string) model.Message {
		return model.Message{Role: model.RoleTool, ToolCallID: call, Text: "ok", Metadata: map[string]any{"f": func() {}}}
	}
	got, _ := c.Snapshot(model.Message{Role: model.RoleSystem, Text: "s"}, tool("1"), tool("2"), tool("1"))
	if len(got) != 2 || got[0].Message.ToolCallID != "1" || got[1].Message.ToolCallID != "2" {
		t.Errorf("captured %+v, want the two outputs", got)
	}
}

// STEP-04: after a compaction new messages are found anywhere, also without ids.
func TestCaptureCompactedWithoutIDs(t *testing.T) {
	t.Parallel()
	msg := func(text string) model.Message { return model.Message{Role: model.RoleAssistant, Text: text} }
	var c Capture
	c.Snapshot(msg("a"), msg("b"), msg("c"), msg("d"))
	got, _ := c.Snapshot(msg("d"), msg("e"), msg("f"))
	if len(got) != 2 || got[0].Message.Text != "e" || got[1].Message.Text != "f" || got[1].Index != 6 {
		t.Errorf("captured %+v, want e and f", got)
	}
}

// STEP-01, STEP-02, STEP-03: a loop that shows each message as it appends it has
// every answer and every output told once, in order, also when it shows one again.
func TestCaptureOfSingleMessages(t *testing.T) {
	t.Parallel()
	var c Capture
	var got []string
	for _, m := range []model.Message{
		{ID: "m0", Role: model.RoleUser}, {ID: "m1", Role: model.RoleAssistant, Text: "same"}, {ID: "m2", Role: model.RoleTool, Text: "same"},
		{ID: "m1", Role: model.RoleAssistant, Text: "same"}, {ID: "m3", Role: model.RoleTool, Text: "same"}, {ID: "m4", Role: model.RoleSystem}, {ID: "m5", Role: model.RoleAssistant, Text: "same"},
	} {
		steps, _ := c.Snapshot(m)
		for _, s := range steps {
			got = append(got, fmt.Sprint(s.Index, " ", s.Message.ID))
		}
	}
	if want := []string{"1 m1", "2 m2", "3 m3", "4 m5"}; !slices.Equal(got, want) {
		t.Errorf("captured %q, want %q", got, want)
	}
}
