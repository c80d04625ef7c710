package agentfile_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agentfile"
	"github.com/herdgate/herdgate/internal/subagent"
)

func write(t *testing.T, file, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func doc(name string) string {
	return fmt.Sprintf("---\nname: %s\ndescription: d\n---\nprompt of %s\n", name, name)
}

func names(files []subagent.File) []string {
	var out []string
	for _, f := range files {
		out = append(out, f.Name)
	}
	return out
}

// Folders are read in order, with what is in them in order; what is broken, double
// or outside is told with its place, and the others go on.
func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	write(t, filepath.Join(a, "zeta.md"), doc("zeta"))
	write(t, filepath.Join(a, "sub", "deep.MD"), doc("deep"))
	write(t, filepath.Join(a, "README.md"), "# Agents\n")
	write(t, filepath.Join(a, "notes.txt"), "no definition")
	write(t, filepath.Join(a, ".hidden", "x.md"), doc("hidden"))
	broken := write(t, filepath.Join(a, "broken.md"), "---\nname: bad name\ndescription: d\n---\np\n")
	write(t, filepath.Join(b, "..data", "linked.md"), doc("linked"))
	double := write(t, filepath.Join(b, "double.md"), doc("zeta"))
	outside := write(t, filepath.Join(dir, "secret.md"), doc("secret"))
	for link, target := range map[string]string{"linked.md": "..data/linked.md", "out.md": outside, "gone.md": "nowhere.md"} {
		if err := os.Symlink(target, filepath.Join(b, link)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(b, "big.md"), strings.Repeat("x", subagent.MaxMarkdownBytes+1))
	missing := filepath.Join(dir, "missing")

	files, warnings := agentfile.Load([]string{a, missing, b}, subagent.Markdown{})
	if got := names(files); !slices.Equal(got, []string{"deep", "zeta", "linked"}) {
		t.Errorf("files = %q", got)
	}
	if files[1].Path != filepath.Join(a, "zeta.md") || files[1].SystemPrompt != "prompt of zeta" {
		t.Errorf("zeta = %+v", files[1])
	}
	var told []string
	for _, w := range warnings {
		told = append(told, w.String())
	}
	for _, want := range []string{
		broken + ":2: the definition is left out: name is \"bad name\"; want", missing + ": the folder cannot be read",
		double + ": the definition is left out: " + filepath.Join(a, "zeta.md"),
		filepath.Join(b, "out.md") + ": it cannot be read", filepath.Join(b, "gone.md") + ": it cannot be read",
		filepath.Join(b, "big.md") + ":1: the definition is left out: the file has",
	} {
		if !slices.ContainsFunc(told, func(s string) bool { return strings.HasPrefix(s, want) }) {
			t.Errorf("nothing tells %q", want)
		}
	}
	if len(told) != 6 {
		t.Errorf("told: %s", strings.Join(told, "\n"))
	}
}

// What a folder holds is told as changed only when its content has changed, in
// whatever way it was replaced.
func TestReader(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := write(t, filepath.Join(dir, "one.md"), doc("one"))
	var log strings.Builder
	r := agentfile.NewReader([]string{dir}, subagent.Markdown{}, zerolog.New(&log))
	step := func(what string, changed bool, want ...string) {
		t.Helper()
		files, got := r.Read()
		if got != changed || !slices.Equal(names(files), want) {
			t.Errorf("%s: %q, changed %v; want %q, %v", what, names(files), got, want, changed)
		}
	}
	step("at first", true, "one")
	step("unchanged", false)
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, doc("two"))
	if err := os.Chtimes(file, info.ModTime(), info.ModTime()); err != nil { // same size, same time
		t.Fatal(err)
	}
	step("another content", true, "two")
	write(t, file, "nothing")
	step("broken", true)
	step("still broken", false)
	if n := strings.Count(log.String(), "one.md:1"); n != 1 {
		t.Errorf("told %d times, want once: %s", n, log.String())
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	step("removed", true)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	step("the folder is gone", true)
}
