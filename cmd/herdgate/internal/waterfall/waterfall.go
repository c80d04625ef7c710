// Package waterfall draws what took how long in a run: a row for each thing, its bar
// under the time in which it happened. It only computes: rows come from stored events
// ([FromEvents]) or from the spans of a trace ([FromSpans]), [Chart.Draw] makes lines
// of them.
package waterfall

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Kind is what a row's time was spent on.
type Kind string

// The kinds of rows.
const (
	KindRun   Kind = "run"
	KindTask  Kind = "task"
	KindWait  Kind = "wait"
	KindStart Kind = "start" // from a slot to the executor that begins
	KindModel Kind = "model"
	KindTool  Kind = "tool"
	KindSpan  Kind = "span"
)

// glyphs are what bars are made of; - is that of all others.
var glyphs = map[Kind]string{KindWait: ".", KindStart: ".", KindModel: "=", KindTool: "#"}

// Row is one line of a chart. Its texts are as they came: [Chart.Draw] makes them safe.
type Row struct {
	Depth int    `json:"depth"`
	Kind  Kind   `json:"kind"`
	Name  string `json:"name"`
	// Service is whose span it is.
	Service    string          `json:"service,omitempty"`
	TaskID     contract.TaskID `json:"task_id,omitempty"`
	Attempt    int             `json:"attempt,omitempty"`
	Start      time.Time       `json:"start"`
	End        time.Time       `json:"end"`
	DurationMS int64           `json:"duration_ms"`
	// Open: it has not ended; End is when that was looked at.
	Open       bool            `json:"open,omitempty"`
	Status     string          `json:"status,omitempty"`
	StopReason string          `json:"stop_reason,omitempty"`
	ErrorCode  string          `json:"error_code,omitempty"`
	Error      string          `json:"error,omitempty"`
	Turns      int             `json:"turns,omitempty"`
	ToolCalls  int             `json:"tool_calls,omitempty"`
	Usage      *contract.Usage `json:"usage,omitempty"`
	// Note is what else there is to say.
	Note string `json:"note,omitempty"`

	// minor rows are drawn only if they are long enough to see.
	minor bool
}

// Failed reports whether the row ended as it should not have.
func (r Row) Failed() bool { return r.ErrorCode != "" || r.Error != "" }

// Chart is a run or a trace.
type Chart struct {
	RunID   contract.RunID `json:"run_id,omitempty"`
	TraceID string         `json:"trace_id,omitempty"`
	// Summary says in words what the rows come to.
	Summary string `json:"summary"`
	// Notes say what is missing.
	Notes []string  `json:"notes,omitempty"`
	Start time.Time `json:"start"`
	End   time.Time `json:"end"`
	Rows  []Row     `json:"rows"`
}

// finish computes what follows from the rows.
func (c *Chart) finish() {
	for i := range c.Rows {
		r := &c.Rows[i]
		if r.End.Before(r.Start) {
			r.End = r.Start
		}
		r.DurationMS = r.End.Sub(r.Start).Milliseconds()
		if i == 0 || r.Start.Before(c.Start) {
			c.Start = r.Start
		}
		if i == 0 || r.End.After(c.End) {
			c.End = r.End
		}
	}
}

// The widths of a picture, in columns.
const (
	MinWidth     = 40
	DefaultWidth = 100
	MaxWidth     = 300

	durationWidth = 11
	minBar        = 12
	maxName       = 60
	maxNote       = 70
)

// visibleShare is the share of the whole below which a minor row is left out.
const visibleShare = 0.01

