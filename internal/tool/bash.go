package tool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/sandbox"
)

// Defaults and limits of bash.
const (
	defaultBashTimeout    = 120 * time.Second
	defaultMaxBashTimeout = 600 * time.Second
	cutRoom               = 250     // characters for what stands between head and tail, and behind them
	maxCommandBytes       = 100_000 // the kernel takes 128 KiB for one argument
	pipeGrace             = 200 * time.Millisecond
	defaultPath           = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// Options says what the tools may do.
type Options struct {
	// Bash offers the shell.
	Bash bool
	// Sandbox runs the shell's commands; nil is one without confinement. Make
	// one for the whole program, so that what is missing is told once.
	Sandbox *sandbox.Sandbox
	// OutputMaxChars bounds the text of a result; default 20000, at least 1000.
	OutputMaxChars int
	// BashTimeout is for commands that ask for none, default 120 s;
	// MaxBashTimeout the longest they may ask for, default 600 s.
	BashTimeout, MaxBashTimeout time.Duration
	// Env is added to the commands' environment, NAME=value; it holds nothing of
	// the program's own but PATH. No secrets: the model can read it.
	Env []string
	// Fetch, when set, offers web_fetch.
	Fetch *FetchOptions
	// ReadOnly are further paths that confined commands may read.
	ReadOnly []string
	// Network lets confined commands use the network.
	Network bool
	// Limits bound each command.
	Limits sandbox.Limits
}

// Tools returns the tools over ws: read_file, write_file, str_replace, ls, glob,
// grep, and bash and web_fetch if they are allowed.
func Tools(ws *Workspace, o Options) []Tool {
	if o.OutputMaxChars <= 0 {
		o.OutputMaxChars = 20000
	}
	o.OutputMaxChars = max(o.OutputMaxChars, 1000)
	if o.BashTimeout <= 0 {
		o.BashTimeout = defaultBashTimeout
	}
	if o.MaxBashTimeout <= 0 {
		o.MaxBashTimeout = max(defaultMaxBashTimeout, o.BashTimeout)
	}
	if o.Sandbox == nil {
		o.Sandbox = sandbox.New(sandbox.None, nil)
	}
	var tools []Tool
	if o.Bash {
		tools = append(tools, bash(ws, o))
	}
	if o.Fetch != nil {
		tools = append(tools, webFetch(*o.Fetch, o.OutputMaxChars))
	}
	return append(tools,
		readFile(ws, o.OutputMaxChars), writeFile(ws), strReplace(ws),
		listDir(ws, o.OutputMaxChars), glob(ws, o.OutputMaxChars), grep(ws, o.OutputMaxChars))
}

func bash(w *Workspace, o Options) Tool {
	return &fileTool{
		writes: true,
		spec: model.ToolSpec{
			Name: "bash",
			Description: fmt.Sprintf("Run a shell command in the workspace and read what it prints. Nothing goes on in the background: all processes end with the call. "+
				"No input can be given. Time limit %d s unless timeout_seconds says otherwise.", int(o.BashTimeout.Seconds())),
			Parameters: schema("command", fmt.Sprintf(`
				"command":{"type":"string","description":"the command"},
				"timeout_seconds":{"type":"number","description":"time limit, at most %d"}`, int(o.MaxBashTimeout.Seconds()))),
		},
		call: func(ctx context.Context, a *args) (Result, error) {
			command := a.need("command", "cmd", "script")
			limit := a.num("timeout_seconds", a.num("timeout", o.BashTimeout.Seconds(), 0, 1e9), 0, 1e9)
			switch {
			case a.err != nil:
				return Result{}, a.err
			case len(command) > maxCommandBytes:
				return Result{}, fmt.Errorf("command has %d bytes; want at most %d: write a script file and run that", len(command), maxCommandBytes)
			case strings.ContainsRune(command, 0):
				return Result{}, errors.New("command holds a NUL character")
			}
			timeout := min(time.Duration(limit*float64(time.Second)), o.MaxBashTimeout)
			if timeout <= 0 {
				timeout = o.BashTimeout
			}
			return runBash(ctx, w, o, command, timeout)
		},
	}
}

// runBash runs one command. When it returns, nothing of the command is left.
func runBash(ctx context.Context, w *Workspace, o Options, command string, timeout time.Duration) (Result, error) {
	shell, err := findShell()
	if err != nil {
		return Result{}, err
	}
	if err := w.prepare(); err != nil {
		return Result{}, err
	}
	r, out, err := os.Pipe()
	if err != nil {
		return Result{}, fmt.Errorf("make a pipe: %w", err)
	}
	defer r.Close()
	p, err := o.Sandbox.Start(sandbox.Command{
		Argv: []string{shell, "-c", command}, Dir: w.real, Env: environment(w, o.Env), Output: out, ReadOnly: readable(ctx, o), Lease: sandbox.LeaseOf(ctx),
		Network: o.Network, Limits: o.Limits,
	})
	out.Close()
	if err != nil {
		return Result{}, fmt.Errorf("the shell could not be started: %w", err)
	}
	full := &overflow{w: w}
	c := newCapture(o.OutputMaxChars, full)
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 32<<10)
		for {
			n, err := r.Read(buf)
			if n > 0 {
				c.write(buf[:n])
				Progress(ctx)
			}
			if err != nil {
				return
			}
		}
	}()

	timer := time.NewTimer(timeout)
	defer timer.Stop()
	Progress(ctx) // it has begun, which may have taken a while
	timedOut := false
	select {
	case <-p.Done():
	case <-timer.C:
		timedOut = true
		Progress(ctx) // its own limit is dealt with here, and the model is told
	case <-ctx.Done():
	}
	p.Stop()
	exit, fault := p.Exit()
	// All writers are dead, so the pipe ends now. Should one be left after all,
	// its hold on the pipe does not keep us.
	_ = r.SetReadDeadline(time.Now().Add(pipeGrace))
	<-read
	text := c.text()
	// Output whose text fits after all needs no file.
	kept := full.close(c.shortened && ctx.Err() == nil && fault == nil)

	if ctx.Err() != nil {
		return Result{}, context.Cause(ctx)
	}
	if fault != nil {
		return Result{}, fault
	}
	return report(text, kept, exit, timedOut, timeout), nil
}

