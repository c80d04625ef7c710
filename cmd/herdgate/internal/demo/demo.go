// Package demo is the content of the bundled demonstration: a small sample
// project that still calls a deprecated interface, the prompt that asks for
// those calls, the script from which the offline model answers, and the truth
// to check an answer against.
//
// It holds data only; whoever runs the demonstration copies the project into
// the workspace of a thread.
package demo

import (
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// The folder begins with an underscore because it holds Go files that are not
// part of this module: the go tool leaves such folders alone.
//
//go:embed all:_project
var project embed.FS

//go:embed script.yaml
var scriptYAML []byte

//go:embed prompt.txt
var prompt string

//go:embed truth.json
var truth []byte

// FS returns the sample project, its top folder being the root.
func FS() fs.FS {
	sub, err := fs.Sub(project, "_project")
	if err != nil {
		// Sub fails on an invalid name only, and the name is a constant.
		panic(err)
	}
	return sub
}

// Script returns the script of the offline model, in YAML.
func Script() []byte { return append([]byte(nil), scriptYAML...) }

// Prompt returns what the lead is asked.
func Prompt() string { return strings.TrimSpace(prompt) }

// Truth returns the real uses of the deprecated interface as "path:line", with
// slashes, sorted.
func Truth() ([]string, error) {
	var places []string
	if err := json.Unmarshal(truth, &places); err != nil {
		return nil, fmt.Errorf("demo: truth.json: %w", err)
	}
	return places, nil
}

// CopyTo writes the sample project below dir, which is created when it is
// missing. Files that are already there are left as they are, so that a second
// demonstration in the same folder does not undo what an agent has changed.
func CopyTo(dir string) error {
	root := FS()
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(dir, filepath.FromSlash(path))
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		data, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		return writeNew(target, data)
	})
	if err != nil {
		return fmt.Errorf("demo: copy the sample project to %s: %w", dir, err)
	}
	return nil
}

// writeNew creates a file; one that exists already is no error.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}
