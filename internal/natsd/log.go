package natsd

import (
	"fmt"

	"github.com/rs/zerolog"
)

// logger writes the server's messages to zerolog. The server calls Fatalf and
// goes on; the program must not end either, it has other things to close.
type logger struct {
	log zerolog.Logger
	// fatal keeps the first fatal message for whoever starts the server.
	fatal chan string
}

func newLogger(log zerolog.Logger) *logger {
	return &logger{log: log.With().Str("component", "nats-server").Logger(), fatal: make(chan string, 1)}
}

// Noticef is at debug level: the server tells at length what it does at start.
func (l *logger) Noticef(format string, v ...any) { l.log.Debug().Msgf(format, v...) }

func (l *logger) Warnf(format string, v ...any) { l.log.Warn().Msgf(format, v...) }

func (l *logger) Errorf(format string, v ...any) { l.log.Error().Msgf(format, v...) }

func (l *logger) Debugf(format string, v ...any) { l.log.Trace().Msgf(format, v...) }

func (l *logger) Tracef(format string, v ...any) { l.log.Trace().Msgf(format, v...) }

func (l *logger) Fatalf(format string, v ...any) {
	msg := fmt.Sprintf(format, v...)
	l.log.Error().Msg(msg)
	select {
	case l.fatal <- msg:
	default:
	}
}
