package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// binary is the program under test: these tests run it as a user does.
var binary string

func TestMain(m *testing.M) {
	if os.Getenv(mcpClientEnv) != "" {
		os.Exit(mcpClient())
	}
	os.Exit(buildAndRun(m))
}

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "herdgate-cli-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "herdgate")
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build herdgate: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// deadline bounds everything that a test waits for. It is far above what
// anything takes, because the machine may be busy.
const deadline = 60 * time.Second

// proc is a running herdgate.
type proc struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout output
	stderr output
	done   chan struct{}
	code   int
	quiet  bool // who waits for the end reports the output
}

// output collects what a process writes and wakes up those who wait for it.
type output struct {
	mu      sync.Mutex
	text    bytes.Buffer
	changed chan struct{}
}

func (o *output) add(line []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text.Write(line)
	if o.changed != nil {
		close(o.changed)
		o.changed = nil
	}
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// next returns the text and what is closed when there is more.
func (o *output) next() (string, <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.changed == nil {
		o.changed = make(chan struct{})
	}
	return o.text.String(), o.changed
}

// cleanEnv is our environment without what changes Herdgate's behaviour.
func cleanEnv() []string {
	var env []string
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "HERDGATE_") || name == openAIKey || name == "NATS_CONTEXT" {
			continue
		}
		env = append(env, v)
	}
	return env
}

// start starts herdgate in dir, with further variables in env.
func start(t *testing.T, dir string, env []string, args ...string) *proc {
	t.Helper()
	return startWith(t, nil, dir, env, args...)
}

// startWith is start with a standard input.
func startWith(t *testing.T, stdin io.Reader, dir string, env []string, args ...string) *proc {
	t.Helper()
	p := &proc{t: t, cmd: exec.Command(binary, args...), done: make(chan struct{})}
	p.cmd.Stdin = stdin
	p.cmd.Dir = dir
	p.cmd.Env = append(cleanEnv(), env...)
	p.cmd.WaitDelay = 5 * time.Second
	var readers sync.WaitGroup
	for _, s := range []struct {
		open func() (io.ReadCloser, error)
		out  *output
	}{{p.cmd.StdoutPipe, &p.stdout}, {p.cmd.StderrPipe, &p.stderr}} {
		r, err := s.open()
		if err != nil {
			t.Fatal(err)
		}
		readers.Go(func() {
			b := bufio.NewReader(r)
			for {
				line, err := b.ReadBytes('\n')
				s.out.add(line)
				if err != nil {
					return
				}
			}
		})
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		readers.Wait()
		err := p.cmd.Wait()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			p.code = exit.ExitCode()
		} else if err != nil {
			p.code = -1
		}
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		if t.Failed() && !p.quiet {
			t.Logf("herdgate %s\nstdout:\n%s\nstderr:\n%s", strings.Join(args, " "), clip(p.stdout.String()), clip(p.stderr.String()))
		}
	})
	return p
}

func clip(s string) string {
	const most = 6000
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}

// wait returns the exit code.
func (p *proc) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.code
	case <-time.After(deadline):
		p.t.Fatalf("herdgate %s has not ended within %s", strings.Join(p.cmd.Args[1:], " "), deadline)
		return -1
	}
}

// saw waits until the output matches and returns the match with its groups.
func (p *proc) saw(o *output, pattern string) []string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	timeout := time.After(deadline)
	for {
		text, more := o.next()
		if m := re.FindStringSubmatch(text); m != nil {
			return m
		}
		select {
		case <-more:
		case <-p.done:
			text, _ = o.next()
			if m := re.FindStringSubmatch(text); m != nil {
				return m
			}
			p.t.Fatalf("herdgate %s ended with %d without %q", strings.Join(p.cmd.Args[1:], " "), p.code, pattern)
		case <-timeout:
			p.t.Fatalf("herdgate %s has not said %q within %s", strings.Join(p.cmd.Args[1:], " "), pattern, deadline)
		}
	}
}

func (p *proc) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// result is what a verb said that has ended.
type result struct {
	code           int
	stdout, stderr string
}

func herdgate(t *testing.T, dir string, env []string, args ...string) result {
	t.Helper()
	p := start(t, dir, env, args...)
	p.quiet = true
	code := p.wait()
	return result{code, p.stdout.String(), p.stderr.String()}
}

func (r result) want(t *testing.T, code int) result {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit code %d, want %d\nstdout:\n%s\nstderr:\n%s", r.code, code, clip(r.stdout), clip(r.stderr))
	}
	return r
}

func contains(t *testing.T, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s lacks %q:\n%s", what, part, clip(text))
		}
	}
}

func matches(t *testing.T, what, text string, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile("(?m)" + p).MatchString(text) {
			t.Errorf("%s does not match %q:\n%s", what, p, clip(text))
		}
	}
}

func writeFile(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// up starts everything in dir and returns the address of its HTTP API.
func up(t *testing.T, dir string, env []string, args ...string) (*proc, string) {
	t.Helper()
	p := start(t, dir, env, append([]string{"up", "--http-addr", "127.0.0.1:0", "--log-format", "json"}, args...)...)
	m := p.saw(&p.stderr, `"http":"(http://[^"]+)".*herdgate is up`)
	return p, m[1]
}

func stopped(t *testing.T, p *proc) {
	t.Helper()
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
}
