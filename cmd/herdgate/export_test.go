package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What an export goes on behind: whole lines count, half of one is taken away, and a
// file that is none is left alone.
func TestOpenExport(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "events.jsonl")
	for name, c := range map[string]struct {
		text, left string
		last       uint64
		err        string
	}{
		"empty":        {"", "", 0, ""},
		"whole":        {"{\"seq\":3}\n{\"seq\":7}\n", "{\"seq\":3}\n{\"seq\":7}\n", 7, ""},
		"half a line":  {"{\"seq\":3}\n{\"seq\":7,", "{\"seq\":3}\n", 3, ""},
		"half alone":   {"{\"se", "", 0, ""},
		"not ours":     {"hello\n", "hello\n", 0, "events.jsonl:1 is not the next event"},
		"out of order": {"{\"seq\":7}\n{\"seq\":7}\n", "{\"seq\":7}\n{\"seq\":7}\n", 0, "events.jsonl:2 is not the next event"},
	} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, last, err := openExport(path)
		if err == nil {
			_, werr := f.WriteString("+")
			if cerr := f.Close(); werr != nil || cerr != nil {
				t.Fatal(werr, cerr)
			}
			c.left += "+"
		}
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) || last != c.last {
			t.Errorf("%s: last %d, %v; want %d, %q", name, last, err, c.last, c.err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != c.left {
			t.Errorf("%s: the file holds %q, %v; want %q", name, b, err, c.left)
		}
	}
}
