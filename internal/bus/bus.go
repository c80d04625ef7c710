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
	"net/http"
	"strconv"
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

	line  *line
	calls *calls
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
	// ErrDoubt: there was no answer, or none that says what became of the write. It
	// may have landed, may land later, or may be lost. A read with it found nobody
	// who could answer.
	ErrDoubt = errors.New("in doubt: no certain answer from the server")
	// ErrFull: a bounded stream has no room.
	ErrFull = errors.New("stream is full")
	// ErrExists: the subject already has its one message.
	ErrExists = errors.New("subject already has a message")
	// ErrTooLarge: the message is above the server's or the stream's limit.
	ErrTooLarge = errors.New("message is too large")
	// ErrNotFound: there is no message on the subject.
	ErrNotFound = errors.New("no message on the subject")
	// ErrNotProvisioned: there is no such stream, bucket or consumer.
	ErrNotProvisioned = errors.New("not there; run `herdgate provision`")
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
	sent, err := c.Send(w)
	if err != nil {
		return Ack{}, err
	}
	return sent.Wait(ctx)
}

// Sent is a write that is on its way.
type Sent struct {
	subject string
	call    *call
}

// Send writes without waiting; what one goroutine sends reaches the server in that
// order. Whoever sends must wait.
func (c *Conn) Send(w Write) (Sent, error) {
	call, err := c.calls.send(c.NC, w.message())
	if err != nil {
		return Sent{}, fmt.Errorf("publish %s: %w", w.Subject, Classify(err))
	}
	return Sent{w.Subject, call}, nil
}

// Done is closed when Wait will not wait any more.
func (s Sent) Done() <-chan struct{} { return s.call.done }

// Wait waits for the acknowledgement as [Conn.Publish] does.
func (s Sent) Wait(ctx context.Context) (Ack, error) {
	ack, err := s.wait(ctx)
	if err != nil {
		return Ack{}, fmt.Errorf("publish %s: %w", s.subject, Classify(err))
	}
	return ack, nil
}

func (s Sent) wait(ctx context.Context) (Ack, error) {
	msg, err := s.call.wait(ctx)
	if errors.Is(err, nats.ErrNoResponders) {
		return Ack{}, jetstream.ErrNoStreamResponse
	}
	if err != nil {
		return Ack{}, err
	}
	var answer struct {
		Error     *jetstream.APIError `json:"error"`
		Stream    string              `json:"stream"`
		Seq       uint64              `json:"seq"`
		Duplicate bool                `json:"duplicate"`
	}
	switch err := json.Unmarshal(msg.Data, &answer); {
	case err != nil, answer.Error == nil && answer.Stream == "":
		return Ack{}, jetstream.ErrInvalidJSAck
	case answer.Error != nil:
		return Ack{}, answer.Error
	}
	return Ack{Seq: answer.Seq, Duplicate: answer.Duplicate}, nil
}

// PublishAsync writes without waiting. The caller must look at the future, whose
// error is to be read with [Classify]. For many messages at once: it holds back
// who sends more than the server takes.
func (c *Conn) PublishAsync(w Write) (jetstream.PubAckFuture, error) {
	// The default retry of nats.go would send again behind our back after "no
	// responders"; for a write with an expectation the caller decides that.
	f, err := c.JS.PublishMsgAsync(w.message(), jetstream.WithRetryAttempts(0), jetstream.WithStallWait(WriteTimeout))
	if err != nil {
		return nil, fmt.Errorf("publish %s: %w", w.Subject, Classify(err))
	}
	return f, nil
}

