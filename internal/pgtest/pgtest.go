// Package pgtest starts private PostgreSQL servers for tests: a real server in a
// process group of its own, in a temporary folder, that nobody else can reach.
package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// within bounds each step of a server's life.
const within = time.Minute

// Server is a PostgreSQL server that belongs to a test.
type Server struct {
	t    testing.TB
	bin  string
	dir  string
	cred *syscall.Credential
	n    atomic.Int64
}

// Start starts a server and stops it when the test ends. Without PostgreSQL on
// the machine the test is skipped, except under CI=true, where that is a failure.
func Start(t testing.TB) *Server {
	t.Helper()
	bin, err := find()
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	s := &Server{t: t, bin: bin}
	// Not t.TempDir: the server may be another user, who could not get into it.
	// The name is short because socket paths must be.
	if s.dir, err = os.MkdirTemp("", "hgpg"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(s.dir); err != nil {
			t.Errorf("remove the server's folder: %v", err)
		}
	})
	// PostgreSQL refuses to run as root.
	if os.Geteuid() == 0 {
		if s.cred, err = other(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(s.dir, int(s.cred.Uid), int(s.cred.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	s.must("initdb", "-D", s.data(), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
	conf := fmt.Sprintf("listen_addresses = ''\nunix_socket_directories = '%s'\nfsync = off\nmax_connections = 60\nshared_buffers = 32MB\n", s.dir)
	f, err := os.OpenFile(filepath.Join(s.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(conf)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	s.Up()
	t.Cleanup(func() {
		if s.running() {
			s.Stop("immediate")
		}
	})
	return s
}

// Up starts the server and waits until it answers.
func (s *Server) Up() {
	s.t.Helper()
	s.must("pg_ctl", "-D", s.data(), "-l", filepath.Join(s.dir, "log"), "-w", "-t", "50", "start")
}

// Stop stops the server: "fast" as an operator does, "immediate" as a crash.
func (s *Server) Stop(mode string) {
	s.t.Helper()
	s.must("pg_ctl", "-D", s.data(), "-m", mode, "-w", "-t", "50", "stop")
}

// Database makes an empty database and returns its address.
func (s *Server) Database() string {
	s.t.Helper()
	name := "db" + strconv.FormatInt(s.n.Add(1), 10)
	s.SQL("postgres", "CREATE DATABASE "+name)
	return s.DSN(name, "postgres")
}

// DSN is the address of a database for a user.
func (s *Server) DSN(database, as string) string {
	q := url.Values{"host": {s.dir}, "user": {as}}
	return "postgres:///" + database + "?" + q.Encode()
}

// SQL runs statements in a database and returns what they print, bare.
func (s *Server) SQL(database, statements string) string {
	s.t.Helper()
	return s.must("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", s.dir, "-U", "postgres", "-d", database, "-c", statements)
}

// Log is what the server has written.
func (s *Server) Log() string {
	b, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) running() bool {
	_, err := s.run("pg_ctl", "-D", s.data(), "status")
	return err == nil
}

func (s *Server) must(name string, args ...string) string {
	s.t.Helper()
	out, err := s.run(name, args...)
	if err != nil {
		s.t.Fatalf("%s: %v\n%s", name, err, out)
	}
	return out
}

func (s *Server) run(name string, args ...string) (string, error) {
	// The test's own context is done when its cleanups run.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, name), args...)
	cmd.Dir, cmd.Env = s.dir, []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "HOME=" + s.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.cred}
	// A file and not a pipe: the server inherits it and a pipe would never end.
	out, err := os.CreateTemp("", "hgpg-out")
	if err != nil {
		return "", err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	err = cmd.Run()
	b, readErr := os.ReadFile(out.Name())
	return string(bytes.TrimSpace(b)), errors.Join(err, readErr)
}

// find looks for the programs where Debian and others keep them, newest first.
func find() (string, error) {
	if p, err := exec.LookPath("initdb"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			return filepath.Dir(real), nil
		}
	}
	var dirs []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin/initdb", "/usr/pgsql-*/bin/initdb", "/opt/homebrew/opt/postgresql*/bin/initdb"} {
		found, _ := filepath.Glob(pattern) // the pattern is well-formed
		dirs = append(dirs, found...)
	}
	if len(dirs) == 0 {
		return "", errors.New("PostgreSQL is not installed: its tests need the programs initdb, pg_ctl and psql (Debian: apt-get install postgresql)")
	}
	slices.SortFunc(dirs, func(a, b string) int { return version(b) - version(a) })
	return filepath.Dir(dirs[0]), nil
}

func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path)))) // others count as 0
	return n
}

func other() (*syscall.Credential, error) {
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")
}
