// Package serve runs an event sink as a configuration says. It is apart from
// package eventsink because it knows the stores, which know that package.
package serve

import (
	"context"
	"fmt"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/eventsink"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// Serve runs a sink until ctx is done.
func Serve(ctx context.Context, env *process.Env) error {
	if env.Config.Eventsink.Store != config.StoreSQLite {
		return fmt.Errorf("eventsink.store: %q is not available in this version; use sqlite", env.Config.Eventsink.Store)
	}
	p, err := env.Open(ctx, "eventsink", func(n contract.Names) []string { return []string{n.EventStream(), n.DeadStream()} })
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer p.Close()
	svc, err := eventsink.New(eventsink.Config{
		BatchSize: env.Config.Eventsink.BatchSize, FlushInterval: time.Duration(env.Config.Eventsink.FlushIntervalMS) * time.Millisecond,
	}, eventsink.Deps{
		Bus: p.Bus, Open: sqlite.Opener(env.DataDir), Log: p.Log, Ready: p.Ready, Ask: p.Metrics.Probes.Ask,
		Registerer: env.Metrics.Registerer(), TracerProvider: p.Tel.TracerProvider(),
	})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}
