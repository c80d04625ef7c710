// Package workspace keeps the workspaces of threads in NATS, so that executors on
// different machines see the same files.
//
// A workspace is a sequence of snapshots: a list of files by the digests of their
// contents. The contents lie in the blob store, named by digest within
// their thread; the newest snapshot is named by one key of the run bucket, which
// moves by compare-and-set. A task works in a copy of its own. At its end the copy
// is compared with the snapshot that it was made of and with the newest one, and
// what the task changed goes into the next snapshot: all of it or, when the process
// dies before, nothing. Where somebody else changed the same file meanwhile, what
// was there first stays in its place; the later version is kept beside it, in the
// folder .conflicts, and the task's result says so.
//
// Kept are regular files, whether they may be executed, and symbolic links. Empty
// folders, pipes, sockets and the folder for temporary files are not.
//
// The blob store forgets what is older than [BlobAge]. So a snapshot lives for
// [Lifetime] after the last one was made, and contents are stored anew before they
// are too old for that. What nobody uses any more goes by itself.
package workspace

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Limits bound one workspace.
type Limits struct {
	Files     int   // files and links
	FileBytes int64 // of one file
	Bytes     int64 // of all files
}

// DefaultLimits hold unless a [Config] says otherwise.
var DefaultLimits = Limits{Files: 10_000, FileBytes: 64 << 20, Bytes: 512 << 20}

// How long things are kept.
const (
	// BlobAge is the least time that the blob store keeps an object.
	BlobAge = 7 * 24 * time.Hour
	// Lifetime is how long a workspace is kept after its last snapshot.
	Lifetime = 6 * 24 * time.Hour
	// fresh is how old a content may be that a new snapshot refers to.
	fresh = 12 * time.Hour
)

// ErrLimit is returned for a workspace that is larger than its limits.
var ErrLimit = errors.New("the workspace is too large to be kept")

// Report tells what became of the changes of a copy.
type Report struct {
	// Changed is how many files differ in the new snapshot.
	Changed int
	// Conflicts are files that somebody else had changed before.
	Conflicts []Conflict
	// LeftOut are names that cannot be kept.
	LeftOut []string
}

// Conflict is a file of which two versions were made side by side.
type Conflict struct {
	Path string
	// Kept is where the later version is; empty when it had been removed.
	Kept string
}

// maxTold bounds the list of a note.
const maxTold = 20

// Note words what the agent's parent has to know; empty when all went well.
func (r Report) Note() string {
	var b strings.Builder
	if len(r.Conflicts) > 0 {
		b.WriteString("Note on the workspace: other work had changed these files meanwhile. Its versions stay in place.\n")
		for i, c := range r.Conflicts {
			if i == maxTold {
				fmt.Fprintf(&b, "- and %d more\n", len(r.Conflicts)-i)
				break
			}
			if c.Kept == "" {
				fmt.Fprintf(&b, "- %q: was removed here, but not there\n", c.Path)
			} else {
				fmt.Fprintf(&b, "- %q: the version of this task is %q\n", c.Path, c.Kept)
			}
		}
	}
	if len(r.LeftOut) > 0 {
		b.WriteString("Note on the workspace: these names are not kept, because they are no UTF-8 or no regular files.\n")
		for i, p := range r.LeftOut {
			if i == maxTold {
				fmt.Fprintf(&b, "- and %d more\n", len(r.LeftOut)-i)
				break
			}
			fmt.Fprintf(&b, "- %q\n", p)
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}
