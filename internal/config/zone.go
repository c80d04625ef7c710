package config

import (
	"time"
	_ "time/tzdata" // a name is known, or not, on every machine alike
)

// Location is the time zone of the date that sub-agents are told.
func (e Executor) Location() (*time.Location, error) {
	if e.TimeZone == "" {
		return time.Local, nil
	}
	return time.LoadLocation(e.TimeZone)
}
