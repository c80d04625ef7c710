package bus

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ErrBlob is returned when a blob is not what its reference says.
var ErrBlob = errors.New("blob differs from its reference")

// PutBlob stores data in the blob store under name and returns its reference.
func (c *Conn) PutBlob(ctx context.Context, name string, data []byte) (contract.BlobRef, error) {
	store, err := c.JS.ObjectStore(ctx, c.Names.BlobStore())
	if err != nil {
		return contract.BlobRef{}, fmt.Errorf("blob store %s: %w", c.Names.BlobStore(), err)
	}
	if _, err := store.PutBytes(ctx, name, data); err != nil {
		return contract.BlobRef{}, fmt.Errorf("blob %s: %w", name, err)
	}
	sum := sha256.Sum256(data)
	return contract.BlobRef{Name: name, SHA256: hex.EncodeToString(sum[:]), Size: int64(len(data))}, nil
}

// GetBlob reads a blob and checks it against its reference.
func (c *Conn) GetBlob(ctx context.Context, ref contract.BlobRef) ([]byte, error) {
	store, err := c.JS.ObjectStore(ctx, c.Names.BlobStore())
	if err != nil {
		return nil, fmt.Errorf("blob store %s: %w", c.Names.BlobStore(), err)
	}
	info, err := store.GetInfo(ctx, ref.Name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, fmt.Errorf("blob %s: %w", ref.Name, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", ref.Name, err)
	}
	if info.Size > contract.MaxResultBytes {
		return nil, fmt.Errorf("blob %s: %w: it has %d bytes", ref.Name, ErrBlob, info.Size)
	}
	data, err := store.GetBytes(ctx, ref.Name)
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", ref.Name, err)
	}
	sum := sha256.Sum256(data)
	if int64(len(data)) != ref.Size || hex.EncodeToString(sum[:]) != ref.SHA256 {
		return nil, fmt.Errorf("blob %s: %w", ref.Name, ErrBlob)
	}
	return data, nil
}
