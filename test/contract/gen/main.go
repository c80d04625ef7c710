// Command gen writes what is made from the Go types: schemas, AsyncAPI document,
// vocabulary and golden messages. With -release it keeps the schemas as those of a
// released version. Run it in test/contract.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/herdgate/herdgate/test/contract"
)

func main() {
	release := flag.String("release", "", "keep today's schemas as those of this released `VERSION`, such as v1.1")
	flag.Parse()
	if err := contract.Write("../..", *release); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}
