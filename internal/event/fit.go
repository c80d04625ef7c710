package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"unicode/utf8"

	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// MinPayload is the smallest payload limit of a server with which every event can
// be published, in bytes.
const MinPayload = 16 << 10

// roomForExpectations is what a write adds to the headers of its event: what it
// expects of the stream, with a subject of at most five tokens, and the first line.
const roomForExpectations = 1 << 10

// ErrTooLarge is returned when not even the shortest form of an event fits.
var ErrTooLarge = errors.New("event is larger than the server takes")

// Encode validates an event and writes it so that with its headers it has at most
// limit bytes; 0 takes what every server takes by default. Where the bounds of its
// texts do not do, which needs a limit far below the default, texts are cut further,
// with the same flags, as far as it takes: the event says less, but it can always be
// published. The same event and limit give the same bytes.
func Encode(ev envelope.Event, limit int) ([]byte, error) {
	data, err := envelope.Encode(ev)
	tooLong := errors.Is(err, envelope.ErrTooLarge)
	if err != nil && !tooLong {
		return nil, err
	}
	room := envelope.MaxBytes
	if limit > 0 {
		room = min(room, limit-headerBytes(ev)-roomForExpectations)
	}
	if !tooLong && len(data) <= room {
		return data, nil
	}
	attempt := func(chars int) []byte {
		short, ok := shorten(ev, chars)
		if !ok {
			return nil
		}
		b, err := envelope.Encode(short)
		if err != nil || len(b) > room {
			return nil
		}
		return b
	}
	// The most characters with which it fits.
	over := sort.Search(MaxRunOutputChars, func(chars int) bool { return attempt(chars) == nil })
	if over > 0 {
		return attempt(over - 1), nil
	}
	return nil, fmt.Errorf("%w: %s %s has %d bytes and may have %d; a server for Herdgate needs a max_payload of %d or more", ErrTooLarge, ev.Type, ev.ID, len(data), max(0, room), MinPayload)
}

// headerBytes is what the headers of an event take on the wire.
func headerBytes(ev envelope.Event) int {
	n := 0
	for name, values := range ev.Headers() {
		for _, v := range values {
			n += len(name) + len(v) + len(": \r\n")
		}
	}
	return n
}

// shorten cuts the texts of an event's data to chars code points each, and the calls
// of a step to as many as that is worth. False: data of a type that is not known here.
func shorten(ev envelope.Event, chars int) (envelope.Event, bool) {
	switch ev.Type {
	case contract.EventTaskQueued:
		return rewrite(ev, func(d *contract.TaskQueuedData) { cutTo(&d.Description, chars) })
	case contract.EventTaskAdmitted:
		return ev, true // it has no text
	case contract.EventTaskStarted:
		return rewrite(ev, func(d *contract.TaskStartedData) { cutTo(&d.Description, chars) })
	case contract.EventTaskRunning:
		return rewrite(ev, func(d *contract.TaskRunningData) { shortenStep(&d.Message, chars) })
	case contract.EventTaskCompleted, contract.EventTaskFailed, contract.EventTaskCancelled, contract.EventTaskTimedOut:
		return rewrite(ev, func(d *contract.TaskEndData) {
			d.ResultTruncated = cutTo(&d.Result, chars) || d.ResultTruncated
			d.ErrorTruncated = cutTo(&d.Error, chars) || d.ErrorTruncated
		})
	case contract.EventRunStarted:
		return rewrite(ev, func(d *contract.RunStartedData) { d.Truncated = cutTo(&d.Input, chars) || d.Truncated })
	case contract.EventRunMessage:
		return rewrite(ev, func(d *contract.RunMessageData) { shortenStep(&d.Message, chars) })
	case contract.EventRunCompleted, contract.EventRunFailed, contract.EventRunCancelled:
		return rewrite(ev, func(d *contract.RunEndData) {
			d.OutputTruncated = cutTo(&d.Output, chars) || d.OutputTruncated
			d.ErrorTruncated = cutTo(&d.Error, chars) || d.ErrorTruncated
		})
	}
	return ev, false
}

func rewrite[T any](ev envelope.Event, change func(*T)) (envelope.Event, bool) {
	var data T
	if json.Unmarshal(ev.Data, &data) != nil {
		return ev, false
	}
	change(&data)
	b, err := json.Marshal(data)
	ev.Data = b
	return ev, err == nil
}

func cutTo(s *string, chars int) (cut bool) {
	*s, cut = Truncate(*s, chars)
	return cut
}

// shortenStep cuts a step. So that more characters never make it shorter, each part
// has its own share of them.
func shortenStep(s *contract.Step, chars int) {
	s.Truncated = cutTo(&s.Text, chars) || s.Truncated
	if calls := chars * maxStepCalls / contract.MaxStepChars; len(s.ToolCalls) > calls {
		s.ToolCalls, s.Truncated = s.ToolCalls[:calls], true
	}
	for i := range s.ToolCalls {
		c := &s.ToolCalls[i]
		text := string(c.Args)
		var isText string
		if json.Unmarshal(c.Args, &isText) == nil {
			text = isText
		}
		if utf8.RuneCountInString(text) > chars {
			text, _ = Truncate(text, chars)
			c.Args, c.ArgsTruncated = encode(text), true
		}
	}
}

// cleanUsage is usage as it may be told: figures of 0 or more, or none at all,
// because a guess is worse than nothing (STATUS-16). A cost that is none is left out.
func cleanUsage(u *contract.Usage) *contract.Usage {
	if u == nil || u.InputTokens < 0 || u.OutputTokens < 0 || u.TotalTokens < 0 || u.CacheReadTokens < 0 {
		return nil
	}
	if u.CostUSD == nil || *u.CostUSD >= 0 && *u.CostUSD <= maxCost {
		return u
	}
	out := *u
	out.CostUSD = nil
	return &out
}

// maxCost is more than any task costs, and keeps the amount a number of few digits.
const maxCost = contract.Money(1e12)
