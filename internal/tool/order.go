package tool

import "context"

// OnFiles is a tool that works on a workspace. The calls of one answer run side
// by side, but a model that writes a file and reads it in one answer means "and
// then": what writes waits for everything on files before it, and what reads
// waits for what wrote before it.
type OnFiles interface {
	Tool
	// Writes reports whether a call may change files.
	Writes() bool
}

// FileOrder gives the calls of one answer on files their order. The zero value is
// ready; it is used by one goroutine, in the order of the calls.
type FileOrder struct {
	writer  <-chan struct{}
	readers []<-chan struct{}
}

// Next takes the next call in. Its wait returns when the call may begin, or with
// ctx's cause; its end must be called when the call has returned.
func (o *FileOrder) Next(writes bool) (wait func(ctx context.Context) error, end func()) {
	done := make(chan struct{})
	var before []<-chan struct{}
	if o.writer != nil {
		before = append(before, o.writer)
	}
	if writes {
		before = append(before, o.readers...)
		o.writer, o.readers = done, nil
	} else {
		o.readers = append(o.readers, done)
	}
	return func(ctx context.Context) error {
		for _, b := range before {
			select {
			case <-b:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	}, func() { close(done) }
}
