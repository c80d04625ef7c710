package bus_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/internal/provision"
)

// What is put is an object for every client, of any size. One that takes the place of
// another leaves nothing of that. No goroutine stays, however many are put (TestMain).
func TestBlobs(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	s.Provision(provision.Config{MaxRunning: 1, MaxQueued: 1})
	c := s.Conn("test")
	ctx := testContext(t)
	store, err := c.JS.ObjectStore(ctx, c.Names.BlobStore())
	if err != nil {
		t.Fatal(err)
	}
	const chunk = 128 << 10
	for _, n := range []int{0, 1, chunk - 1, chunk, 2*chunk + 7} {
		name, data := fmt.Sprint("result.t/1 é ", n), bytes.Repeat([]byte("0123456789abcde"), n/15+1)[:n]
		for range 2 { // the second takes the place of the first
			ref, err := c.PutBlob(ctx, name, data)
			if err != nil || ref.Name != name || ref.Size != int64(n) {
				t.Fatalf("%d bytes: %+v, %v", n, ref, err)
			}
			if got, err := c.GetBlob(ctx, ref); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes: %d came back, %v", n, len(got), err)
			}
			if got, err := store.GetBytes(ctx, name); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes: another client gets %d, %v", n, len(got), err)
			}
			ref.SHA256 = strings.Repeat("0", 64)
			if _, err := c.GetBlob(ctx, ref); !errors.Is(err, bus.ErrBlob) {
				t.Errorf("with another digest: %v", err)
			}
		}
	}
	stream, err := c.JS.Stream(ctx, provision.ObjectStream(c.Names.BlobStore()))
	if err != nil {
		t.Fatal(err)
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter("$O.>"))
	if err != nil {
		t.Fatal(err)
	}
	if want := uint64(5 + 0 + 1 + 1 + 1 + 3); info.State.Msgs != want {
		t.Errorf("the stream holds %d messages, want %d: %v", info.State.Msgs, want, info.State.Subjects)
	}
	for i := range 100 {
		if _, err := c.PutBlob(ctx, fmt.Sprint("quick", i), []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
}
