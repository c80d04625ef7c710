package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ErrPullLost: what a puller has asked for may be forgotten; it has to be made anew.
var ErrPullLost = errors.New("the server may have forgotten what it was asked for")

const (
	// pullExpiry is after how long the server drops what it was asked for.
	pullExpiry = 30 * time.Second
	// pullBeat is how often it says that it still knows of it.
	pullBeat = time.Second
	// pullAhead is how much is asked for at most. What was sent to a process that is
	// frozen then comes to others only after the consumer's wait, so it is not much.
	pullAhead = 4
)

// Delivery is a message of a consumer, to be dealt with by one of its methods.
type Delivery struct {
	c   *Conn
	msg *nats.Msg
}

var _ jetstream.Msg = Delivery{}

// Subject implements [jetstream.Msg].
func (d Delivery) Subject() string { return d.msg.Subject }

// Reply implements [jetstream.Msg].
func (d Delivery) Reply() string { return d.msg.Reply }

// Data implements [jetstream.Msg].
func (d Delivery) Data() []byte { return d.msg.Data }

// Headers implements [jetstream.Msg].
func (d Delivery) Headers() nats.Header { return d.msg.Header }

// Metadata implements [jetstream.Msg].
func (d Delivery) Metadata() (*jetstream.MsgMetadata, error) {
	m, err := d.msg.Metadata()
	if err != nil {
		return nil, err
	}
	return &jetstream.MsgMetadata{
		Sequence:     jetstream.SequencePair{Consumer: m.Sequence.Consumer, Stream: m.Sequence.Stream},
		NumDelivered: m.NumDelivered, NumPending: m.NumPending, Timestamp: m.Timestamp,
		Stream: m.Stream, Consumer: m.Consumer, Domain: m.Domain,
	}, nil
}

// Ack implements [jetstream.Msg].
func (d Delivery) Ack() error { return d.respond("+ACK") }

// DoubleAck implements [jetstream.Msg].
func (d Delivery) DoubleAck(ctx context.Context) error {
	call, err := d.c.calls.send(d.c.NC, &nats.Msg{Subject: d.msg.Reply, Data: []byte("+ACK")})
	if err == nil {
		_, err = call.wait(ctx)
	}
	return err
}

// Nak implements [jetstream.Msg].
func (d Delivery) Nak() error { return d.respond("-NAK") }

// NakWithDelay implements [jetstream.Msg].
func (d Delivery) NakWithDelay(delay time.Duration) error {
	return d.respond(fmt.Sprintf(`-NAK {"delay": %d}`, delay.Nanoseconds()))
}

// InProgress implements [jetstream.Msg].
func (d Delivery) InProgress() error { return d.respond("+WPI") }

// Term implements [jetstream.Msg].
func (d Delivery) Term() error { return d.respond("+TERM") }

// TermWithReason implements [jetstream.Msg].
func (d Delivery) TermWithReason(reason string) error { return d.respond("+TERM " + reason) }

func (d Delivery) respond(what string) error { return d.c.NC.Publish(d.msg.Reply, []byte(what)) }

// Puller takes messages of a pull consumer, never more than there is room for. It
// asks ahead, for a few at once and again when half of them are there, so that no
// message waits for a question. It is not safe for concurrent use.
type Puller struct {
	c       *Conn
	next    string // where questions go
	inbox   string
	sub     *nats.Subscription
	msgs    chan *nats.Msg
	gone    chan struct{}   // closed when the subscription is
	line    context.Context //nolint:containedctx // the life of the connection
	hangUp  func()
	asked   int // messages that were asked for and have not come
	beat    *time.Timer
	closing chan struct{}
}

