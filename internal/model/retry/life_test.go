package retry

import (
	"context"
	"testing"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/model"
)

// quiet gives a sign of life, fails once, and then answers.
type quiet struct{ fake }

func (q *quiet) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	onDelta(model.Delta{})
	if q.calls++; q.calls == 1 {
		return model.Response{}, transient(0)
	}
	return model.Response{Message: model.Message{Text: "whole"}}, nil
}

// F-116: where nothing was shown, nothing has to be taken back; signs of life get
// through.
func TestSignsOfLifeAreNotTakenBack(t *testing.T) {
	t.Parallel()
	var got []model.Delta
	if _, err := Retry(&quiet{}, quick, zerolog.Nop()).Generate(t.Context(), model.Request{}, func(d model.Delta) { got = append(got, d) }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0] != (model.Delta{}) || got[1] != (model.Delta{}) {
		t.Errorf("deltas = %+v, want two empty ones", got)
	}
}
