// Command eventsink is Herdgate's event store as a program of its own: the same as
// `herdgate eventsink`.
package main

import (
	"os"

	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/services/eventsink/serve"
)

func main() {
	os.Exit(process.Main(process.Command("eventsink", "stores events in a database and answers for them", serve.Serve)))
}
