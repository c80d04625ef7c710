package tool_test

import (
	"context"
	"errors"
	"testing"

	"github.com/herdgate/herdgate/internal/tool"
)

// I2: a call begins after all before it have begun, not only after the one
// directly before: that one may have failed without ever beginning.
func TestTurnsSkipNobody(t *testing.T) {
	t.Parallel()
	over := errors.New("over")
	var turns tool.Turns
	ctx := context.Background()
	first, endFirst := turns.Next(ctx)
	_, endBroken := turns.Next(ctx)
	third, endThird := turns.Next(ctx)
	defer endThird()
	endBroken()
	hurried, cancel := context.WithCancelCause(third)
	cancel(over) // so that it says so when it would have to wait
	for range 100 {
		if err := tool.AwaitTurn(hurried); !errors.Is(err, over) {
			t.Fatalf("the third call begins before the first: %v", err)
		}
	}
	if err := tool.AwaitTurn(first); err != nil {
		t.Errorf("the first call waits: %v", err)
	}
	tool.EndTurn(first)
	endFirst() // telling twice does no harm
	if err := tool.AwaitTurn(third); err != nil {
		t.Errorf("the third call waits although the first has begun: %v", err)
	}
	if err := tool.AwaitTurn(context.Background()); err != nil {
		t.Errorf("a call outside of an answer waits: %v", err)
	}
	tool.EndTurn(context.Background())
}

// A writer waits for everything before it, a reader for the last writer.
func TestFileOrder(t *testing.T) {
	t.Parallel()
	over := errors.New("over")
	done, cancel := context.WithCancelCause(context.Background())
	cancel(over)
	waits := func(wait func(context.Context) error) bool { return errors.Is(wait(done), over) }
	goes := func(wait func(context.Context) error) bool { return wait(context.Background()) == nil }
	var o tool.FileOrder
	r1, endR1 := o.Next(false)
	r2, endR2 := o.Next(false)
	w1, endW1 := o.Next(true)
	r3, _ := o.Next(false)
	w2, endW2 := o.Next(true)
	if !goes(r1) || !goes(r2) || !waits(w1) || !waits(r3) || !waits(w2) {
		t.Error("at first only the two reads may begin")
	}
	endR1()
	if !waits(w1) {
		t.Error("the write begins beside a read")
	}
	endR2()
	if !goes(w1) || !waits(r3) {
		t.Error("the write may begin now, the read after it may not")
	}
	endW1()
	if !goes(r3) || !waits(w2) {
		t.Error("the read may begin now, the write after it may not")
	}
	endW2()
}