func report(text, kept string, exit sandbox.Exit, timedOut bool, timeout time.Duration) Result {
	res := Result{Metadata: map[string]any{"exit_code": exit.Code}}
	note := ""
	switch {
	case timedOut:
		note = fmt.Sprintf("(stopped: the time limit of %v was reached; its processes were ended)", timeout)
		res.IsError = true
		res.Metadata["timed_out"] = true
	case exit.Code != 0:
		note = fmt.Sprintf("(exit code %d)", exit.Code)
		res.IsError = true
	case text == "":
		note = "(no output, exit code 0)"
	}
	if kept != "" {
		note = strings.TrimPrefix(note+"\n"+kept, "\n")
	}
	if exit.Leftover {
		note += "\n(some of its processes could not be ended)"
		res.Metadata["leftover"] = true
	}
	if text != "" && note != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	res.Text = text + note
	return res
}

func findShell() (string, error) {
	for _, name := range []string{"bash", "sh"} {
		if p, err := exec.LookPath(name); err == nil {
			if p, err = filepath.Abs(p); err == nil {
				return p, nil
			}
		}
	}
	return "", errors.New("there is no shell on this machine")
}

// environment is what a command sees: nothing of ours but PATH.
func environment(w *Workspace, extra []string) []string {
	path := os.Getenv("PATH")
	if path == "" {
		path = defaultPath
	}
	return append([]string{
		"PATH=" + path, "HOME=" + w.real, "PWD=" + w.real, "TMPDIR=" + filepath.Join(w.real, TempDir),
		"LANG=C.UTF-8", "TERM=dumb", "GIT_TERMINAL_PROMPT=0", "PAGER=cat",
	}, extra...)
}

// capture keeps the first and the last part of an output in bounded memory, and
// gives all of it to full as soon as it is longer than the first. One goroutine
// writes, and text is called after it has ended.
type capture struct {
	full       *overflow
	shortened  bool // text has left something out
	limit      int  // characters, and bytes of head and of tail
	head, tail []byte
	at         int // where the next byte of the tail goes, once it is full
	lost       int64
}

func newCapture(maxChars int, full *overflow) *capture { return &capture{limit: maxChars, full: full} }

func (c *capture) write(p []byte) {
	if len(c.head)+len(p) > c.limit {
		if !c.full.begun {
			c.full.write(c.head)
		}
		c.full.write(p)
	}
	if n := min(c.limit-len(c.head), len(p)); n > 0 {
		c.head = append(c.head, p[:n]...)
		p = p[n:]
	}
	if over := len(p) - c.limit; over > 0 { // only its end can stay
		c.lost += int64(over)
		p = p[over:]
	}
	if n := min(c.limit-len(c.tail), len(p)); n > 0 {
		c.tail = append(c.tail, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(c.tail[c.at:], p)
		c.lost += int64(n)
		c.at = (c.at + n) % c.limit
		p = p[n:]
	}
}

// text gives at most limit characters: all, or head and tail with a mark
// between them.
func (c *capture) text() string {
	tail := append(append([]byte(nil), c.tail[c.at:]...), c.tail[:c.at]...)
	if c.lost == 0 {
		s := visible(string(c.head) + string(tail))
		n := utf8.RuneCountInString(s)
		if n <= c.limit {
			return s
		}
		c.shortened = true
		r := []rune(s)
		half := (c.limit - cutRoom) / 2
		return cutMark(string(r[:half]), n-2*half, "characters", string(r[n-half:]))
	}
	c.shortened = true
	half := (c.limit - cutRoom) / 2
	h, t := []rune(visible(string(c.head))), []rune(visible(string(tail)))
	h, t = h[:min(half, len(h))], t[max(len(t)-half, 0):]
	left := c.lost + int64(len(c.head)+len(tail)-len(string(h))-len(string(t)))
	return cutMark(string(h), int(left), "bytes", string(t))
}

func cutMark(head string, n int, unit, tail string) string {
	return fmt.Sprintf("%s\n… (%d %s left out here) …\n%s", head, n, unit, tail)
}
