package provision

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestOldServerIsNamed(t *testing.T) {
	t.Parallel()
	a := Desired(Config{})
	if err := compareLevel(1, "2.11.0", a); err != nil {
		t.Errorf("level 1 = %v, want nil: message TTL is all that we need", err)
	}
	err := compareLevel(0, "2.10.29", a)
	if !errors.Is(err, ErrServerTooOld) {
		t.Fatalf("level 0 = %v, want ErrServerTooOld", err)
	}
	for _, want := range []string{"KV_HG_TASKS", "level 1", "2.10.29", "level 0"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
}

func TestPrintDuration(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		48 * time.Hour: "2d", 2 * time.Minute: "2m", 90 * time.Second: "1m30s", time.Hour: "1h", 10 * time.Second: "10s",
		90 * time.Minute: "1h30m", 20 * time.Minute: "20m", 36 * time.Hour: "36h",
	} {
		if got := printDuration(d); got != want {
			t.Errorf("printDuration(%v) = %q, want %q", d, got, want)
		}
	}
}
