package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// host is one machine: a store with a folder of its own.
type host struct {
	testing.TB
	ctx   context.Context //nolint:containedctx // bounds every call of a test
	root  string
	store *Store
}

func hosts(t testing.TB, n int, change ...func(*Config)) []*host {
	t.Helper()
	srv, _ := natstest.New(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*natstest.Timeout)
	t.Cleanup(cancel)
	var out []*host
	for i := range n {
		h := &host{TB: t, ctx: ctx, root: t.TempDir()}
		cfg := Config{Bus: srv.Conn(fmt.Sprint("host-", i)), Root: h.root}
		for _, f := range change {
			f(&cfg)
		}
		var err error
		if h.store, err = Open(cfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := h.store.Close(); err != nil {
				t.Error(err)
			}
		})
		out = append(out, h)
	}
	return out
}

func (h *host) checkout(who string) *Copy {
	h.Helper()
	c, err := h.store.Checkout(h.ctx, "default", "th_1", who)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(c.Close)
	return c
}

func (h *host) push(c *Copy) Report {
	h.Helper()
	rep, err := c.Push(h.ctx, nil)
	if err != nil {
		h.Fatal(err)
	}
	return rep
}

func (c *Copy) put(t testing.TB, name, content string) {
	t.Helper()
	p := filepath.Join(c.Dir(), name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// look lists what is in a copy, with contents.
func (c *Copy) look(t *testing.T) string {
	t.Helper()
	var out []string
	err := fs.WalkDir(os.DirFS(c.Dir()), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		full := filepath.Join(c.Dir(), p)
		if d.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(full)
			out = append(out, p+"->"+target)
			return err
		}
		b, err := os.ReadFile(full)
		if info, ierr := d.Info(); ierr == nil && info.Mode()&0o100 != 0 {
			p += "*"
		}
		out = append(out, p+"="+string(b))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, " ")
}

// Executors with nothing in common but NATS see each other's files.
func TestHostsSeeTheSameFiles(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	a := h[0].checkout("a")
	a.put(t, "notes/x.txt", "from a")
	a.put(t, "run.sh", "true")
	a.put(t, "empty", "")
	a.put(t, "same", "from a")
	a.put(t, tool.TempDir+"/t", "temporary")
	if err := errors.Join(os.Chmod(filepath.Join(a.Dir(), "run.sh"), 0o755), os.Symlink("notes/x.txt", filepath.Join(a.Dir(), "link"))); err != nil {
		t.Fatal(err)
	}
	if rep := h[0].push(a); rep.Changed != 5 || rep.Note() != "" {
		t.Errorf("report = %+v", rep)
	}
	b := h[1].checkout("b")
	if got := b.look(t); got != "empty= link->notes/x.txt notes/x.txt=from a run.sh*=true same=from a" {
		t.Errorf("b sees %s", got)
	}
	// And back: changed, removed, made.
	b.put(t, "notes/x.txt", "from b")
	b.put(t, "new/deep/y", "1")
	if err := errors.Join(os.Remove(filepath.Join(b.Dir(), "link")), os.Remove(filepath.Join(b.Dir(), "empty"))); err != nil {
		t.Fatal(err)
	}
	h[1].push(b)
	if err := a.Pull(h[0].ctx); err != nil {
		t.Fatal(err)
	}
	if got := a.look(t); got != ".tmp/t=temporary new/deep/y=1 notes/x.txt=from b run.sh*=true same=from a" {
		t.Errorf("a sees %s", got)
	}
	// Other threads and tenants see nothing of it (CTX-01).
	for _, other := range [][2]string{{"default", "th_2"}, {"acme", "th_1"}} {
		c, err := h[1].store.Checkout(h[1].ctx, contract.Tenant(other[0]), contract.ThreadID(other[1]), "x")
		if err != nil {
			t.Fatal(err)
		}
		if got := c.look(t); got != "" {
			t.Errorf("%v sees %s", other, got)
		}
		c.Close()
	}
	// Nothing changed is no new snapshot.
	rev := a.base.rev
	if rep := h[0].push(a); rep.Changed != 0 {
		t.Errorf("report = %+v", rep)
	}
	if now, _, err := a.head(h[0].ctx); err != nil || now != rev {
		t.Errorf("revision %d became %d, %v", rev, now, err)
	}
}

// Siblings that work side by side lose nothing of each other, and a conflict is
// told.
func TestSiblings(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	first := h[0].checkout("first")
	first.put(t, "shared", "0")
	first.put(t, "gone", "0")
	h[0].push(first)

	a, b := h[0].checkout("a"), h[1].checkout("b")
	a.put(t, "shared", "by a")
	a.put(t, "of-a", "1")
	a.put(t, "gone", "by a")
	b.put(t, "shared", "by b")
	b.put(t, "of-b", "1")
	if err := os.Remove(filepath.Join(b.Dir(), "gone")); err != nil {
		t.Fatal(err)
	}
	if rep := h[0].push(a); len(rep.Conflicts) != 0 {
		t.Errorf("the first one is told of %v", rep.Conflicts)
	}
	rep := h[1].push(b)
	want := []Conflict{{Path: "gone"}, {Path: "shared", Kept: ".conflicts/b/shared"}}
	if !slices.Equal(rep.Conflicts, want) {
		t.Errorf("conflicts = %v, want %v", rep.Conflicts, want)
	}
	if note := rep.Note(); !strings.Contains(note, `"shared": the version of this task is ".conflicts/b/shared"`) || !strings.Contains(note, `"gone": was removed here, but not there`) {
		t.Errorf("note = %s", note)
	}
	if got := h[0].checkout("c").look(t); got != ".conflicts/b/shared=by b gone=by a of-a=1 of-b=1 shared=by a" {
		t.Errorf("the workspace is %s", got)
	}

	// Many at once: every one of them finds its place.
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			on := h[i%2]
			c, err := on.store.Checkout(on.ctx, "default", "th_many", fmt.Sprint("t", i))
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if err := os.WriteFile(filepath.Join(c.Dir(), fmt.Sprint("f", i)), fmt.Append(nil, i), 0o600); err != nil {
				t.Error(err)
			}
			if rep, err := c.Push(on.ctx, nil); err != nil || len(rep.Conflicts) > 0 {
				t.Errorf("push %d: %+v, %v", i, rep, err)
			}
		})
	}
	wg.Wait()
	c, err := h[0].store.Checkout(h[0].ctx, "default", "th_many", "x")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if n := len(c.base.snap.Files); n != 12 {
		t.Errorf("%d of 12 files are there", n)
	}
}

