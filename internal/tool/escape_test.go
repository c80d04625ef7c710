//go:build linux

package tool_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ISO-01: the ways out of a workspace that only a system with /proc, hard links and
// devices has, tried with every file tool. (Links, dots and swapped folders: see
// TestLinks, TestPaths and TestSwappedFolder.)
func TestFileToolEscapes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	secret := filepath.Join(outside, "secret")
	if err := errors.Join(os.Mkdir(outside, 0o755), os.WriteFile(secret, []byte("hidden"), 0o644)); err != nil {
		t.Fatal(err)
	}
	fd, err := os.Open(outside)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	paths := []string{}
	for i, magic := range []string{
		"/proc/self/root" + outside, "/proc/self/cwd/" + strings.Repeat("../", 20) + outside, fmt.Sprintf("/proc/self/fd/%d", fd.Fd()),
		fmt.Sprintf("/dev/fd/%d", fd.Fd()), fmt.Sprintf("/proc/%d/root%s", os.Getpid(), outside), fmt.Sprintf("/proc/thread-self/fd/%d", fd.Fd()),
	} {
		link := fmt.Sprintf("magic%d", i)
		if err := os.Symlink(magic, filepath.Join(b.dir, link)); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, magic, link)
	}
	for _, p := range paths {
		file := p + "/secret"
		b.fails("read_file", m{"path": file}, "outside of the workspace")
		b.fails("write_file", m{"path": file, "content": "changed"}, "outside of the workspace")
		b.fails("write_file", m{"path": p + "/new", "content": "changed"}, "outside of the workspace")
		b.fails("str_replace", m{"path": file, "old_str": "hidden", "new_str": "changed"}, "outside of the workspace")
		for _, name := range []string{"ls", "glob", "grep"} {
			b.fails(name, m{"path": p, "pattern": "hidden"}, "outside of the workspace")
		}
	}
	if got, err := os.ReadFile(secret); err != nil || string(got) != "hidden" {
		t.Errorf("the file outside became %q, %v", got, err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("outside holds %v, %v", entries, err)
	}
}

// A file of the workspace that has a second name outside, whoever made it, is
// replaced and not written into.
func TestHardLinkIsReplaced(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	outside := filepath.Join(filepath.Dir(b.dir), "outside")
	for _, edit := range []func(){
		func() { b.ok("write_file", m{"path": "in", "content": "changed"}) },
		func() { b.ok("str_replace", m{"path": "in", "old_str": "first", "new_str": "changed"}) },
	} {
		if err := os.WriteFile(outside, []byte("first"), 0o644); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(filepath.Join(b.dir, "in"))
		if err := os.Link(outside, filepath.Join(b.dir, "in")); err != nil {
			t.Skip("the file system has no hard links:", err)
		}
		edit()
		if got, _ := os.ReadFile(outside); string(got) != "first" {
			t.Errorf("the file outside became %q", got)
		}
		if got := readAll(t, b.dir, "in"); got != "changed" {
			t.Errorf("the file inside is %q", got)
		}
	}
}

// What is no regular file is neither read nor written, and keeps nobody waiting.
func TestSpecialFiles(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	names := []string{"pipe", "socket"}
	if err := syscall.Mkfifo(filepath.Join(b.dir, "pipe"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(filepath.Join(b.dir, "socket"), unix.S_IFSOCK|0o666, 0); err != nil {
		t.Fatal(err)
	}
	// Endless, and of the machine: only root can make them.
	if err := unix.Mknod(filepath.Join(b.dir, "zero"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))); err == nil {
		names = append(names, "zero")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, n := range names {
			if res := b.call("read_file", m{"path": n}); !res.IsError {
				t.Errorf("read_file(%s) = %q", n, res.Text)
			}
			b.fails("write_file", m{"path": n, "content": "x"}, "no regular file")
			if res := b.call("str_replace", m{"path": n, "old_str": "a", "new_str": "b"}); !res.IsError {
				t.Errorf("str_replace(%s) = %q", n, res.Text)
			}
		}
		b.call("grep", m{"pattern": "x"})
		b.call("glob", m{"pattern": "**"})
		b.call("ls", m{})
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("a tool waits for a special file")
	}
}

// ISO-01: a file that a command swaps for a link at any moment leads nowhere, with
// any tool.
func TestSwappedFile(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	secret := filepath.Join(filepath.Dir(b.dir), "secret")
	if err := os.WriteFile(secret, []byte("hidden"), 0o644); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		name, other := filepath.Join(b.dir, "f"), filepath.Join(b.dir, "g")
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.WriteFile(other, []byte("fine"), 0o644)
			_ = os.Rename(other, name)
			_ = os.Symlink(secret, other)
			_ = os.Rename(other, name)
		}
	})
	for range 150 {
		for name, args := range map[string]m{
			"read_file": {"path": "f"}, "grep": {"path": "f", "pattern": "hid"}, "ls": {"path": "f"},
			"write_file": {"path": "f", "content": "changed"}, "str_replace": {"path": "f", "old_str": "hidden", "new_str": "changed"},
		} {
			if res := b.call(name, args); strings.Contains(res.Text, "hidden") {
				t.Errorf("%s = %q", name, res.Text)
			}
		}
	}
	close(stop)
	wg.Wait()
	if got, err := os.ReadFile(secret); err != nil || string(got) != "hidden" {
		t.Errorf("the file outside became %q, %v", got, err)
	}
}
