// Command lead is Herdgate's lead as a program of its own: the same as
// `herdgate lead`.
package main

import (
	"os"

	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/services/lead"
)

func main() {
	os.Exit(process.Main(process.Command("lead", "HTTP API and the lead agent", lead.Serve)))
}
