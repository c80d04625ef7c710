package progress

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Shower shows the events of a run as they come. Show may be called from one
// goroutine at a time; Close ends the display and must be called once.
type Shower interface {
	Show(contract.EventRecord)
	// Note shows a remark that is no event.
	Note(text string)
	Close()
}

// Lines shows a line for each event that is worth one.
type Lines struct {
	mu  sync.Mutex
	w   io.Writer
	run *Run
}

// NewLines writes lines to w.
func NewLines(w io.Writer, run *Run) *Lines { return &Lines{w: w, run: run} }

// Show implements [Shower].
func (l *Lines) Show(rec contract.EventRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.run.Add(rec) {
		fmt.Fprintln(l.w, line)
	}
}

// Note implements [Shower].
func (l *Lines) Note(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintln(l.w, printable.Line(text))
}

// Close implements [Shower].
func (l *Lines) Close() {}

// Live draws the tasks on a terminal and draws them again as they go on. It
// uses the lines below the cursor and leaves the last picture there. It reads
// no input, so that Ctrl-C stays a signal.
type Live struct {
	program *tea.Program
	done    chan struct{}
}

// NewLive draws to w, which is a terminal. The caller must call Close.
func NewLive(w io.Writer, run *Run, opts ...tea.ProgramOption) *Live {
	opts = append([]tea.ProgramOption{tea.WithOutput(w), tea.WithInput(nil), tea.WithoutSignalHandler(), tea.WithFPS(20)}, opts...)
	l := &Live{program: tea.NewProgram(&view{run: run, now: time.Now()}, opts...), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		// Without a picture the run goes on all the same, and its result is
		// printed by others.
		_, _ = l.program.Run()
	}()
	return l
}

type note string

// Show implements [Shower].
func (l *Live) Show(rec contract.EventRecord) { l.program.Send(rec) }

// Note implements [Shower].
func (l *Live) Note(text string) { l.program.Send(note(text)) }

// Close implements [Shower].
func (l *Live) Close() {
	l.program.Quit()
	<-l.done
}

// view is the picture; bubbletea calls it from one goroutine.
type view struct {
	run   *Run
	notes []string
	now   time.Time
	width int
	frame int
}

type tick time.Time

const frameTime = 100 * time.Millisecond

func nextTick() tea.Cmd { return tea.Tick(frameTime, func(t time.Time) tea.Msg { return tick(t) }) }

// Init implements tea.Model.
func (v *view) Init() tea.Cmd { return nextTick() }

// Update implements tea.Model.
func (v *view) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case contract.EventRecord:
		v.run.Add(msg)
	case note:
		v.notes = append(v.notes, string(msg))
	case tea.WindowSizeMsg:
		v.width = msg.Width
	case tick:
		v.now = time.Time(msg)
		v.frame++
		return v, nextTick()
	}
	return v, nil
}

// View implements tea.Model.
func (v *view) View() tea.View { return tea.NewView(v.draw()) }

var spinner = []string{"⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"}

func (v *view) mark(state string) string {
	switch contract.TaskStatus(state) {
	case contract.TaskCompleted:
		return "✓"
	case contract.TaskFailed, contract.TaskTimedOut:
		return "✗"
	case contract.TaskCancelled:
		return "–"
	case contract.TaskRunning:
		return spinner[v.frame%len(spinner)]
	}
	return "·"
}

func (v *view) draw() string {
	width := v.width
	if width <= 0 {
		width = 80
	}
	var rows []string
	state := string(v.run.Status)
	if v.run.Model != "" {
		state += ", " + printable.Cut(v.run.Model, 40)
	}
	rows = append(rows, fmt.Sprintf("%s run %s (%s)", v.mark(string(v.run.Status)), printable.Line(string(v.run.ID)), state))
	if v.run.LastText != "" && !v.run.Status.Terminal() {
		rows = append(rows, "  "+v.run.LastText)
	}
	for _, t := range v.run.Tasks {
		rows = append(rows, fmt.Sprintf("%s %-8s %-9s %9s  %-12s %7s  %s", v.mark(t.State), t.Name(), t.State, Seconds(t.Elapsed(v.now)),
			printable.Cut(t.LastTool, 12), t.Tokens(), printable.Cut(t.Description, maxText)))
	}
	for _, n := range v.notes {
		rows = append(rows, printable.Line(n))
	}
	for i, row := range rows {
		rows[i] = ansi.Truncate(row, width, "…")
	}
	return strings.Join(rows, "\n") + "\n"
}
