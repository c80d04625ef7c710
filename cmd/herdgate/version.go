package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/process"
)

// versionInfo is what version prints.
type versionInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	// Commit is empty when the build does not know it.
	Commit string `json:"commit,omitempty"`
	// Modified: the build had changes beyond the commit.
	Modified bool `json:"modified,omitempty"`
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versionInfo{Version: process.Version, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, s := range info.Settings {
					switch s.Key {
					case "vcs.revision":
						v.Commit = s.Value
					case "vcs.modified":
						v.Modified = s.Value == "true"
					}
				}
			}
			if a.json() {
				return printJSON(cmd.OutOrStdout(), v)
			}
			line := fmt.Sprintf("herdgate %s (%s, %s/%s", v.Version, v.Go, v.OS, v.Arch)
			if v.Commit != "" {
				line += ", commit " + v.Commit[:min(12, len(v.Commit))]
				if v.Modified {
					line += " with changes"
				}
			}
			return write(cmd.OutOrStdout(), []byte(line+")\n"))
		},
	}
}
