//go:build linux

package sandbox_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/sandbox"
)

func TestMain(m *testing.M) {
	if os.Getenv("SANDBOX_TEST_NO_MAIN") == "" {
		sandbox.Main()
	}
	if os.Getenv("SANDBOX_TEST_PROBE") != "" {
		probe() // never returns
	}
	if os.Getenv("SANDBOX_TEST_HOST") != "" {
		host() // never returns
	}
	goleak.VerifyTestMain(m)
}
