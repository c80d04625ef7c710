package tool

import "context"

type progressKey struct{}

// WithProgress returns a context under which [Progress] calls told. Calls come
// from several goroutines and as often as there is output, so told must be
// cheap and must not block.
func WithProgress(ctx context.Context, told func()) context.Context {
	return context.WithValue(ctx, progressKey{}, told)
}

// Progress tells whoever runs the tool that its work goes on. A tool that can
// take long calls it whenever something has happened, and never merely because
// time has passed. Where nobody listens it does nothing.
func Progress(ctx context.Context) {
	if told, ok := ctx.Value(progressKey{}).(func()); ok {
		told()
	}
}