// Pull prepares to take messages of a consumer. The puller must be closed.
func (c *Conn) Pull(ctx context.Context, stream, consumer string) (*Puller, error) {
	line, hangUp := c.line.whole(context.Background())
	if _, err := c.JS.Consumer(ctx, stream, consumer); err != nil {
		hangUp()
		return nil, err
	}
	p := &Puller{
		c: c, next: "$JS.API.CONSUMER.MSG.NEXT." + stream + "." + consumer, inbox: c.NC.NewInbox(),
		msgs: make(chan *nats.Msg, 64), gone: make(chan struct{}), line: line, hangUp: hangUp,
		beat: time.NewTimer(3 * pullBeat), closing: make(chan struct{}),
	}
	var err error
	p.sub, err = c.NC.Subscribe(p.inbox, func(m *nats.Msg) {
		select {
		case p.msgs <- m:
		case <-p.closing:
			p.giveBack(m)
		}
	})
	if err != nil {
		hangUp()
		return nil, fmt.Errorf("pull from %s: %w", consumer, err)
	}
	var once sync.Once
	p.sub.SetClosedHandler(func(string) { once.Do(func() { close(p.gone) }) })
	return p, nil
}

// Next waits for a message while there is room for that many. It returns false
// when ctx is done, or when wake tells that there may be more room.
func (p *Puller) Next(ctx context.Context, room int, wake <-chan struct{}) (Delivery, bool, error) {
	for {
		if want := min(room, pullAhead); p.asked <= want/2 && p.asked < want {
			if err := p.ask(want - p.asked); err != nil {
				return Delivery{}, false, err
			}
		}
		select {
		case <-ctx.Done():
			return Delivery{}, false, nil
		case <-wake:
			return Delivery{}, false, nil
		case <-p.line.Done():
			return Delivery{}, false, fmt.Errorf("%w: %w", ErrPullLost, errCut)
		case <-p.beat.C:
			if p.asked == 0 {
				continue // nothing is to be heard
			}
			return Delivery{}, false, fmt.Errorf("%w: it is silent", ErrPullLost)
		case m := <-p.msgs:
			p.beat.Reset(3 * pullBeat)
			if m.Reply == "" {
				if err := p.status(m); err != nil {
					return Delivery{}, false, err
				}
				continue
			}
			p.asked = max(0, p.asked-1)
			return Delivery{p.c, m}, true, nil
		}
	}
}

func (p *Puller) ask(n int) error {
	body, err := json.Marshal(struct {
		Batch     int           `json:"batch"`
		Expires   time.Duration `json:"expires"`
		Heartbeat time.Duration `json:"idle_heartbeat"`
	}{n, pullExpiry, pullBeat})
	if err != nil {
		return err
	}
	if err := p.c.NC.PublishRequest(p.next, p.inbox, body); err != nil {
		return fmt.Errorf("%w: %w", ErrPullLost, err)
	}
	if p.asked == 0 {
		p.beat.Reset(3 * pullBeat)
	}
	p.asked += n
	return nil
}

// status reads what the server says instead of delivering.
func (p *Puller) status(m *nats.Msg) error {
	switch code := m.Header.Get("Status"); code {
	case "100": // it is still there
		return nil
	case "404", "408": // a question has expired
		n, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages"))
		if err != nil {
			return fmt.Errorf("%w: status %s without a count", ErrPullLost, code)
		}
		p.asked = max(0, p.asked-n)
		return nil
	default:
		return fmt.Errorf("%w: %s %s", ErrPullLost, code, m.Header.Get("Description"))
	}
}

// Close takes back what was asked for and gives back what has come and nobody has
// taken.
func (p *Puller) Close() {
	defer p.hangUp()
	p.beat.Stop()
	close(p.closing)
	if p.line.Err() != nil || p.sub.Drain() != nil {
		// What was on its way is lost with the connection, and comes again.
		_ = p.sub.Unsubscribe()
	} else {
		limit := time.NewTimer(WriteTimeout)
		defer limit.Stop()
		select {
		case <-p.gone:
		case <-p.line.Done():
			_ = p.sub.Unsubscribe()
		case <-limit.C:
			_ = p.sub.Unsubscribe()
		}
	}
	for {
		select {
		case m := <-p.msgs:
			p.giveBack(m)
		default:
			return
		}
	}
}

func (p *Puller) giveBack(m *nats.Msg) {
	if m.Reply != "" {
		_ = Delivery{p.c, m}.Nak()
	}
}
