// Package admissionapi is the request and reply of the gate's status endpoint
// on NATS, for the gate that answers and for everybody who asks.
package admissionapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/herdgate/herdgate/internal/bus"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Service and Endpoint name the endpoint: see [contract.Names.Service].
const (
	Service  = "admission"
	Endpoint = "status"
)

// MaxSlots bounds the slots in an answer, so that it stays below the payload
// limit of NATS; Running has the real number.
const MaxSlots = 2000

// StatusRequest asks for the gate's state, and for the place of one task in the
// queue when TaskID is set.
type StatusRequest struct {
	TaskID contract.TaskID `json:"task_id,omitempty"`
}

// Status is the gate's state as its leader sees it.
type Status struct {
	// Leader is the process that holds the gate; empty when nobody does.
	Leader string `json:"leader"`
	// Epoch is the leader key's revision with which the leader won.
	Epoch uint64 `json:"epoch"`
	// MaxRunning, Running and Queued count all pools.
	MaxRunning     int        `json:"max_running"`
	Running        int        `json:"running"`
	Queued         int        `json:"queued"`
	MaxQueued      int        `json:"max_queued"`
	OldestQueuedAt *time.Time `json:"oldest_queued_at"`
	Slots          []Slot     `json:"slots"`
	// Pools has every pool, the default pool first.
	Pools  []Pool `json:"pools,omitempty"`
	Totals Totals `json:"totals"`
	// QueuePosition is the place of the task that was asked for in the queue of
	// its pool: 1 is next, unless limits hold it back. It is absent when that
	// task is not waiting.
	QueuePosition *int `json:"queue_position,omitempty"`
}

// Pool is the use of one pool.
type Pool struct {
	Pool           contract.Pool `json:"pool"`
	MaxRunning     int           `json:"max_running"`
	Running        int           `json:"running"`
	Queued         int           `json:"queued"`
	OldestQueuedAt *time.Time    `json:"oldest_queued_at"`
}

// Totals count what the process that leads has done since it was started; its
// metrics say the same.
type Totals struct {
	Since  time.Time `json:"since"`
	Grants int       `json:"grants"`
	// Expiries are attempts whose lease ran out.
	Expiries int `json:"expiries"`
	// Refusals are tasks that were ended instead of granted, by error code. What
	// found the queue full was refused before it came here.
	Refusals map[contract.ErrorCode]int `json:"refusals,omitempty"`
	// FenceRejections are writes that the server refused because another process
	// had become the leader.
	FenceRejections int `json:"fence_rejections"`
	// Takeovers are how often it became the leader.
	Takeovers int `json:"takeovers"`
}

// Slot is a slot in use.
type Slot struct {
	Pool contract.Pool `json:"pool,omitempty"`
	// Slot is a number within the pool.
	Slot     int             `json:"slot"`
	TaskID   contract.TaskID `json:"task_id"`
	Executor string          `json:"executor"`
	// ExpiresAt is when the lease runs out unless it is renewed; null while no
	// executor has claimed the task.
	ExpiresAt *time.Time `json:"expires_at"`
}

// ErrNoLeader is returned when nobody answered in time: there is no gate, or
// none of them leads at the moment.
var ErrNoLeader = errors.New("no admission leader answered")

// Subject is the endpoint's subject.
func Subject(n contract.Names) string { return n.Service(Service, Endpoint) }

// retryWait is the pause between two questions. A take-over leaves a short time
// without an answer.
const retryWait = 100 * time.Millisecond

// Ask asks the leader and repeats the question until it gets an answer or ctx is
// done; ctx should have a deadline.
func Ask(ctx context.Context, c *bus.Conn, req StatusRequest) (Status, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return Status{}, err
	}
	for {
		s, err := ask(ctx, c, body)
		if err == nil {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return Status{}, fmt.Errorf("admission status: %w: %w", ErrNoLeader, err)
		case <-time.After(retryWait):
		}
	}
}

func ask(ctx context.Context, c *bus.Conn, body []byte) (Status, error) {
	msg, err := c.NC.RequestWithContext(ctx, Subject(c.Names), body)
	if err != nil {
		return Status{}, err
	}
	return Decode(msg)
}

// Decode reads an answer; an error that the service reported becomes an error.
func Decode(msg *nats.Msg) (Status, error) {
	if code := msg.Header.Get("Nats-Service-Error-Code"); code != "" {
		return Status{}, fmt.Errorf("the gate answered with error %.20s: %.200s", code, msg.Header.Get("Nats-Service-Error"))
	}
	if err := contract.CheckDepth(msg.Data, contract.MaxDepth); err != nil {
		return Status{}, err
	}
	var s Status
	if err := json.Unmarshal(msg.Data, &s); err != nil {
		return Status{}, fmt.Errorf("the gate's answer: %w", err)
	}
	return s, nil
}
