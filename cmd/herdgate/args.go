package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// onlyArg takes exactly one argument, and says which one is meant.
func onlyArg(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		want := fmt.Sprintf("%s wants one argument, %s", strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" "), name)
		switch {
		case len(args) == 1:
			return nil
		case len(args) == 0:
			return fmt.Errorf("%s, and got none", want)
		case name == "PROMPT":
			return fmt.Errorf("%s, and got %d: put the prompt in quotes", want, len(args))
		}
		return fmt.Errorf("%s, and got %d: give one at a time", want, len(args))
	}
}
