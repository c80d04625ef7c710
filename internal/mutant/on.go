//go:build herdgate_mutant

package mutant

import "os"

var chosen = os.Getenv("MUTANT")

var (
	SkipFence = chosen == "skip-fence"
	AckEarly  = chosen == "ack-early"
	Requeue   = chosen == "requeue"
)
