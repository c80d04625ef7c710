package event

import (
	"crypto/sha256"
	"encoding/json"

	"github.com/herdgate/herdgate/internal/model"
)

// Capture finds, in successive views of a conversation, the messages that are
// steps and were not seen before. Every assistant turn and every tool output
// becomes a step once, whatever happens to the history: it may grow by several
// messages at a time, come again unchanged, or shrink because it was compacted.
//
// A conversation that tells each of its messages as it appends it is seen as
// views of one message: nothing can be missed then, and a view costs the same
// however long the conversation is.
//
// The zero value is ready. It is not safe for concurrent use.
type Capture struct {
	cursor int
	count  int
	ids    map[string]struct{}
	bodies map[[sha256.Size]byte]struct{}
}

// CapturedStep is a message with its place in the capture.
type CapturedStep struct {
	// Index counts from 1 without a gap.
	Index   int
	Message model.Message
}

// Snapshot looks at the conversation as it is now and returns what is new, and
// how far it was walked: its length.
//
// A message with an id is new when its id is, wherever it stands. One without
// an id is new when its content is and it stands where new messages can stand:
// behind the cursor, at the very end if the history has not grown, or anywhere
// if it has shrunk.
func (c *Capture) Snapshot(history ...model.Message) (steps []CapturedStep, cursor int) {
	from := c.cursor
	switch {
	case len(history) < c.cursor:
		from = 0
	case len(history) == c.cursor:
		from = len(history) - 1
	}
	c.cursor = len(history)
	for i, m := range history {
		if m.Role != model.RoleAssistant && m.Role != model.RoleTool {
			continue
		}
		if m.ID == "" && i < from || !c.fresh(m) {
			continue
		}
		c.count++
		steps = append(steps, CapturedStep{Index: c.count, Message: m})
	}
	return steps, c.cursor
}

// fresh reports whether m was never seen, and remembers it.
func (c *Capture) fresh(m model.Message) bool {
	if m.ID != "" {
		if c.ids == nil {
			c.ids = map[string]struct{}{}
		}
		_, seen := c.ids[m.ID]
		c.ids[m.ID] = struct{}{}
		return !seen
	}
	m.Metadata = nil // may hold what JSON cannot; it is no content
	body, err := json.Marshal(m)
	if err != nil {
		return true // better twice than lost
	}
	sum := sha256.Sum256(body)
	if c.bodies == nil {
		c.bodies = map[[sha256.Size]byte]struct{}{}
	}
	_, seen := c.bodies[sum]
	c.bodies[sum] = struct{}{}
	return !seen
}
