package bus

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ErrBlob is returned when a blob is not what its reference says.
var ErrBlob = errors.New("blob differs from its reference")

// blobChunk is the size of the pieces of a blob, where the server takes that.
const blobChunk = 128 << 10

// PartOf is a size for a part of a message: most, or a quarter of what the server
// takes for a whole one, so that the rest of the message has room.
func (c *Conn) PartOf(most int) int { return min(most, int(c.NC.MaxPayload())/4) }

// PutBlob stores data in the blob store under name and returns its reference.
//
// It writes the messages of which an object consists itself. The Put of nats.go starts a
// goroutine for each object that, when the object is stored quickly, now and then waits
// for ever on a channel that is taken away before it looks.
func (c *Conn) PutBlob(ctx context.Context, name string, data []byte) (contract.BlobRef, error) {
	bucket, size := c.Names.BlobStore(), c.PartOf(blobChunk)
	fail := func(err error) (contract.BlobRef, error) {
		return contract.BlobRef{}, fmt.Errorf("blob %s: %w", name, err)
	}
	store, err := c.JS.ObjectStore(ctx, bucket)
	if err != nil {
		return contract.BlobRef{}, fmt.Errorf("blob store %s: %w", bucket, err)
	}
	old, err := store.GetInfo(ctx, name, jetstream.GetObjectInfoShowDeleted())
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return fail(err)
	}
	var id [12]byte
	_, _ = rand.Read(id[:]) // never fails
	sum := sha256.New()
	_, _ = sum.Write(data) // never fails
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: uint32(size)}},
		Bucket:     bucket, NUID: hex.EncodeToString(id[:]), Size: uint64(len(data)), Digest: jetstream.GetObjectDigestValue(sum),
	}
	chunks := func(nuid string) string { return "$O." + bucket + ".C." + nuid }
	err = func() error {
		for piece := range slices.Chunk(data, size) {
			if _, err := c.Publish(ctx, Write{Subject: chunks(info.NUID), Data: piece}); err != nil {
				return err
			}
			info.Chunks++
		}
		meta, err := json.Marshal(info)
		if err != nil {
			return err
		}
		_, err = c.Publish(ctx, Write{
			Subject: "$O." + bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name)), Data: meta,
			Header: nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}},
		})
		return err
	}()
	gone := ""
	switch {
	case err != nil:
		gone = info.NUID
	case old != nil && !old.Deleted:
		gone = old.NUID
	}
	if gone != "" { // what is left goes with its age
		if stream, serr := c.JS.Stream(ctx, "OBJ_"+bucket); serr == nil {
			_ = stream.Purge(ctx, jetstream.WithPurgeSubject(chunks(gone)))
		}
	}
	if err != nil {
		return fail(err)
	}
	return contract.BlobRef{Name: name, SHA256: hex.EncodeToString(sum.Sum(nil)), Size: int64(len(data))}, nil
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