// I5, I8: a crash in the middle, or a lease that was lost, leaves the last
// snapshot; what dead processes left is removed, what living ones have is not.
func TestCrashLeavesTheLastSnapshot(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)[0]
	c := h.checkout("c")
	c.put(t, "f", "1")
	h.push(c)
	c.put(t, "f", "2")
	fenced := errors.New("fenced")
	if _, err := c.Push(h.ctx, func() error { return fenced }); !errors.Is(err, fenced) {
		t.Errorf("error = %v, want what the gate said", err)
	}
	stopped, stop := context.WithCancelCause(h.ctx)
	stop(fenced)
	if _, err := c.Push(stopped, nil); !errors.Is(err, fenced) {
		t.Errorf("error = %v, want the cause", err)
	}
	if got := h.checkout("d").look(t); got != "f=1" {
		t.Errorf("the workspace is %s", got)
	}
	// A process that was killed: its lock is free, its folder is there.
	dead := filepath.Join(h.root, copiesDir, "dead")
	if err := errors.Join(os.MkdirAll(filepath.Join(dead, "x"), 0o755), os.WriteFile(dead+".lock", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	again, err := Open(Config{Bus: h.store.bus, Root: h.root})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of a dead process is there: %v", err)
	}
	if got := c.look(t); got != "f=2" {
		t.Errorf("the copy of a living process is %s", got)
	}
}

// Limits are told by number, and nothing is stored then.
func TestLimits(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1, func(c *Config) { c.Limits = Limits{Files: 3, FileBytes: 100, Bytes: 150} })[0]
	for want, files := range map[string][]string{
		"more than 3 files":            {"a", "b", "c", "d"},
		"want at most 100":             {strings.Repeat("x", 101)},
		"more than 150 bytes together": {strings.Repeat("x", 90), strings.Repeat("y", 90)},
	} {
		c := h.checkout("c")
		for i, content := range files {
			c.put(t, fmt.Sprint(i), content)
		}
		if _, err := c.Push(h.ctx, nil); !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v, want %q", err, want)
		}
	}
	// Also when only both together are too many.
	a, b := h.checkout("a"), h.checkout("b")
	a.put(t, "a1", "")
	a.put(t, "a2", "")
	b.put(t, "b1", "")
	b.put(t, "b2", "")
	h.push(a)
	if _, err := b.Push(h.ctx, nil); !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), "4 files; want at most 3") {
		t.Errorf("error = %v", err)
	}
}

