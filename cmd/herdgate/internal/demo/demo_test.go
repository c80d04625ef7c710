package demo

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// call matches the deprecated interface in each of the three languages.
var call = regexp.MustCompile(`\b(legacy_client\.fetch_order|legacyclient\.FetchOrder|legacyClient\.fetchOrder)\(`)

// mention reports whether the match at position at of a line is only spoken of:
// in a comment, or quoted in documentation.
func mention(line string, at int) bool {
	before := line[:at]
	return strings.ContainsAny(before, "#`") || strings.Contains(before, "//") ||
		strings.HasPrefix(strings.TrimSpace(line), "*")
}

func scan(t *testing.T) (uses, decoys []string, files int) {
	t.Helper()
	err := fs.WalkDir(FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		data, err := fs.ReadFile(FS(), path)
		if err != nil {
			return err
		}
		for i, line := range strings.Split(string(data), "\n") {
			at := call.FindStringIndex(line)
			switch place := fmt.Sprintf("%s:%d", path, i+1); {
			case at == nil:
			case mention(line, at[0]):
				decoys = append(decoys, place)
			default:
				uses = append(uses, place)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(uses)
	return uses, decoys, files
}

func TestTruthIsWhatTheFilesHold(t *testing.T) {
	t.Parallel()
	want, err := Truth()
	if err != nil {
		t.Fatal(err)
	}
	uses, decoys, files := scan(t)
	if !slices.Equal(uses, want) {
		t.Errorf("uses in the files:\n%s\ntruth.json:\n%s", strings.Join(uses, "\n"), strings.Join(want, "\n"))
	}
	if files < 25 || len(decoys) < 6 {
		t.Errorf("the sample has %d files and %d decoys; want at least 25 and 6, or it proves little", files, len(decoys))
	}
	for _, part := range []string{"services/", "workers/", "web/"} {
		if !slices.ContainsFunc(want, func(s string) bool { return strings.HasPrefix(s, part) }) {
			t.Errorf("no use below %s; each sub-agent must have something to find", part)
		}
	}
}

func TestCopyTo(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "workspace")
	if err := CopyTo(dir); err != nil {
		t.Fatal(err)
	}
	err := fs.WalkDir(FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want, err := fs.ReadFile(FS(), path)
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(path)))
		if err != nil {
			return err
		}
		if string(got) != string(want) {
			t.Errorf("%s differs from the embedded file", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	changed := filepath.Join(dir, "README.md")
	if err := os.WriteFile(changed, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CopyTo(dir); err != nil {
		t.Fatalf("second copy: %v", err)
	}
	if b, _ := os.ReadFile(changed); string(b) != "mine" {
		t.Errorf("a second copy has overwritten a changed file")
	}
}

func TestPromptNamesEveryPart(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"services/", "workers/", "web/"} {
		if !strings.Contains(Prompt(), part) {
			t.Errorf("the prompt does not name %s", part)
		}
	}
}
