package tool_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/tool"
)

// SKILL-06, ISO-01: folders beside the workspace can be read while a call may, and
// never written; what was read there says nothing of the workspace's files.
func TestFoldersBeside(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	aside, secret := filepath.Join(dir, "aside"), filepath.Join(dir, "secret")
	if err := errors.Join(os.Mkdir(aside, 0o755), os.WriteFile(secret, []byte("hidden"), 0o644), os.WriteFile(filepath.Join(aside, "a"), []byte("text"), 0o644),
		os.Symlink(secret, filepath.Join(aside, "out")), os.Symlink("a", filepath.Join(aside, "in")), os.WriteFile(filepath.Join(b.dir, "a"), []byte("mine"), 0o644)); err != nil {
		t.Fatal(err)
	}
	seen := &tool.Seen{}
	call := func(name string, args m) tool.Result {
		j, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		res, err := b.tools[name].Call(tool.WithFolders(tool.WithSeen(t.Context(), seen), []string{aside}), tool.Call{ID: "c", Args: j})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	for _, tt := range []struct {
		name string
		args m
		want string
		fail bool
		file string
	}{
		{"read_file", m{"path": aside + "/a"}, "text", false, aside + "/a"},
		{"read_file", m{"path": aside + "/x/../in"}, "text", false, aside + "/a"},
		{"read_file", m{"path": "a"}, "mine", false, ""},
		{"read_file", m{"path": aside + "/out"}, "outside", true, ""},
		{"read_file", m{"path": aside + "/../secret"}, "outside", true, ""},
		{"read_file", m{"path": aside + "x"}, "outside", true, ""},
		{"ls", m{"path": aside}, "a  4", false, ""},
		{"glob", m{"pattern": "*", "path": aside}, aside + "/a", false, ""},
		{"glob", m{"pattern": aside + "/*"}, aside + "/a", false, ""},
		{"grep", m{"pattern": "e", "path": aside}, aside + "/a:1: text", false, ""},
		{"grep", m{"pattern": "."}, "a:1: mine", false, ""},
		{"write_file", m{"path": aside + "/a", "content": "x"}, "can only be read", true, ""},
		{"str_replace", m{"path": aside + "/a", "old_str": "text", "new_str": "x"}, "can only be read", true, ""},
	} {
		res := call(tt.name, tt.args)
		file, _ := res.Metadata[tool.MetaFolderFile].(string)
		if res.IsError != tt.fail || !strings.Contains(res.Text, tt.want) || strings.Contains(res.Text, "hidden") || file != tt.file {
			t.Errorf("%s %v: %v %q, file %q; want %q, %q", tt.name, tt.args, res.IsError, res.Text, file, tt.want, tt.file)
		}
	}
	// Another agent's call may read none of it.
	b.fails("read_file", m{"path": aside + "/a"}, "outside of the workspace")
	seen = &tool.Seen{}
	call("read_file", m{"path": aside + "/a"})
	if res := call("write_file", m{"path": "a", "content": "x"}); !res.IsError || !strings.Contains(res.Text, "not read it") {
		t.Errorf("a read beside the workspace counts as one inside: %q", res.Text)
	}
}
