package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Whoever forgets an argument, or the quotes around a prompt, is told what is wanted.
func TestOnlyArg(t *testing.T) {
	t.Parallel()
	cmd := &cobra.Command{Use: "show"}
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"TASK_ID", nil, "show wants one argument, TASK_ID, and got none"},
		{"TASK_ID", []string{"a", "b"}, "show wants one argument, TASK_ID, and got 2: give one at a time"},
		{"PROMPT", []string{"look", "around"}, "and got 2: put the prompt in quotes"},
	} {
		if err := onlyArg(c.name)(cmd, c.args); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with %q: %v, want %q", c.name, c.args, err, c.want)
		}
	}
	if err := onlyArg("PROMPT")(cmd, []string{"look around"}); err != nil {
		t.Error(err)
	}
}
