package mcp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/rs/zerolog"
)

const (
	// maxGarbage is how many lines that are no messages are passed over in a row.
	maxGarbage = 1000
	// idWindow is how much of a message that is too long is kept to find its id in.
	idWindow = 4 << 10
	// maxStderrLine and maxStderrLines bound what a server's error output puts into
	// our log; after a pause of stderrPause there is room for as many again.
	maxStderrLine  = 1 << 10
	maxStderrLines = 100
	stderrPause    = time.Minute
	// maxAsked is how many requests of a server may wait for our answers.
	maxAsked = 1000
	// replyTimeout bounds the writing of what nobody waits for, such as those answers.
	replyTimeout = 10 * time.Second
)

// process starts servers that speak over their standard input and output. The SDK's
// own transport has no limit for a message, waits without end for a server that does
// not read or exit, and ends only the process itself and not what that started.
type process struct {
	argv  []string
	env   []string // NAME=value, all of it
	grace time.Duration
	log   zerolog.Logger
	hide  func(string) string
	// dropped is told of tools that are left out of a list.
	dropped func(string)
}

// Connect implements sdk.Transport. ctx does not bound the life of the process.
func (p *process) Connect(context.Context) (sdk.Connection, error) {
	path, err := exec.LookPath(p.argv[0])
	if err != nil {
		return nil, fmt.Errorf("the command cannot be started: %w", err)
	}
	var pipes [3][2]*os.File
	closeAll := func() {
		for _, pair := range pipes {
			for _, f := range pair {
				if f != nil {
					_ = f.Close() // nothing was written
				}
			}
		}
	}
	for i := range pipes {
		if pipes[i][0], pipes[i][1], err = os.Pipe(); err != nil {
			closeAll()
			return nil, fmt.Errorf("make a pipe: %w", err)
		}
	}
	cmd := &exec.Cmd{Path: path, Args: p.argv, Env: p.env, Stdin: pipes[0][0], Stdout: pipes[1][1], Stderr: pipes[2][1], SysProcAttr: ownGroup()}
	if err := cmd.Start(); err != nil {
		closeAll()
		return nil, fmt.Errorf("the command cannot be started: %w", err)
	}
	for _, theirs := range []*os.File{pipes[0][0], pipes[1][1], pipes[2][1]} {
		_ = theirs.Close() // the process has its own
	}
	c := &pipeConn{
		p: p, cmd: cmd, in: pipes[0][1], out: pipes[1][0], stderr: pipes[2][0],
		exited: make(chan struct{}), incoming: make(chan incoming), closed: make(chan struct{}), writing: make(chan struct{}, 1),
	}
	c.wg.Go(func() {
		_ = cmd.Wait() // how it ended is seen in the state
		killGroup(cmd.Process.Pid)
		close(c.exited)
	})
	c.wg.Go(c.read)
	c.wg.Go(c.readStderr)
	return c, nil
}

type incoming struct {
	msg jsonrpc.Message
	err error
}

// pipeConn is a connection to one process.
type pipeConn struct {
	p               *process
	cmd             *exec.Cmd
	in, out, stderr *os.File
	exited          chan struct{}
	incoming        chan incoming
	closed          chan struct{}
	once            sync.Once
	wg              sync.WaitGroup
	writing         chan struct{} // held by who writes
	asked           atomic.Int64  // requests of the server without an answer
}

// SessionID implements sdk.Connection.
func (*pipeConn) SessionID() string { return "" }

