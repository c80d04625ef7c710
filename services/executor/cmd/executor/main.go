// Command executor is Herdgate's worker as a program of its own: the same as
// `herdgate executor`.
package main

import (
	"os"

	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/services/executor"
)

func main() {
	if sandbox.Main() {
		return
	}
	os.Exit(process.Main(process.Command("executor", "runs sub-agents: pulls grants, runs models and tools, publishes steps", executor.Serve)))
}