// What cannot be kept is told; what a command closed is kept all the same.
func TestOddFiles(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)[0]
	c := h.checkout("c")
	c.put(t, "closed/f", "1")
	c.put(t, "secret", "1")
	c.put(t, "bad\xff", "1")
	c.put(t, "new\nline", "1")
	if err := errors.Join(syscall.Mkfifo(filepath.Join(c.Dir(), "pipe"), 0o600), os.Chmod(filepath.Join(c.Dir(), "secret"), 0),
		os.Symlink("/etc/passwd", filepath.Join(c.Dir(), "out")), os.Chmod(filepath.Join(c.Dir(), "closed"), 0)); err != nil {
		t.Fatal(err)
	}
	rep := h.push(c)
	if want := []string{"bad\xff", "pipe"}; !slices.Equal(rep.LeftOut, want) {
		t.Errorf("left out = %q, want %q", rep.LeftOut, want)
	}
	if got := h.checkout("d").look(t); got != "closed/f=1 new\nline=1 out->/etc/passwd secret=1" {
		t.Errorf("the workspace is %s", got)
	}
}

// What a command puts in the place of the folder for temporary files hides nothing of
// what comes after it.
func TestTempIsNoFolder(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)[0]
	c := h.checkout("c")
	c.put(t, "a", "1")
	c.put(t, "z/y", "1")
	h.push(c)
	for name, make := range map[string]func(at string) error{
		"file": func(at string) error { return os.WriteFile(at, []byte("x"), 0o600) },
		"link": func(at string) error { return os.Symlink("z", at) },
		"pipe": func(at string) error { return syscall.Mkfifo(at, 0o600) },
	} {
		d := h.checkout("d")
		if err := make(filepath.Join(d.Dir(), tool.TempDir)); err != nil {
			t.Fatal(err)
		}
		if rep := h.push(d); rep.Changed != 0 || len(rep.LeftOut) != 0 {
			t.Errorf("%s: %+v", name, rep)
		}
	}
	if got := h.checkout("e").look(t); got != "a=1 z/y=1" {
		t.Errorf("the workspace is %s", got)
	}
}

// asNobody makes this test program, run as root, start itself again as an ordinary user
// with a folder of its own; false: this is that process, or it is none of root's.
func asNobody(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		return false
	}
	const nobody = 65534
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chown(dir, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=60s")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as an ordinary user: %v\n%s", err, out)
	}
	return true
}