// Read implements sdk.Connection.
func (c *pipeConn) Read(ctx context.Context) (jsonrpc.Message, error) {
	select {
	case m := <-c.incoming:
		return m.msg, m.err
	case <-c.closed:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Write implements sdk.Connection. A server that does not read must not hold whoever
// calls it (F-132), nor by an answer of ours the calls behind it; after half a message,
// or an answer that it did not take, the connection is of no more use.
func (c *pipeConn) Write(ctx context.Context, msg jsonrpc.Message) error {
	if _, ok := msg.(*jsonrpc.Response); ok {
		defer c.asked.Add(-1)
	}
	data, err := jsonrpc.EncodeMessage(msg)
	if err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	data = append(data, '\n')
	_, waited := ctx.Deadline()
	if !waited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, replyTimeout, fmt.Errorf("the server did not read for %v", replyTimeout))
		defer cancel()
	}
	select {
	case c.writing <- struct{}{}:
		defer func() { <-c.writing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := c.in.SetWriteDeadline(time.Time{}); err != nil {
		return fmt.Errorf("write to the server: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.in.SetWriteDeadline(time.Now()) }) // closed is fine
	defer stop()
	n, err := c.in.Write(data)
	if err == nil {
		return nil
	}
	if n > 0 || !waited {
		c.kill()
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("write to the server: %w", err)
}

// kill ends the process and all of its group at once.
func (c *pipeConn) kill() {
	select {
	case <-c.exited: // the number may be somebody else's by now
	default:
		killGroup(c.cmd.Process.Pid)
	}
}

// Close implements sdk.Connection. It ends the input, gives the process a grace, and
// then ends all of its group (F-128).
func (c *pipeConn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		_ = c.in.Close() // a process that is gone has closed it
		grace := time.NewTimer(c.p.grace)
		defer grace.Stop()
		select {
		case <-c.exited:
		case <-grace.C:
			c.kill()
			<-c.exited
		}
		// What has left the group may hold the pipes.
		_, _ = c.out.Close(), c.stderr.Close()
		c.wg.Wait()
	})
	return nil
}

func (c *pipeConn) send(m incoming) bool {
	select {
	case c.incoming <- m:
		return true
	case <-c.closed:
		return false
	}
}

// read reads the messages, one a line.
func (c *pipeConn) read() {
	r := bufio.NewReaderSize(c.out, 64<<10)
	garbage := 0
	for {
		line, long, err := readLine(r, maxMessage, idWindow)
		if len(bytes.TrimSpace(line)) > 0 {
			msg, merr := c.decode(line, long)
			switch {
			case merr == nil:
				garbage = 0
				if req, ok := msg.(*jsonrpc.Request); ok && req.IsCall() && c.asked.Add(1) > maxAsked {
					c.kill() // it would not take the answers either
					c.send(incoming{err: fmt.Errorf("the server asks and does not read the answers: %d are left", maxAsked)})
					return
				}
				if !c.send(incoming{msg: msg}) {
					return
				}
			case errors.Is(merr, errNoMessage):
				if garbage++; garbage == 1 {
					c.p.log.Warn().Str("line", c.p.hide(clip(clean(string(line)), 200))).Msg("an MCP server wrote something to its output that is no message; it is passed over")
				}
				if garbage > maxGarbage {
					c.send(incoming{err: fmt.Errorf("the server wrote %d lines to its output that are no messages", garbage)})
					return
				}
			default:
				c.send(incoming{err: merr})
				return
			}
		}
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				err = io.EOF
			}
			c.send(incoming{err: err})
			return
		}
	}
}

func (c *pipeConn) decode(line []byte, long bool) (jsonrpc.Message, error) {
	var err error
	if long {
		line, err = failure(line, fmt.Sprintf("the server's answer is longer than %d bytes and was not read", maxMessage))
	} else {
		line, err = mend(line, c.p.dropped)
	}
	if err != nil {
		return nil, err
	}
	msg, err := jsonrpc.DecodeMessage(line)
	if err != nil {
		return nil, errNoMessage
	}
	return msg, nil
}

// readLine reads up to the end of a line. Of one that is longer than limit, keep bytes
// are returned and the rest is passed over.
func readLine(r *bufio.Reader, limit, keep int) (line []byte, long bool, err error) {
	for {
		part, err := r.ReadSlice('\n')
		if !long {
			line = append(line, part...)
			if len(line) > limit {
				line, long = bytes.Clone(line[:keep]), true
			}
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, long, err
		}
	}
}

// readStderr puts the server's error output into the log, as far as there is room.
func (c *pipeConn) readStderr() {
	r := bufio.NewReaderSize(c.stderr, 4<<10)
	from, lines, left := time.Now(), 0, 0
	for {
		line, _, err := readLine(r, maxStderrLine, maxStderrLine)
		if text := string(bytes.TrimSpace(line)); text != "" {
			if time.Since(from) > stderrPause {
				from, lines = time.Now(), 0
			}
			if lines++; lines <= maxStderrLines {
				c.p.log.Info().Str("stderr", c.p.hide(clean(text))).Msg("an MCP server says")
			} else {
				left++
			}
		}
		if err != nil {
			if left > 0 {
				c.p.log.Info().Int("lines", left).Msg("more that the MCP server wrote to its error output was not logged")
			}
			return
		}
	}
}
