package tool_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

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

// Files of output do not pile up: of those of this tool the oldest go, by number, size
// and age; what somebody else put beside them stays.
func TestOutputsAreBounded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		old  int
		size int64
		age  time.Duration
		left int // of the old ones
	}{
		"few":   {5, 10, time.Hour, 5},
		"many":  {120, 10, time.Hour, 99},
		"large": {5, 40 << 20, time.Hour, 3},
		"old":   {5, 10, 8 * 24 * time.Hour, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, func(o *tool.Options) { o.OutputMaxChars = 1000 })
			dir := filepath.Join(b.dir, ".tool-output")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			past := func(name string, size int64, at time.Time) {
				t.Helper()
				p := filepath.Join(dir, name)
				if err := errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, size), os.Chtimes(p, at, at)); err != nil {
					t.Fatal(err)
				}
			}
			then := time.Now().Add(-c.age)
			for i := range c.old {
				past(fmt.Sprintf("bash-%03d.txt", i), c.size, then.Add(-time.Duration(i)*time.Second))
			}
			past("mine.txt", 1, then.Add(-1000*time.Hour))
			found := fullIn.FindStringSubmatch(b.call("bash", m{"command": "seq 1 1000"}).Text)
			if found == nil || readAll(t, b.dir, found[1]) != seq(1000) {
				t.Errorf("the new file is %q", found)
			}
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			names := map[string]bool{}
			for _, e := range entries {
				names[e.Name()] = true
			}
			if len(names) != c.left+2 || !names["mine.txt"] {
				t.Errorf("%d files are left, want %d", len(names), c.left+2)
			}
			for i := range c.left {
				if !names[fmt.Sprintf("bash-%03d.txt", i)] {
					t.Errorf("number %d of the old ones, the newest being 0, is gone", i)
				}
			}
		})
	}
}

// The folder for temporary files is there for every command, whatever an earlier one
// did to it or to the workspace, and what lies in it for a day goes.
func TestTempFolder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, before := range []string{
		"true", "rm -rf .tmp; echo x >.tmp", "rm -rf .tmp; ln -s /etc .tmp", "rm -rf .tmp; mkfifo .tmp", "rm -rf .tmp; mkdir .tmp; chmod 0 .tmp", "chmod 0 .",
	} {
		b.ok("bash", m{"command": before})
		if got := b.ok("bash", m{"command": "echo fine >$TMPDIR/x && cat $TMPDIR/x && stat -c %a . .tmp"}); got != "fine\n755\n700\n" && !(before == "chmod 0 ." && got == "fine\n700\n700\n") {
			t.Errorf("after %q: %q", before, got)
		}
	}
	b.ok("bash", m{"command": "chmod 0 ."})
	again, err := tool.NewWorkspace(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if info, err := os.Stat(b.dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the workspace is %v, %v; want it open to its owner", info, err)
	}
	b.ok("bash", m{"command": "mkdir $TMPDIR/old $TMPDIR/new; echo 1 >$TMPDIR/old/f; touch -d '2 days ago' $TMPDIR/old"})
	if got := b.ok("bash", m{"command": "ls $TMPDIR"}); got != "new\nx\n" {
		t.Errorf("left in the folder: %q", got)
	}
}
