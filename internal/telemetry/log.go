package telemetry

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"
)

// The formats of log lines.
const (
	FormatJSON    = "json"
	FormatConsole = "console"
)

// logTime is RFC 3339 with exactly six digits after the second, so that lines
// sort as text.
const logTime = "2006-01-02T15:04:05.000000Z07:00"

// levels are the names that NewLogger takes. zerolog's own parser also takes
// numbers and the empty string, which hide mistakes.
var levels = map[string]zerolog.Level{
	"trace": zerolog.TraceLevel,
	"debug": zerolog.DebugLevel,
	"info":  zerolog.InfoLevel,
	"warn":  zerolog.WarnLevel,
	"error": zerolog.ErrorLevel,
}

// NewLogger returns the logger of a service. Lines below level (trace, debug,
// info, warn, error; "" is info) are dropped. The format is json, one object a
// line, or console, for eyes; "" is json. Times are UTC. The logger may be used
// from many goroutines even if w may not.
func NewLogger(w io.Writer, service, level, format string) (zerolog.Logger, error) {
	if level == "" {
		level = "info"
	}
	lvl, ok := levels[level]
	if !ok {
		return zerolog.Nop(), fmt.Errorf("log level: %q is unknown; want trace, debug, info, warn or error", level)
	}
	out := w
	switch format {
	case "", FormatJSON:
	case FormatConsole:
		out = zerolog.ConsoleWriter{Out: w, NoColor: !terminal(w), TimeFormat: "15:04:05.000", TimeLocation: time.UTC}
	default:
		return zerolog.Nop(), fmt.Errorf("log format: %q is unknown; want %s or %s", format, FormatJSON, FormatConsole)
	}
	log := zerolog.New(zerolog.SyncWriter(out)).Level(lvl).Hook(timestamp{})
	if service != "" {
		log = log.With().Str("service", service).Logger()
	}
	return log, nil
}

// timestamp writes the time in our format. zerolog's own timestamp takes its
// format from a package variable, which is not ours to set.
type timestamp struct{}

// Run implements zerolog.Hook.
func (timestamp) Run(e *zerolog.Event, _ zerolog.Level, _ string) {
	e.Str(zerolog.TimestampFieldName, time.Now().UTC().Format(logTime))
}

// terminal reports whether w is a device that shows colours, unless the user
// asked for none (no-color.org).
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Logger returns log with the trace and span of ctx, if there is one, and with
// keyvals: names and values in turn.
func Logger(ctx context.Context, log zerolog.Logger, keyvals ...any) zerolog.Logger {
	with := log.With()
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		with = with.Str("trace_id", sc.TraceID().String()).Str("span_id", sc.SpanID().String())
	}
	if len(keyvals) > 0 {
		with = with.Fields(keyvals)
	}
	return with.Logger()
}
