// Command herdgate is all of Herdgate in one program: the services, alone or
// together on an embedded NATS server, and the verbs to work with them.
// `herdgate help` lists them.
package main

import (
	"os"

	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/internal/sandbox"
)

func main() {
	// Tools run in children that are this program again.
	if sandbox.Main() {
		return
	}
	os.Exit(process.Main(newRoot()))
}
