// Package schema holds JSON Schemas (draft 2020-12) of everything that travels
// over NATS, the AsyncAPI document that says on which subject, and the words that
// messages use. It needs the standard library alone.
//
// A schema says what this version writes, or what it takes. Objects stay open:
// readers must ignore fields that they do not know.
//
// The files are made from the Go types; after a change to one of those, run
// go generate ./test/contract.
package schema

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

//go:embed v1/*.json asyncapi.yaml vocabulary.json
var files embed.FS

// ErrUnknown is returned for a name that no schema has.
var ErrUnknown = errors.New("no such schema")

// Names lists the schemas in alphabetical order: task_request, event.task_queued,
// events.list.request and so on.
func Names() []string {
	entries, err := fs.ReadDir(files, "v1")
	if err != nil {
		panic(err) // it is part of the program
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), ".json")
	}
	slices.Sort(names)
	return names
}

// Get returns the schema of that name.
func Get(name string) ([]byte, error) {
	if !fs.ValidPath(name) || strings.Contains(name, "/") {
		return nil, fmt.Errorf("%w: %.80q", ErrUnknown, name)
	}
	b, err := files.ReadFile("v1/" + name + ".json")
	if err != nil {
		return nil, fmt.Errorf("%w: %.80q", ErrUnknown, name)
	}
	return b, nil
}

// AsyncAPI returns the AsyncAPI document in YAML. Its payloads refer to the
// schemas as ./v1/NAME.json.
func AsyncAPI() []byte { return read("asyncapi.yaml") }

// Vocabulary returns, as JSON, all words that messages use: event types, states,
// statuses, stop reasons, error codes.
func Vocabulary() []byte { return read("vocabulary.json") }

func read(name string) []byte {
	b, err := files.ReadFile(name)
	if err != nil {
		panic(err) // it is part of the program
	}
	return b
}
