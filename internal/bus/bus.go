// Package bus is Herdgate's one way to NATS: how we connect, how a write states
// what it expects, what its failures mean, and how state is read from the
// stream's leader instead of a replica that may lag.
//
// It creates nothing: streams and buckets are provisioned (package provision).
package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Conn is a connection with everything a service needs from it.
type Conn struct {
	NC    *nats.Conn
	JS    jetstream.JetStream
	Names contract.Names

	line *line
}

// WriteTimeout bounds one write. A write that is refused for lack of rights
// gets no answer at all, so every write needs one.
const WriteTimeout = 5 * time.Second

// Errors of writes. Whoever gets ErrConflict or ErrDoubt reads and decides; it
// never assumes.
var (
	// ErrConflict: the expectation did not hold. On a cluster, a write beside
	// another one in flight can get it although nothing has moved.
	ErrConflict = errors.New("write refused: the expected revision is not the last")
	// ErrDoubt: there was no answer. The write may have landed, may land later,
	// or may be lost.
	ErrDoubt = errors.New("write in doubt: no answer from the server")
	// ErrFull: a bounded stream has no room.
	ErrFull = errors.New("stream is full")
	// ErrExists: the subject already has its one message.
	ErrExists = errors.New("subject already has a message")
	// ErrTooLarge: the message is above the server's or the stream's limit.
	ErrTooLarge = errors.New("message is too large")
	// ErrNotFound: there is no message on the subject.
	ErrNotFound = errors.New("no message on the subject")
)

// Write is one message for a stream. It carries at most one expectation.
type Write struct {
	Subject string
	Data    []byte
	Header  nats.Header
	// MsgID is the id by which the server drops repeats within its window.
	MsgID string
	// TTL lets the message expire; 0 keeps it. Whole seconds, at least one.
	TTL time.Duration
	// Expect, when not nil, is the last sequence that ExpectSubject (default:
	// Subject) must have; 0 means that it must have none. ExpectSubject may be
	// another subject of the same stream and may hold wildcards.
	Expect        *uint64
	ExpectSubject string
}

// Seq is an expected sequence for [Write.Expect].
func Seq(n uint64) *uint64 { return &n }

// Ack tells where a write landed.
type Ack struct {
	Seq uint64
	// Duplicate: the server had this MsgID within its window and stored nothing.
	Duplicate bool
}

// Publish writes and waits for the acknowledgement, at most [WriteTimeout], until
// ctx is done or the connection is lost. Its errors are those of this package,
// wrapped.
func (c *Conn) Publish(ctx context.Context, w Write) (Ack, error) {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	ctx, hangUp := c.line.whole(ctx)
	defer hangUp()
	msg, opts := w.message()
	ack, err := c.JS.PublishMsg(ctx, msg, opts...)
	if err != nil {
		return Ack{}, fmt.Errorf("publish %s: %w", w.Subject, Classify(err))
	}
	return Ack{Seq: ack.Sequence, Duplicate: ack.Duplicate}, nil
}

// PublishAsync writes without waiting. The caller must look at the future, whose
// error is to be read with [Classify].
func (c *Conn) PublishAsync(w Write) (jetstream.PubAckFuture, error) {
	msg, opts := w.message()
	f, err := c.JS.PublishMsgAsync(msg, append(opts, jetstream.WithStallWait(WriteTimeout))...)
	if err != nil {
		return nil, fmt.Errorf("publish %s: %w", w.Subject, Classify(err))
	}
	return f, nil
}

func (w Write) message() (*nats.Msg, []jetstream.PublishOpt) {
	msg := nats.NewMsg(w.Subject)
	msg.Data = w.Data
	for k, v := range w.Header {
		msg.Header[k] = v
	}
	// The default retry of nats.go would send again behind our back after "no
	// responders"; for a write with an expectation the caller decides that.
	opts := []jetstream.PublishOpt{jetstream.WithRetryAttempts(0)}
	if w.MsgID != "" {
		opts = append(opts, jetstream.WithMsgID(w.MsgID))
	}
	if w.TTL > 0 {
		opts = append(opts, jetstream.WithMsgTTL(w.TTL))
	}
	if w.Expect != nil {
		if w.ExpectSubject == "" || w.ExpectSubject == w.Subject {
			opts = append(opts, jetstream.WithExpectLastSequencePerSubject(*w.Expect))
		} else {
			opts = append(opts, jetstream.WithExpectLastSequenceForSubject(*w.Expect, w.ExpectSubject))
		}
	}
	return msg, opts
}

// Error codes of the server that we act on.
const (
	codeWrongLastSequence         jetstream.ErrorCode = 10071
	codeWrongLastSequenceConstant jetstream.ErrorCode = 10164
	codeStreamStoreFailed         jetstream.ErrorCode = 10077 // a limit with discard new
	codeMessageExceedsMaximum     jetstream.ErrorCode = 10054
	codeMessageNotFound           jetstream.ErrorCode = 10037
)

// Racing reports whether a conflict may have come from a write of our own or a
// sibling that was still in flight (10164), so that nothing need have moved.
func Racing(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == codeWrongLastSequenceConstant
}