func (w Write) message() *nats.Msg {
	msg := nats.NewMsg(w.Subject)
	msg.Data = w.Data
	for k, v := range w.Header {
		msg.Header[k] = v
	}
	set := func(key, v string) { msg.Header[key] = []string{v} }
	if w.MsgID != "" {
		set(jetstream.MsgIDHeader, w.MsgID)
	}
	if w.TTL > 0 {
		set(jetstream.MsgTTLHeader, w.TTL.String())
	}
	if w.Expect != nil {
		set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(*w.Expect, 10))
		if w.ExpectSubject != "" && w.ExpectSubject != w.Subject {
			set(jetstream.ExpectedLastSubjSeqSubjHeader, w.ExpectSubject)
		}
	}
	return msg
}

// Error codes of the server that we act on. No other package looks at one, except
// for provision, which asks for other things.
const (
	codeWrongLastSequence         jetstream.ErrorCode = 10071
	codeWrongLastSequenceConstant jetstream.ErrorCode = 10164
	// The store took nothing: because of a limit, with discard new, or for
	// another reason that only its text tells.
	codeStreamStoreFailed     jetstream.ErrorCode = 10077
	codeMessageExceedsMaximum jetstream.ErrorCode = 10054
	codeMessageNotFound       jetstream.ErrorCode = 10037
	// An earlier write with the same id is under way and not stored yet.
	codeDuplicateInProcess jetstream.ErrorCode = 10158
	codeStreamNotFound     jetstream.ErrorCode = 10059
	codeConsumerNotFound   jetstream.ErrorCode = 10014
)

// Texts of the server with codeStreamStoreFailed.
const (
	textMaxPerSubject = "per subject exceeded"
	textMaxMsgs       = "maximum messages exceeded"
	textMaxBytes      = "maximum bytes exceeded"
	textTooLarge      = "message too large"
)

// Racing reports whether a conflict may have come from a write of our own or a
// sibling that was still in flight (10164), so that nothing need have moved.
func Racing(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == codeWrongLastSequenceConstant
}

// Classify turns an error of the server, or of the way to it, into one of this
// package's, keeping the cause. It is the one place that knows what those errors
// mean. Unknown errors come back as they are.
//
// What a server says while it stops, or while its cluster has no leader, is no
// refusal: others of the cluster may have stored the write, so it is in doubt.
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
			switch {
			case containsFold(api.Description, textMaxPerSubject):
				return fmt.Errorf("%w: %w", ErrExists, err)
			case containsFold(api.Description, textMaxMsgs), containsFold(api.Description, textMaxBytes):
				return fmt.Errorf("%w: %w", ErrFull, err)
			case containsFold(api.Description, textTooLarge):
				return fmt.Errorf("%w: %w", ErrTooLarge, err)
			}
			return fmt.Errorf("%w: %w", ErrDoubt, err)
		case codeMessageExceedsMaximum:
			return fmt.Errorf("%w: %w", ErrTooLarge, err)
		case codeDuplicateInProcess:
			return fmt.Errorf("%w: %w", ErrDoubt, err)
		case codeMessageNotFound:
			return fmt.Errorf("%w: %w", ErrNotFound, err)
		case codeStreamNotFound, codeConsumerNotFound:
			return fmt.Errorf("%w: %w", ErrNotProvisioned, err)
		}
		if api.Code >= 500 || api.Code == http.StatusTooManyRequests {
			return fmt.Errorf("%w: %w", ErrDoubt, err)
		}
		return err
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("%w: %w", ErrTooLarge, err)
	case errors.Is(err, jetstream.ErrBucketNotFound):
		return fmt.Errorf("%w: %w", ErrNotProvisioned, err)
	case errors.Is(err, errCut), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled),
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
		return Message{}, fmt.Errorf("%s %v: %w", stream, req, Classify(resp.Error))
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
	return fmt.Errorf("delete %s %d: %w", stream, seq, Classify(resp.Error))
}

func (c *Conn) api(ctx context.Context, endpoint string, req, resp any) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	call, err := c.calls.send(c.NC, &nats.Msg{Subject: "$JS.API." + endpoint, Data: body})
	if err != nil {
		return fmt.Errorf("%s: %w", endpoint, Classify(err))
	}
	msg, err := call.wait(ctx)
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