// A folder that a command closed, the workspace itself included, is kept, and nothing of
// a copy stays on the disk because of one, although the task was stopped or its process
// has died.
func TestClosedFolders(t *testing.T) {
	t.Parallel()
	if asNobody(t) {
		return
	}
	h := hosts(t, 1)[0]
	c := h.checkout("c")
	closeAll := func(dirs ...string) {
		t.Helper()
		for _, d := range dirs {
			if err := os.Chmod(d, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	c.put(t, "d/e/f", "1")
	closeAll(filepath.Join(c.Dir(), "d", "e"), filepath.Join(c.Dir(), "d"), c.Dir())
	h.push(c)
	if got := h.checkout("see").look(t); got != "d/e/f=1" {
		t.Errorf("the workspace is %s", got)
	}
	stopped := h.checkout("stopped")
	closeAll(filepath.Join(stopped.Dir(), "d", "e"), filepath.Join(stopped.Dir(), "d"), stopped.Dir())
	stopped.Close()
	if _, err := os.Lstat(stopped.Dir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a copy is left: %v", err)
	}
	dead := filepath.Join(h.root, copiesDir, "dead")
	if err := errors.Join(os.MkdirAll(filepath.Join(dead, "x", "y"), 0o755), os.WriteFile(dead+".lock", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	closeAll(filepath.Join(dead, "x"))
	again, err := Open(Config{Bus: h.store.bus, Root: h.root})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := os.Lstat(dead); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of a dead process is left: %v", err)
	}
}

// A content is stored anew before the blob store forgets it, although nothing
// changes, and a snapshot that leads outside is refused.
func TestContentsDoNotAge(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var plus time.Duration
	h := hosts(t, 1, func(c *Config) {
		c.Now = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return time.Now().Add(plus)
		}
	})[0]
	c := h.checkout("c")
	c.put(t, "f", "1")
	h.push(c)
	first := h.checkout("x").base
	mu.Lock()
	plus = fresh
	mu.Unlock()
	d := h.checkout("d")
	h.push(d)
	second := h.checkout("x").base
	e := second.snap.Files["f"]
	if second.rev == first.rev || second.snap.Stored[e.SHA256]-first.snap.Stored[e.SHA256] < int64(fresh.Seconds())-1 {
		t.Errorf("nothing was stored anew: %+v, %+v", first, second)
	}
	if got := h.checkout("y").look(t); got != "f=1" {
		t.Errorf("the workspace is %s", got)
	}
	// The lifetime of a snapshot is below that of what it is made of.
	if Lifetime+fresh > BlobAge {
		t.Errorf("a snapshot lives for %v, its contents for %v", Lifetime, BlobAge-fresh)
	}
	m := second.snap
	m.Files = tree{"../out": {Link: "x"}}
	if _, ok, err := d.commit(h.ctx, m, second.rev, nil); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if _, err := h.store.Checkout(h.ctx, "default", "th_1", "z"); err == nil || !strings.Contains(err.Error(), "leads outside") {
		t.Errorf("error = %v", err)
	}
}

// A lead's file tools see what others pushed at once, and others what they write.
func TestToolsFollow(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	tools, done, err := h[0].store.Tools("default", "th_1", "run-1", tool.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	call := func(name string, args map[string]any) tool.Result {
		t.Helper()
		j, err := json.Marshal(args)
		if err != nil {
			t.Fatal(err)
		}
		for _, tl := range tools {
			if tl.Spec().Name == name {
				if f, ok := tl.(tool.OnFiles); !ok || f.Writes() != (name == "write_file") {
					t.Errorf("%s does not tell whether it writes", name)
				}
				res, err := tl.Call(h[0].ctx, tool.Call{Args: j})
				if err != nil {
					t.Fatal(err)
				}
				return res
			}
		}
		t.Fatalf("no tool %s", name)
		return tool.Result{}
	}
	if res := call("write_file", map[string]any{"path": "d/plan", "content": "do it"}); res.IsError {
		t.Fatal(res.Text)
	}
	sub := h[1].checkout("sub")
	if got := sub.look(t); got != "d/plan=do it" {
		t.Errorf("the sub-agent sees %s", got)
	}
	sub.put(t, "result", "done")
	h[1].push(sub)
	if res := call("read_file", map[string]any{"path": "result"}); res.IsError || res.Text != "     1\tdone\n" {
		t.Errorf("the lead sees %+v", res)
	}
	// A path that was a file becomes a folder.
	if err := os.RemoveAll(filepath.Join(sub.Dir(), "d")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sub.Dir(), "d"), []byte("file"), 0o600); err != nil {
		t.Fatal(err)
	}
	h[1].push(sub)
	if res := call("read_file", map[string]any{"path": "d"}); res.Text != "     1\tfile\n" {
		t.Errorf("the lead sees %+v", res)
	}
	if _, _, err := h[0].store.Tools("default", "th_1", "x", tool.Options{Bash: true}); err == nil {
		t.Error("a shell was offered")
	}
}

// Contents of every length come back as they were, and one that was damaged is
// never taken for the file.
func TestContents(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)[0]
	c := h.checkout("c")
	sizes := []int{0, 1, pieceSize - 1, pieceSize, pieceSize + 1, 3*pieceSize + 7}
	for _, n := range sizes {
		c.put(t, fmt.Sprint("f", n), strings.Repeat("0123456789abcdef", n/16+1)[:n])
	}
	h.push(c)
	d := h.checkout("d")
	if got := d.look(t); got != c.look(t) {
		t.Errorf("%d bytes came back, want %d", len(got), len(c.look(t)))
	}
	name := d.base.snap.Files[fmt.Sprint("f", pieceSize+1)].SHA256
	if _, err := h.store.bus.Publish(h.ctx, bus.Write{Subject: c.piece(name, 1), Data: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.store.Checkout(h.ctx, "default", "th_1", "e"); !errors.Is(err, bus.ErrBlob) || !strings.Contains(err.Error(), name) {
		t.Errorf("error = %v, want one that names the content", err)
	}
}
