package fault

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/rs/zerolog"
)

func TestCatch(t *testing.T) {
	t.Parallel()
	plain := errors.New("plain")
	if err := Catch(func() error { return plain }); !errors.Is(err, plain) || As(err) != nil {
		t.Errorf("an error = %v", err)
	}
	if err := Catch(func() error { return nil }); err != nil || As(err) != nil {
		t.Errorf("no error = %v", err)
	}
	var m map[string]int
	err := Catch(func() error { m["x"] = 1; return nil })
	if f := As(fmt.Errorf("read: %w", err)); f == nil || f.Error() != "internal fault: assignment to entry in nil map" {
		t.Fatalf("a panic = %v", err)
	}
	var log bytes.Buffer
	l := zerolog.New(&log)
	As(err).Log(l.Error()).Msg("caught")
	if !strings.Contains(log.String(), "nil map") || !strings.Contains(log.String(), "TestCatch") {
		t.Errorf("log = %s, want the panic's text and the stack with this function", log.String())
	}
	again := Catch(func() error { panic(As(err)) })
	if As(again) != As(err) {
		t.Errorf("caught twice = %v", again)
	}
}

// What a panic says may have been made of data.
func TestTextHoldsNoSecret(t *testing.T) {
	t.Parallel()
	type config struct{ Key string }
	for _, v := range []any{
		"connect nats://bob:hunter2@host:4222 failed",
		fmt.Errorf("header Authorization: Bearer hunter2"),
		`body {"api_key":"hunter2","x":1}`,
		"OPENAI_API_KEY=hunter2",
		"bearer hunter2",
		"key sk-hunter2hunter2",
		config{Key: "hunter2"},
		&config{Key: "hunter2"},
		[]byte("hunter2"),
	} {
		err := Catch(func() error { panic(v) })
		if s := err.Error(); strings.Contains(s, "hunter2") || !strings.HasPrefix(s, "internal fault: ") {
			t.Errorf("panic(%T) = %q", v, s)
		}
	}
	err := Catch(func() error { panic("line\n" + strings.Repeat("ä", 10_000)) })
	if s := err.Error(); len(s) > maxText+50 || strings.ContainsAny(s, "\n\ufffd") {
		t.Errorf("long text: %d bytes: %q", len(s), s)
	}
	if s := Catch(func() error { panic("index of the token is wrong") }).Error(); !strings.HasSuffix(s, "index of the token is wrong") {
		t.Errorf("harmless text = %q", s)
	}
}
