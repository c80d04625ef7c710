// Command gen writes the list of tags that are escaped. It runs in the folder of
// package prompt, by go generate.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/herdgate/herdgate/internal/prompt/internal/tags"
)

func main() {
	names, err := tags.Collect(filepath.Join("..", ".."))
	if err == nil {
		err = os.WriteFile("tags_gen.go", []byte(tags.Source(names)), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}
