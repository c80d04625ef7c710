package script

import (
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"slices"

	"github.com/herdgate/herdgate/internal/model"
)

// Random makes faults come by chance, in one of Every answers on average. What
// becomes of an answer follows from the seed, the conversation and the number of the
// answer in it alone, so that a run can be had again whatever else is under way.
type Random struct {
	Seed  uint64
	Every int // 0: never
}

// The kinds of chance that are no [Fault], because a script writes them as an answer.
const (
	ChanceUnknownTool = "unknown_tool"
	ChanceEmpty       = "empty_answer"
	ChanceLength      = "cut_at_length"
	ChanceFilter      = "content_filter"
	ChanceFilterAll   = "content_filter_without_text"
)

// UnknownTool is what a call becomes by [ChanceUnknownTool].
const UnknownTool = "no_such_tool"

var chances = func() (out []string) {
	for _, f := range faults {
		out = append(out, string(f))
	}
	return append(out, ChanceUnknownTool, ChanceEmpty, ChanceLength, ChanceFilter, ChanceFilterAll)
}()

// Chances are all kinds of faults that can come by chance.
func Chances() []string { return slices.Clone(chances) }

// oddWaits are what providers wrote into Retry-After.
var oddWaits = []string{"", "0", "7", "-3", "0.5", "1e99", "NaN", "soon", "Mon, 01 Jan 2001 00:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 GMT"}

// Change returns s as it is told as the answer number n of a conversation, and what
// kind of fault it has got; "" is none. A step with a fault of its own stays.
func (r Random) Change(conversation string, n int, s Step) (Step, string) {
	h := fnv.New128a()
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	_, _ = h.Write([]byte(conversation)) // a hash takes everything
	sum := h.Sum(nil)
	dice := rand.New(rand.NewPCG(r.Seed^binary.LittleEndian.Uint64(sum), binary.LittleEndian.Uint64(sum[8:])))
	if s.Fault != "" || r.Every <= 0 || dice.IntN(r.Every) > 0 {
		return s, ""
	}
	fits := slices.DeleteFunc(Chances(), func(kind string) bool {
		return len(s.Message.ToolCalls) == 0 && (kind == ChanceUnknownTool || slices.Contains(needCalls, Fault(kind)))
	})
	kind := fits[dice.IntN(len(fits))]
	s.Message.ToolCalls = slices.Clone(s.Message.ToolCalls)
	switch kind {
	case ChanceUnknownTool:
		s.Message.ToolCalls[0].Name = UnknownTool
	case ChanceEmpty:
		s.Message = model.Message{Role: s.Message.Role, FinishReason: "stop"}
	case ChanceLength:
		s.Message.FinishReason = "length"
	case ChanceFilter, ChanceFilterAll:
		s.Message.FinishReason = "content_filter"
		if kind == ChanceFilterAll {
			s.Message.Text = ""
		}
	default:
		s.Fault = Fault(kind)
		if s.Fault == FaultRateLimit || s.Fault == FaultOverloaded {
			s.RetryAfter = oddWaits[dice.IntN(len(oddWaits))]
		}
		s.spoil()
	}
	return s, kind
}

// spoil gives an answer what its fault says of it.
func (s *Step) spoil() {
	for i := range s.Message.ToolCalls {
		c := &s.Message.ToolCalls[i]
		switch s.Fault {
		case FaultMalformed, FaultCutCall:
			c.Args = malform(c.Args)
		case FaultBlankIDs:
			c.ID = ""
		case FaultRepeatedIDs:
			c.ID = "call_0_0"
		}
	}
	switch s.Fault {
	case FaultCutCall:
		s.Message.FinishReason = "length"
	case FaultNullUsage:
		s.Usage = nil
	}
}
