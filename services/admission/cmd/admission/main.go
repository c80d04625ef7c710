// Command admission is Herdgate's gate as a program of its own: the same as
// `herdgate admission`.
package main

import (
	"os"

	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/services/admission"
)

func main() {
	os.Exit(process.Main(process.Command("admission", "the gate: lets tasks through in order, never more than max_running at once", admission.Serve)))
}
