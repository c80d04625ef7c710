package workspace

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/provision"
	"github.com/herdgate/herdgate/pkg/contract"
)

const (
	parallel    = 8 // transfers at once
	pieceSize   = 128 << 10
	maxManifest = 64 << 20 // bytes of a list of files
	tries       = 5        // of a transfer
	tryTime     = time.Minute
	copiesDir   = ".copies"
	formatNow   = 1
)

// Config says where a [Store] keeps what.
type Config struct {
	Bus *bus.Conn
	// Root is the folder in which copies are made.
	Root string
	// Limits of each workspace; the zero value takes [DefaultLimits].
	Limits Limits
	// Now is the clock; nil takes the real one.
	Now func() time.Time
}

// Store hands out copies of workspaces. It is safe for concurrent use.
type Store struct {
	bus    *bus.Conn
	dir    string
	lock   *flock.Flock
	limits Limits
	now    func() time.Time
}

// Open makes a folder for the copies of this process, and removes those that
// processes left behind that are dead.
func Open(cfg Config) (*Store, error) {
	s := &Store{bus: cfg.Bus, limits: cfg.Limits, now: cfg.Now}
	if s.limits == (Limits{}) {
		s.limits = DefaultLimits
	}
	if s.now == nil {
		s.now = time.Now
	}
	top, err := filepath.Abs(filepath.Join(cfg.Root, copiesDir))
	if err == nil {
		err = os.MkdirAll(top, 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	locks, _ := filepath.Glob(filepath.Join(top, "*.lock"))
	for _, name := range locks {
		l := flock.New(name)
		if free, err := l.TryLock(); err != nil || !free {
			continue
		}
		if removeCopy(strings.TrimSuffix(name, ".lock")) == nil {
			_ = os.Remove(name) // else the next process tries again
		}
		_ = l.Close()
	}
	for range tries {
		s.dir = filepath.Join(top, nonce())
		s.lock = flock.New(s.dir + ".lock")
		ok, err := s.lock.TryLock()
		if err != nil {
			return nil, fmt.Errorf("workspace: lock %s: %w", s.lock.Path(), err)
		}
		// Another process may have taken it for a dead one's in this moment.
		if _, err := os.Stat(s.lock.Path()); !ok || err != nil {
			_ = s.lock.Close()
			continue
		}
		if err := os.Mkdir(s.dir, 0o755); err != nil {
			_ = s.lock.Close()
			return nil, fmt.Errorf("workspace: %w", err)
		}
		return s, nil
	}
	return nil, fmt.Errorf("workspace: no folder could be locked in %s", top)
}

// Close removes the copies that are left.
func (s *Store) Close() error {
	err := removeCopy(s.dir)
	_ = os.Remove(s.lock.Path())
	return errors.Join(err, s.lock.Close())
}

func nonce() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// head names the newest snapshot.
type head struct {
	Format   int    `json:"format"`
	Manifest string `json:"manifest"` // digest
	Size     int64  `json:"size"`     // bytes
	// By and Nonce tell who wrote it, so that a write in doubt can be settled.
	By    string    `json:"by"`
	Nonce string    `json:"nonce"`
	At    time.Time `json:"at"`
}

// manifest is a snapshot.
type manifest struct {
	Format int  `json:"format"`
	Files  tree `json:"files"`
	// Stored tells when each content was stored last, in seconds since 1970.
	Stored map[string]int64 `json:"stored"`
}

// state is the newest snapshot, as it was read.
type state struct {
	rev  uint64 // of the key; 0: it was never written
	at   time.Time
	snap manifest
}

// Copy is the working copy of one task, or of one run of a lead.
type Copy struct {
	s        *Store
	tok      string
	key      string
	who      string
	dir      string
	root     *os.Root
	base     state // that the folder was made of
	uploaded map[string]int64
	broken   bool // the folder may hold something else than base
}

// Checkout makes a copy of the newest snapshot; a thread without one has an empty
// workspace. who names the copy where it is in conflict with others.
func (s *Store) Checkout(ctx context.Context, tenant contract.Tenant, thread contract.ThreadID, who string) (*Copy, error) {
	c, err := s.empty(tenant, thread, who)
	if err != nil {
		return nil, err
	}
	if err := c.Pull(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// empty makes a copy without anything in it.
func (s *Store) empty(tenant contract.Tenant, thread contract.ThreadID, who string) (*Copy, error) {
	key := contract.WorkspaceKey(tenant, thread)
	_, tok, _ := strings.Cut(key, ".")
	c := &Copy{s: s, tok: tok, key: key, who: who, dir: filepath.Join(s.dir, nonce()), uploaded: map[string]int64{}}
	if err := os.Mkdir(c.dir, 0o755); err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	root, err := os.OpenRoot(c.dir)
	if err != nil {
		return nil, fmt.Errorf("workspace: %w", err)
	}
	c.root = root
	return c, nil
}

// Dir is the folder of the copy.
func (c *Copy) Dir() string { return c.dir }

// Close removes the copy. What was not pushed is lost.
func (c *Copy) Close() {
	_ = c.root.Close()
	_ = removeCopy(c.dir) // what is left, the store removes
}

// Pull brings the copy to the newest snapshot. What was changed in it must have
// been pushed.
func (c *Copy) Pull(ctx context.Context) error {
	rev, h, err := c.head(ctx)
	if err != nil || (rev == c.base.rev && !c.broken) {
		return err
	}
	st, err := c.read(ctx, rev, h)
	if err != nil {
		return err
	}
	have := c.base.snap.Files
	if c.broken {
		if have, _, err = scan(ctx, c.root, c.s.limits); err != nil {
			return err
		}
	}
	return c.apply(ctx, have, st)
}

// Push makes a new snapshot of what was changed in the copy. Nothing of it can be
// seen by others before all of it can. gate, when not nil, is asked right before
// that. Afterwards the copy may lack what others changed; see [Copy.Sync].
func (c *Copy) Push(ctx context.Context, gate func() error) (Report, error) {
	_, _, rep, err := c.push(ctx, gate)
	c.broken = true
	return rep, err
}

// Sync is Push, and then Pull.
func (c *Copy) Sync(ctx context.Context) (Report, error) {
	mine, st, rep, err := c.push(ctx, nil)
	if err != nil {
		return rep, err
	}
	return rep, c.apply(ctx, mine, st)
}

func (c *Copy) push(ctx context.Context, gate func() error) (tree, state, Report, error) {
	fail := func(err error) (tree, state, Report, error) { return nil, state{}, Report{}, err }
	mine, leftOut, err := scan(ctx, c.root, c.s.limits)
	if err != nil {
		return fail(err)
	}
	for {
		rev, h, err := c.head(ctx)
		if err != nil {
			return fail(err)
		}
		theirs := c.base
		if rev != c.base.rev {
			if theirs, err = c.read(ctx, rev, h); err != nil {
				return fail(err)
			}
		}
		merged, conflicts := merge(c.base.snap.Files, mine, theirs.snap.Files, c.who)
		rep := Report{Changed: changes(merged, theirs.snap.Files), Conflicts: conflicts, LeftOut: leftOut}
		if rep.Changed == 0 && (len(merged) == 0 || c.s.now().Sub(theirs.at) < fresh) {
			return mine, theirs, rep, nil
		}
		if err := merged.check(c.s.limits); err != nil {
			return fail(err)
		}
		next, err := c.store(ctx, mine, merged, theirs.snap)
		if err != nil {
			return fail(err)
		}
		st, ok, err := c.commit(ctx, next, rev, gate)
		if err != nil {
			return fail(err)
		}
		if ok {
			return mine, st, rep, nil
		}
	}
}

// head reads which snapshot is the newest.
func (c *Copy) head(ctx context.Context) (uint64, head, error) {
	var h head
	var rev uint64
	err := again(ctx, func(ctx context.Context) error {
		m, err := c.s.bus.Last(ctx, c.s.bus.RunStream(), c.s.bus.RunKV(c.key))
		switch {
		case errors.Is(err, bus.ErrNotFound):
			rev, h = 0, head{}
			return nil
		case err != nil:
			return err
		}
		rev, h = m.Seq, head{}
		if m.Deleted() {
			return nil
		}
		if err := json.Unmarshal(m.Data, &h); err != nil || h.Format != formatNow || h.Manifest == "" {
			return permanent{fmt.Errorf("key %s holds no snapshot that this version knows: %.100q", c.key, m.Data)}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("workspace: %w", err)
	}
	return rev, h, err
}

// read reads a snapshot.
func (c *Copy) read(ctx context.Context, rev uint64, h head) (state, error) {
	st := state{rev: rev, at: h.At}
	if h.Manifest == "" {
		return st, nil
	}
	var b bytes.Buffer
	if err := c.get(ctx, h.Manifest, h.Manifest, min(h.Size, maxManifest), &b); err != nil {
		return st, err
	}
	if err := json.Unmarshal(b.Bytes(), &st.snap); err != nil || st.snap.Format != formatNow {
		return st, fmt.Errorf("workspace: snapshot %s is none that this version knows", h.Manifest)
	}
	for p := range st.snap.Files {
		if !filepath.IsLocal(p) || p != filepath.ToSlash(filepath.Clean(p)) {
			return st, fmt.Errorf("workspace: snapshot %s holds the path %q, which leads outside", h.Manifest, p)
		}
	}
	return st, st.snap.Files.check(c.s.limits)
}

// commit makes a snapshot the newest one; false: another one is.
func (c *Copy) commit(ctx context.Context, next manifest, rev uint64, gate func() error) (state, bool, error) {
	data, err := json.Marshal(next)
	if err != nil {
		return state{}, false, err
	}
	sum := sha256.Sum256(data)
	h := head{Format: formatNow, Manifest: hex.EncodeToString(sum[:]), Size: int64(len(data)), By: c.who, Nonce: nonce(), At: c.s.now().UTC()}
	if len(data) > maxManifest {
		return state{}, false, fmt.Errorf("%w: the list of its files has %d bytes; want at most %d", ErrLimit, len(data), maxManifest)
	}
	if err := c.set(ctx, h.Manifest, h.Manifest, h.Size, bytes.NewReader(data)); err != nil {
		return state{}, false, err
	}
	value, err := json.Marshal(h)
	if err != nil {
		return state{}, false, err
	}
	won := uint64(0)
	err = again(ctx, func(ctx context.Context) error {
		if gate != nil {
			if err := gate(); err != nil {
				return permanent{err}
			}
		}
		ack, err := c.s.bus.Publish(ctx, bus.Write{Subject: c.s.bus.RunKV(c.key), Data: value, TTL: Lifetime, Expect: bus.Seq(rev)})
		if err == nil {
			won = ack.Seq
			return nil
		}
		if !errors.Is(err, bus.ErrConflict) {
			return err
		}
		now, got, rerr := c.head(ctx)
		switch {
		case rerr != nil:
			return rerr
		case got.Nonce == h.Nonce:
			won = now // ours had landed
			return nil
		case now != rev:
			return nil // somebody was faster
		}
		return err
	})
	if err != nil {
		return state{}, false, fmt.Errorf("workspace: %w", err)
	}
	return state{rev: won, at: h.At, snap: next}, won != 0, nil
}

// store puts all contents of files into the blob store that are not there, or
// not there for long enough.
func (c *Copy) store(ctx context.Context, mine, files tree, theirs manifest) (manifest, error) {
	now := c.s.now()
	next := manifest{Format: formatNow, Files: files, Stored: map[string]int64{}}
	at := map[string]string{} // where a content lies in the folder
	for p, e := range mine {
		at[e.SHA256] = p
	}
	var todo []entry
	for _, e := range files {
		if _, seen := next.Stored[e.SHA256]; seen || e.SHA256 == "" {
			continue
		}
		stored := max(theirs.Stored[e.SHA256], c.uploaded[e.SHA256])
		if now.Sub(time.Unix(stored, 0)) >= fresh {
			todo = append(todo, e)
			stored = now.Unix()
		}
		next.Stored[e.SHA256] = stored
	}
	err := each(ctx, todo, func(ctx context.Context, e entry) error {
		if p, here := at[e.SHA256]; here {
			f, _, err := open(c.root, p)
			if err != nil {
				return err
			}
			defer f.Close()
			return c.set(ctx, e.SHA256, e.SHA256, e.Size, f)
		}
		var b bytes.Buffer
		if err := c.get(ctx, e.SHA256, e.SHA256, e.Size, &b); err != nil {
			return err
		}
		return c.set(ctx, e.SHA256, e.SHA256, e.Size, &b)
	})
	if err != nil {
		return next, err
	}
	for _, e := range todo {
		c.uploaded[e.SHA256] = next.Stored[e.SHA256]
	}
	return next, nil
}

// apply makes the folder, which holds have, the same as a snapshot.
func (c *Copy) apply(ctx context.Context, have tree, want state) error {
	c.broken = true
	var gone []string
	for p := range have {
		if _, ok := want.snap.Files[p]; !ok {
			gone = append(gone, p)
		}
	}
	if err := remove(c.root, gone); err != nil {
		return err
	}
	var todo []string
	for p, e := range want.snap.Files {
		if have[p] != e {
			todo = append(todo, p)
		}
	}
	slices.Sort(todo)
	err := each(ctx, todo, func(ctx context.Context, p string) error {
		e := want.snap.Files[p]
		return put(c.root, p, e, func(w io.Writer) error { return c.get(ctx, e.SHA256, e.SHA256, e.Size, w) })
	})
	if err != nil {
		return err
	}
	c.base, c.broken = want, false
	return nil
}

// A content lies in the blob store's stream as messages of its own, not as an
// object: its pieces are found by name and number alone, so that reading takes no
// consumer, storing again disturbs no reader, and many small files cost little.

// get reads a content and checks it.
func (c *Copy) get(ctx context.Context, name, digest string, size int64, w io.Writer) error {
	h := sha256.New()
	for i := range pieces(size) {
		var m bus.Message
		err := again(ctx, func(ctx context.Context) (err error) {
			m, err = c.s.bus.Last(ctx, provision.ObjectStream(c.s.bus.Names.BlobStore()), c.piece(name, i))
			if errors.Is(err, bus.ErrNotFound) {
				return permanent{err}
			}
			return err
		})
		if err == nil {
			_, err = io.MultiWriter(h, w).Write(m.Data)
		}
		if err != nil {
			return fmt.Errorf("workspace: content %s: %w", name, err)
		}
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != digest {
		return fmt.Errorf("workspace: content %s: %w: it holds %s", name, bus.ErrBlob, got)
	}
	return nil
}

// set stores a content of the given size and digest.
func (c *Copy) set(ctx context.Context, name, digest string, size int64, r io.Reader) error {
	h := sha256.New()
	buf := make([]byte, min(size, pieceSize))
	for i := range pieces(size) {
		b := buf[:min(size-int64(i)*pieceSize, pieceSize)]
		_, err := io.ReadFull(io.TeeReader(r, h), b)
		if err == nil {
			err = again(ctx, func(ctx context.Context) error {
				_, err := c.s.bus.Publish(ctx, bus.Write{Subject: c.piece(name, i), Data: b})
				return err
			})
		}
		if err != nil {
			return fmt.Errorf("workspace: content %s: %w", name, err)
		}
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != digest {
		return fmt.Errorf("workspace: content %s changed while it was stored", name)
	}
	return nil
}

func pieces(size int64) int { return int((size + pieceSize - 1) / pieceSize) }

// piece is the subject of a piece of a content. Threads share none, so that nobody
// can find out what others have.
func (c *Copy) piece(name string, i int) string {
	return fmt.Sprintf("$O.%s.C.workspace.%s.%s.%d", c.s.bus.Names.BlobStore(), c.tok, name, i)
}

// permanent is an error that a repeat does not mend.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// again repeats what failed, a few times.
func again(ctx context.Context, f func(context.Context) error) error {
	wait := 100 * time.Millisecond
	for n := 1; ; n++ {
		try, cancel := context.WithTimeout(ctx, tryTime)
		err := f(try)
		cancel()
		switch p := (permanent{}); {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.As(err, &p), n == tries:
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
		wait *= 2
	}
}

// each does something with all of list, several at once, until one fails.
func each[T any](ctx context.Context, list []T, f func(context.Context, T) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan T)
	var wg sync.WaitGroup
	for range min(parallel, len(list)) {
		wg.Go(func() {
			for v := range next {
				if ctx.Err() != nil {
					continue
				}
				if err := f(ctx, v); err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, v := range list {
		next <- v
	}
	close(next)
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
