package rungroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"
)

// childEnv makes the test binary play a process under signals.
const childEnv = "HERDGATE_TEST_RUNGROUP_CHILD"

func TestMain(m *testing.M) {
	if mode := os.Getenv(childEnv); mode != "" {
		os.Exit(child(mode))
	}
	goleak.VerifyTestMain(m)
}

// limit is the deadline of every wait in these tests: long, because nothing
// waits for it unless something is broken.
const limit = 20 * time.Second

func wait(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(limit):
		t.Fatalf("%s did not happen within %s", what, limit)
	}
}

// until returns a component that waits for the end of its context.
func until(name string, after func(ctx context.Context) error) Component {
	return Component{Name: name, Run: func(ctx context.Context) error {
		<-ctx.Done()
		if after == nil {
			return nil
		}
		return after(ctx)
	}}
}

// result runs f and returns its error, failing the test when it hangs.
func result(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(limit):
		t.Fatalf("group did not return within %s", limit)
		return nil
	}
}

func TestFirstToReturnStopsTheRest(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		first error
		rest  error
		want  []error
	}{
		"nil":                   {nil, nil, nil},
		"error":                 {boom, nil, []error{boom}},
		"both":                  {boom, os.ErrClosed, []error{boom, os.ErrClosed}},
		"cancelled is no error": {nil, fmt.Errorf("wrapped: %w", context.Canceled), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var joined bool
			err := result(t, func() error {
				return Run(t.Context(), zerolog.Nop(), limit,
					Component{"first", func(context.Context) error { return c.first }},
					until("rest", func(context.Context) error { joined = true; return c.rest }))
			})
			if !joined {
				t.Error("group returned before its component had")
			}
			for _, want := range c.want {
				if !errors.Is(err, want) {
					t.Errorf("Run() = %v, want %v in it", err, want)
				}
			}
			if len(c.want) == 0 && err != nil {
				t.Errorf("Run() = %v, want nil", err)
			}
			if c.first != nil && !strings.Contains(err.Error(), "first: boom") {
				t.Errorf("Run() = %v, want the name of the component", err)
			}
		})
	}
}

// A component that gives up with context.Canceled although nobody asked it to
// stop has failed.
func TestCancelledWithoutStopIsAnError(t *testing.T) {
	t.Parallel()
	err := result(t, func() error {
		return Run(t.Context(), zerolog.Nop(), limit, Component{"a", func(context.Context) error { return context.Canceled }})
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Run() = %v, want context.Canceled", err)
	}
}

func TestNoComponents(t *testing.T) {
	t.Parallel()
	if err := Run(t.Context(), zerolog.Nop(), limit); err != nil {
		t.Errorf("Run() without components = %v, want nil", err)
	}
}

// The end of the context means "no new work"; work goes on until grace is over.
func TestGrace(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	const grace = 50 * time.Millisecond
	var cause error
	var worked time.Duration
	var log bytes.Buffer
	err := result(t, func() error {
		return Run(ctx, zerolog.New(zerolog.SyncWriter(&log)), grace,
			until("worker", func(ctx context.Context) error {
				began := time.Now()
				hard := Hard(ctx)
				if hard.Err() != nil {
					t.Error("the work context ended together with the other one")
				}
				<-hard.Done()
				worked, cause = time.Since(began), context.Cause(hard)
				return hard.Err()
			}),
			Component{"stopper", func(ctx context.Context) error { cancel(); <-ctx.Done(); return nil }})
	})
	if err != nil {
		t.Errorf("Run() = %v, want nil: being cut off is a clean end", err)
	}
	if !errors.Is(cause, ErrGraceOver) || worked < grace/2 {
		t.Errorf("work ended after %s because of %v, want about %s and ErrGraceOver", worked, cause, grace)
	}
	if !strings.Contains(log.String(), `"components":["worker"]`) {
		t.Errorf("log %s does not name who was cut off", log.String())
	}
}

// Work that ends within grace is not cut off.
func TestWorkFinishesInGrace(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	work := make(chan struct{})
	err := result(t, func() error {
		return Run(ctx, zerolog.Nop(), limit,
			until("worker", func(ctx context.Context) error {
				close(work)
				return Hard(ctx).Err()
			}))
	})
	wait(t, "work", work)
	if err != nil {
		t.Errorf("Run() = %v, want nil", err)
	}
}

// Values of the context reach the components, and their work context.
func TestValuesArePassedOn(t *testing.T) {
	t.Parallel()
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "v")
	err := result(t, func() error {
		return Run(ctx, zerolog.Nop(), limit, Component{"a", func(ctx context.Context) error {
			if ctx.Value(key{}) != "v" || Hard(ctx).Value(key{}) != "v" {
				return errors.New("value is missing")
			}
			return nil
		}})
	})
	if err != nil {
		t.Error(err)
	}
}

func TestHardOutsideOfAGroup(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if Hard(ctx).Err() == nil {
		t.Error("Hard of a plain context does not end with it")
	}
}

// A later stage is asked to stop only when the stage before is gone, and its
// work context outlives that one's.
func TestStagesStopInOrder(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var order []string
	note := func(s string) { mu.Lock(); defer mu.Unlock(); order = append(order, s) }
	var serverSoft, serverHard context.Context
	ready := make(chan struct{})
	err := result(t, func() error {
		return Stages{
			{
				until("client", func(ctx context.Context) error {
					<-Hard(ctx).Done() // takes all of its grace
					if serverSoft.Err() != nil || serverHard.Err() != nil {
						t.Error("the server was asked to stop before its client was gone")
					}
					note("client")
					return nil
				}),
				Component{"starter", func(ctx context.Context) error {
					<-ready
					cancel()
					<-ctx.Done()
					return nil
				}},
			},
			{},
			{Component{"server", func(ctx context.Context) error {
				serverSoft, serverHard = ctx, Hard(ctx)
				close(ready)
				<-ctx.Done()
				if Hard(ctx).Err() != nil {
					t.Error("the server's work context ended with that of the stage before")
				}
				note("server")
				return nil
			}}},
		}.Run(ctx, zerolog.Nop(), 30*time.Millisecond)
	})
	if err != nil || strings.Join(order, " ") != "client server" {
		t.Errorf("stopped in order %v with %v, want client, server", order, err)
	}
}

