package openai

import (
	"testing"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/modeltest"
)

// F-118: pieces that show nothing, such as reasoning, are signs of life too.
func TestReasoningIsLife(t *testing.T) {
	t.Parallel()
	body := `data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}` + "\n\n" +
		`data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}` + "\n\n" +
		`data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	bothWays(t, []byte(body), func(t *testing.T, r modeltest.Reply) {
		before, shown := 0, ""
		_, err := client(t, modeltest.New(t, r)).Generate(t.Context(), ask("hi"), func(d model.Delta) {
			if shown == "" && d == (model.Delta{}) {
				before++
			}
			shown += d.Text
		})
		if err != nil {
			t.Fatal(err)
		}
		if before < 3 || shown != "yes" {
			t.Errorf("%d signs of life before %q, want one for each piece", before, shown)
		}
	})
}
