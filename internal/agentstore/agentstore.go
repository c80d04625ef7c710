// Package agentstore keeps the sub-agent definitions that administrators make,
// for the whole deployment: in a NATS bucket, or in a file that the leads of one
// machine share. Every definition has a revision; who changes one says which
// revision was seen, and a change by somebody else in between is refused.
package agentstore

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/herdgate/herdgate/internal/subagent"
)

// Errors of a store, to be found with errors.Is.
var (
	// ErrNotFound: there is no definition of that name.
	ErrNotFound = errors.New("there is no managed definition of that name")
	// ErrExists: there is one already.
	ErrExists = errors.New("a managed definition of that name exists already")
	// ErrStale: it has changed since the revision that the caller saw.
	ErrStale = errors.New("the managed definition has changed meanwhile")
	// ErrUnreadable: what the store has under the name is no definition, as after a
	// return to an older version of the program.
	ErrUnreadable = errors.New("the managed definition cannot be read")
	// ErrUnavailable: the store did not answer; a write may have landed.
	ErrUnavailable = errors.New("the store of managed definitions does not answer")
)

// Store keeps managed definitions. It checks each one before it stores it
// ([subagent.Managed.Normalize]; its errors wrap [subagent.ErrDefinition]).
// Revisions grow with every change in the store, also with deletions, so that a
// name that is made anew never repeats one. It is safe for concurrent use, by
// any number of processes.
type Store interface {
	// Get returns a definition; ErrNotFound; with ErrUnreadable its name and revision,
	// so that it can be replaced and deleted.
	Get(ctx context.Context, name string) (subagent.Stored, error)
	// Create stores a definition whose name is free and returns it as stored;
	// ErrExists.
	Create(ctx context.Context, m subagent.Managed) (subagent.Stored, error)
	// Update replaces the revision that the caller saw; ErrNotFound, ErrStale.
	Update(ctx context.Context, m subagent.Managed, revision uint64) (subagent.Stored, error)
	// Delete removes the revision that the caller saw, and returns the store's
	// revision after it; ErrNotFound, ErrStale.
	Delete(ctx context.Context, name string, revision uint64) (uint64, error)
	// Watch calls fn with all definitions, by name, and the store's revision: once
	// at the beginning, and after changes by whomever. Several changes may come as
	// one. It returns nil when ctx is done; an error when the store is gone.
	Watch(ctx context.Context, fn func(all []subagent.Stored, revision uint64)) error
}

// possible refuses a change of a revision that no definition has, and that means
// something else further down: 0 is a new one there, and large ones are no revisions.
func possible(ctx context.Context, s Store, name string, revision uint64) error {
	if revision > 0 && revision <= math.MaxInt64 {
		return nil
	}
	if _, err := s.Get(ctx, name); err != nil && !errors.Is(err, ErrUnreadable) {
		return err
	}
	return fmt.Errorf("%s: %w: no definition has revision %d", name, ErrStale, revision)
}

// get is Get of a store whose definitions are read one by one; read returns nil for one
// that is not there.
func get(ctx context.Context, name string, read func(context.Context, string) ([]byte, uint64, error)) (subagent.Stored, error) {
	key, err := subagent.ManagedName(name)
	if err != nil {
		return subagent.Stored{}, fmt.Errorf("%.80q: %w", name, ErrNotFound)
	}
	data, rev, err := read(ctx, key)
	if err != nil {
		return subagent.Stored{}, fmt.Errorf("managed definition %s: %w", key, err)
	}
	if data == nil {
		return subagent.Stored{}, fmt.Errorf("%s: %w", key, ErrNotFound)
	}
	got, err := item{Revision: rev, Definition: data}.decode(key)
	if err != nil {
		return unreadable(key, rev, err)
	}
	return got, nil
}

// unreadable is the answer of Get for what is no definition. The cause is text alone:
// the fault is not in what the caller said.
func unreadable(name string, revision uint64, cause error) (subagent.Stored, error) {
	return subagent.Stored{Managed: subagent.Managed{Name: name}, Revision: revision},
		fmt.Errorf("%s, revision %d: %w: %s", name, revision, ErrUnreadable, cause.Error())
}