// Classify turns an error of a write into one of this package's, keeping the
// cause. Unknown errors come back as they are.
func Classify(err error) error {
	var (
		api     *jetstream.APIError
		network net.Error
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &api):
		switch api.ErrorCode {
		case codeWrongLastSequence, codeWrongLastSequenceConstant:
			return fmt.Errorf("%w: %w", ErrConflict, err)
		case codeStreamStoreFailed:
			if containsFold(api.Description, "per subject") {
				return fmt.Errorf("%w: %w", ErrExists, err)
			}
			return fmt.Errorf("%w: %w", ErrFull, err)
		case codeMessageExceedsMaximum:
			return fmt.Errorf("%w: %w", ErrTooLarge, err)
		}
		if api.Code >= 500 {
			return fmt.Errorf("%w: %w", ErrDoubt, err)
		}
		return err
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled),
		errors.Is(err, nats.ErrTimeout), errors.Is(err, jetstream.ErrNoStreamResponse),
		errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrReconnectBufExceeded),
		errors.Is(err, jetstream.ErrAsyncPublishTimeout), errors.Is(err, jetstream.ErrInvalidJSAck),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed), errors.As(err, &network):
		return fmt.Errorf("%w: %w", ErrDoubt, err)
	}
	return err
}

// Message is a stored message.
type Message struct {
	Subject string
	Seq     uint64
	Time    time.Time
	Header  nats.Header
	Data    []byte
}

// Deleted reports whether the message is the marker of a deleted, purged or
// expired key.
func (m Message) Deleted() bool {
	return m.Header.Get("KV-Operation") != "" || m.Header.Get("Nats-Marker-Reason") != ""
}

// Last reads the newest message on subject, which may hold wildcards, from the
// stream's leader. A key that was deleted comes back as its marker.
func (c *Conn) Last(ctx context.Context, stream, subject string) (Message, error) {
	return c.get(ctx, stream, map[string]any{"last_by_subj": subject})
}

// Get reads the message with sequence seq from the stream's leader.
func (c *Conn) Get(ctx context.Context, stream string, seq uint64) (Message, error) {
	return c.get(ctx, stream, map[string]any{"seq": seq})
}

func (c *Conn) get(ctx context.Context, stream string, req map[string]any) (Message, error) {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	var resp struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := c.api(ctx, "STREAM.MSG.GET."+stream, req, &resp); err != nil {
		return Message{}, err
	}
	if resp.Error != nil {
		if resp.Error.ErrorCode == codeMessageNotFound {
			return Message{}, fmt.Errorf("%s %v: %w", stream, req, ErrNotFound)
		}
		return Message{}, fmt.Errorf("%s %v: %w", stream, req, resp.Error)
	}
	if resp.Message == nil {
		return Message{}, fmt.Errorf("%s %v: the server's answer holds no message", stream, req)
	}
	m := Message{Subject: resp.Message.Subject, Seq: resp.Message.Seq, Time: resp.Message.Time, Data: resp.Message.Data}
	if len(resp.Message.Header) > 0 {
		h, err := nats.DecodeHeadersMsg(resp.Message.Header)
		if err != nil {
			return Message{}, fmt.Errorf("%s %v: headers: %w", stream, req, err)
		}
		m.Header = h
	}
	return m, nil
}

// DeleteMsg removes the message with sequence seq. Removing what is gone is fine.
func (c *Conn) DeleteMsg(ctx context.Context, stream string, seq uint64) error {
	ctx, cancel := context.WithTimeout(ctx, WriteTimeout)
	defer cancel()
	var resp struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := c.api(ctx, "STREAM.MSG.DELETE."+stream, map[string]any{"seq": seq, "no_erase": true}, &resp); err != nil {
		return err
	}
	if resp.Error == nil {
		return nil
	}
	// For a message that is gone the server has several answers (10043, 10057
	// with differing texts), some of which it also gives when a delete failed.
	// Looking is what tells them apart.
	if _, err := c.Get(ctx, stream, seq); errors.Is(err, ErrNotFound) {
		return nil
	}
	return fmt.Errorf("delete %s %d: %w", stream, seq, resp.Error)
}

func (c *Conn) api(ctx context.Context, endpoint string, req, resp any) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	ctx, hangUp := c.line.whole(ctx)
	defer hangUp()
	msg, err := c.NC.RequestWithContext(ctx, "$JS.API."+endpoint, body)
	if err != nil {
		return fmt.Errorf("%s: %w", endpoint, Classify(err))
	}
	if err := json.Unmarshal(msg.Data, resp); err != nil {
		return fmt.Errorf("%s: the server's answer: %w", endpoint, err)
	}
	return nil
}

// KV returns the subject of a key in the task bucket.
func (c *Conn) KV(key string) string { return contract.KVSubject(c.Names.TaskBucket(), key) }

// TaskStream is the stream behind the task bucket.
func (c *Conn) TaskStream() string { return contract.KVStream(c.Names.TaskBucket()) }

// RunKV returns the subject of a key in the run bucket.
func (c *Conn) RunKV(key string) string { return contract.KVSubject(c.Names.RunBucket(), key) }

// RunStream is the stream behind the run bucket.
func (c *Conn) RunStream() string { return contract.KVStream(c.Names.RunBucket()) }