// Draw returns the chart as lines of at most width columns (0 takes
// [DefaultWidth]), each ended by a line break. With color, rows that failed are red and
// waiting is faint; without it there is nothing but text.
func (c *Chart) Draw(width int, color bool) string {
	if width <= 0 {
		width = DefaultWidth
	}
	width = min(max(width, MinWidth), MaxWidth)
	whole := c.End.Sub(c.Start)
	var rows []Row
	names, notes := []string{}, []string{}
	nameWidth, noteWidth := 4, 0
	for _, r := range c.Rows {
		if r.minor && !r.Open && !r.Failed() && float64(r.End.Sub(r.Start)) < visibleShare*float64(whole) {
			continue
		}
		// A deep trace must leave room for the names.
		name := strings.Repeat("  ", min(r.Depth, 10)) + printable.Cut(r.Name, maxName)
		note := printable.Cut(r.text(), maxNote)
		rows, names, notes = append(rows, r), append(names, name), append(notes, note)
		nameWidth, noteWidth = max(nameWidth, ansi.StringWidth(name)), max(noteWidth, ansi.StringWidth(note))
	}
	nameWidth = min(nameWidth, width*7/20)
	noteWidth = min(noteWidth, width*7/20)
	bar := width - nameWidth - durationWidth - noteWidth - 4
	if bar < minBar {
		noteWidth = max(0, noteWidth-(minBar-bar))
		bar = max(1, width-nameWidth-durationWidth-noteWidth-4)
	}

	var b strings.Builder
	line := func(s string) { b.WriteString(strings.TrimRight(ansi.Truncate(s, width, "…"), " ") + "\n") }
	head := ""
	if c.RunID != "" {
		head = "run " + printable.Cut(string(c.RunID), maxName)
	}
	if c.TraceID != "" {
		head += "  trace " + printable.Cut(c.TraceID, maxName)
	}
	line(strings.TrimSpace(head))
	for s := range strings.SplitSeq(c.Summary, "\n") {
		line(printable.Cut(s, MaxWidth))
	}
	for _, n := range c.Notes {
		line("note: " + printable.Cut(n, MaxWidth))
	}
	if len(rows) == 0 {
		return b.String()
	}
	b.WriteByte('\n')
	end := length(whole)
	line(strings.Repeat(" ", nameWidth+1) + "0" + strings.Repeat(" ", max(1, bar+1-ansi.StringWidth(end))) + end)
	for i, r := range rows {
		text := fit(names[i], nameWidth) + " |" + fit(c.bar(r, bar), bar) + "|" +
			fmt.Sprintf("%*s", durationWidth-1, length(r.End.Sub(r.Start)))
		if noteWidth > 0 {
			text += "  " + ansi.Truncate(notes[i], noteWidth, "…")
		}
		text = strings.TrimRight(ansi.Truncate(text, width, "…"), " ")
		switch {
		case color && r.Failed():
			text = "\x1b[31m" + text + "\x1b[0m"
		case color && glyphs[r.Kind] == ".":
			text = "\x1b[2m" + text + "\x1b[0m"
		}
		b.WriteString(text + "\n")
	}
	b.WriteByte('\n')
	line(". waiting   = model   # tools   - the rest   > not over   ! failed")
	return b.String()
}

// bar is the row's bar in a field of so many columns.
func (c *Chart) bar(r Row, width int) string {
	whole := float64(max(c.End.Sub(c.Start), 1))
	at := func(t time.Time) float64 { return float64(t.Sub(c.Start)) / whole * float64(width) }
	from := min(max(int(math.Floor(at(r.Start))), 0), width-1)
	to := min(max(int(math.Ceil(at(r.End)-1e-9)), from+1), width)
	glyph := glyphs[r.Kind]
	if glyph == "" {
		glyph = "-"
	}
	last := glyph
	switch {
	case r.Open:
		last = ">"
	case r.Failed():
		last = "!"
	}
	return strings.Repeat(" ", from) + strings.Repeat(glyph, to-from-1) + last
}

// text is what stands behind a row's duration.
func (r Row) text() string {
	var parts []string
	add := func(s string) {
		if s != "" {
			parts = append(parts, s)
		}
	}
	add(r.Service)
	if r.Status != string(contract.TaskCompleted) { // what has ended well is the rest
		add(r.Status)
	}
	add(r.StopReason)
	add(r.ErrorCode)
	add(usage(r.Usage))
	if r.Turns > 0 && r.Kind != KindModel {
		add(count(r.Turns, "turn"))
	}
	if r.ToolCalls > 0 && r.Kind == KindTask {
		add(count(r.ToolCalls, "tool call"))
	}
	add(r.Note)
	add(r.Error)
	return strings.Join(parts, ", ")
}

// usage is what was used, as text; "" when nothing is known.
func usage(u *contract.Usage) string {
	if u == nil {
		return ""
	}
	text := fmt.Sprintf("%d tokens", u.TotalTokens)
	if u.CostUSD != nil {
		text += ", " + progress.Dollars(*u.CostUSD)
	}
	return text
}

// length is a duration for people; below a second in milliseconds.
func length(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", max(d, 0).Milliseconds())
	}
	return progress.Seconds(d)
}

// fit is s in exactly so many columns.
func fit(s string, width int) string {
	s = ansi.Truncate(s, width, "…")
	return s + strings.Repeat(" ", max(0, width-ansi.StringWidth(s)))
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
