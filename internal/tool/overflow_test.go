package tool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/tool"
)

var fullIn = regexp.MustCompile(`\(the full output is in (\S+), (\d+) bytes\)`)

// Output that is too long for a result is in a file of the workspace, whole and byte
// by byte, and the result says where.
func TestFullOutput(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(o *tool.Options) { o.OutputMaxChars = 1000 })
	for name, c := range map[string]struct {
		command string
		want    string
		code    int
	}{
		"text":   {"seq 1 1000", seq(1000), 0},
		"binary": {`i=0; while [ $i -lt 700 ]; do printf 'a\000\377'; i=$((i+1)); done`, strings.Repeat("a\x00\xff", 700), 0},
		"failed": {"head -c 5000 /dev/zero | tr '\\0' x; exit 3", strings.Repeat("x", 5000), 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res := b.call("bash", m{"command": c.command})
			found := fullIn.FindStringSubmatch(res.Text)
			if found == nil || res.Metadata["exit_code"] != c.code || found[2] != fmt.Sprint(len(c.want)) {
				t.Fatalf("result = %+v", res)
			}
			if got := readAll(t, b.dir, found[1]); got != c.want {
				t.Errorf("the file holds %d bytes, want %d: %.40q", len(got), len(c.want), got)
			}
		})
	}
}

func seq(n int) string {
	var s strings.Builder
	for i := range n {
		fmt.Fprintln(&s, i+1)
	}
	return s.String()
}

// No file is left by output that fits, though it has more bytes than characters, nor
// by a command that was stopped. One that cannot be made fails no command, and a link
// in its place leads nowhere.
func TestNoFullOutput(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(o *tool.Options) { o.OutputMaxChars = 1000 })
	b.ok("bash", m{"command": "i=0; while [ $i -lt 900 ]; do printf 'é'; i=$((i+1)); done"})
	if files, _ := filepath.Glob(filepath.Join(b.dir, ".tool-output", "*")); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	if err := os.Mkdir(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	text := b.ok("bash", m{"command": "rm -rf .tool-output; ln -s ../outside .tool-output; seq 1 1000"})
	if !strings.Contains(text, "could not be kept") || !strings.Contains(text, "outside of the workspace") {
		t.Errorf("result = %q", text)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("outside holds %v, %v", entries, err)
	}
}
