package tool_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/sandbox"
)

func TestMain(m *testing.M) {
	sandbox.Main()
	goleak.VerifyTestMain(m)
}