// The end of a component in the last stage stops the first one first.
func TestLastStageEndsFirst(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	err := result(t, func() error {
		return Stages{{until("client", nil)}, {Component{"server", func(context.Context) error { return boom }}}}.Run(t.Context(), zerolog.Nop(), limit)
	})
	if !errors.Is(err, boom) {
		t.Errorf("Run() = %v, want boom", err)
	}
}

// A component that ignores both contexts is named and left behind.
func TestStuckComponent(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	release := make(chan struct{})
	gone := make(chan struct{})
	err := result(t, func() error {
		return Stages{{
			Component{"stuck", func(context.Context) error { defer close(gone); <-release; return nil }},
			until("fine", nil),
		}}.run(ctx, zerolog.Nop(), time.Millisecond, 20*time.Millisecond)
	})
	close(release)
	wait(t, "end of the stuck component", gone)
	if !errors.Is(err, ErrStuck) || !strings.HasSuffix(err.Error(), ": stuck") {
		t.Errorf("Run() = %v, want ErrStuck that names the component alone", err)
	}
}

// A group inside a component follows the outer group's contexts.
func TestNestedGroups(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var cause error
	err := result(t, func() error {
		return Run(ctx, zerolog.Nop(), 20*time.Millisecond, Component{"outer", func(ctx context.Context) error {
			return Run(ctx, zerolog.Nop(), limit, until("inner", func(ctx context.Context) error {
				<-Hard(ctx).Done()
				cause = context.Cause(Hard(ctx))
				return nil
			}), Component{"trigger", func(ctx context.Context) error { cancel(); <-ctx.Done(); return nil }})
		}})
	})
	if err != nil || !errors.Is(cause, ErrGraceOver) {
		t.Errorf("Run() = %v, inner work ended because of %v; want nil, ErrGraceOver", err, cause)
	}
}

// Starting and stopping from many goroutines leaves nothing behind (goleak).
func TestStartStopStress(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 50 {
				ctx, cancel := context.WithCancel(context.Background())
				go cancel()
				if err := Run(ctx, zerolog.Nop(), limit, until("a", nil), until("b", nil), until("c", nil)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// Signals without a signal: the parent's end reaches soft alone, stop both.
func TestSignalsFollowTheParent(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	soft, hard, stop := Signals(ctx)
	cancel()
	wait(t, "end of soft", soft.Done())
	if hard.Err() != nil || Hard(soft) != hard {
		t.Error("the parent's end reached hard, or Hard(soft) is another context")
	}
	if Interrupted(soft) != nil {
		t.Errorf("Interrupted() = %v without a signal", Interrupted(soft))
	}
	stop()
	stop()
	wait(t, "end of hard", hard.Done())
}

// child is the process of TestSignals.
func child(mode string) int {
	soft, _, stop := Signals(context.Background())
	defer stop()
	say := func(s string) { fmt.Println(s) }
	err := Run(soft, zerolog.Nop(), time.Minute, Component{"worker", func(ctx context.Context) error {
		say("running")
		<-ctx.Done()
		say("draining " + fmt.Sprint(Interrupted(soft)))
		if mode == "quick" {
			return nil
		}
		<-Hard(ctx).Done()
		say("cut " + fmt.Sprint(context.Cause(Hard(ctx))))
		if mode == "stubborn" {
			select {} // only the third signal ends this
		}
		return nil
	}})
	if err != nil {
		say("error " + err.Error())
		return 1
	}
	say("done")
	return 0
}

// Real signals to a real process: the first drains, the second cuts off, the
// third kills.
func TestSignals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode    string
		signals []syscall.Signal
		// lines are what the child prints, the first before any signal.
		lines []string
		code  int // -1: killed by the last signal
	}{
		{"quick", []syscall.Signal{syscall.SIGTERM}, []string{"running", "draining terminated", "done"}, 0},
		{"quick", []syscall.Signal{syscall.SIGINT}, []string{"running", "draining interrupt", "done"}, 0},
		{"slow", []syscall.Signal{syscall.SIGTERM, syscall.SIGINT}, []string{"running", "draining terminated", "cut signal: interrupt", "done"}, 0},
		{"stubborn", []syscall.Signal{syscall.SIGINT, syscall.SIGINT, syscall.SIGTERM}, []string{"running", "draining interrupt", "cut signal: interrupt"}, -1},
	} {
		t.Run(fmt.Sprint(c.mode, c.signals), func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), childEnv+"="+c.mode)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			sent := 0
			for i, want := range c.lines {
				if !lines.Scan() || lines.Text() != want {
					t.Errorf("line %d = %q, want %q", i, lines.Text(), want)
					break
				}
				// Each line is the answer to the signal before.
				if sent < len(c.signals) {
					if err := cmd.Process.Signal(c.signals[sent]); err != nil {
						t.Errorf("signal %d: %v", sent, err)
					}
					sent++
				}
			}
			for lines.Scan() {
				t.Errorf("further line %q", lines.Text())
			}
			_ = cmd.Wait() // the state tells more
			if got := cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("exit code %d (%s), want %d", got, cmd.ProcessState, c.code)
			}
		})
	}
}
