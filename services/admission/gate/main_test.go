package gate

import (
	"flag"
	"os"
	"testing"
)

// The defaults of rapid are too few for so many interleavings; a command line
// may still say otherwise.
func TestMain(m *testing.M) {
	for name, value := range map[string]string{"rapid.checks": "3000", "rapid.steps": "60", "rapid.nofailfile": "true"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	flag.Parse()
	os.Exit(m.Run())
}
