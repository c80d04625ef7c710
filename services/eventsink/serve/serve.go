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
	"github.com/herdgate/herdgate/services/eventsink/postgres"
	"github.com/herdgate/herdgate/services/eventsink/sqlite"
)

// Serve runs a sink until ctx is done.
func Serve(ctx context.Context, env *process.Env) error {
	cfg := env.Config.Eventsink
	shared := cfg.Replicas == config.SinksShare
	var open eventsink.OpenFunc
	switch cfg.Store {
	case config.StoreSQLite:
		open = sqlite.FileOpener(sqlite.Path(env.DataDir, cfg.DSN.Reveal()))
	case config.StorePostgres:
		open = postgres.Opener(cfg.DSN.Reveal(), shared)
	default:
		return fmt.Errorf("eventsink.store: %q is not known; use %s or %s", cfg.Store, config.StoreSQLite, config.StorePostgres)
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
		BatchSize: cfg.BatchSize, FlushInterval: time.Duration(cfg.FlushIntervalMS) * time.Millisecond,
		Shared: shared, Retention: time.Duration(cfg.RetentionDays) * 24 * time.Hour,
	}, eventsink.Deps{
		Bus: p.Bus, Open: open, Log: p.Log, Ready: p.Ready, Ask: p.Metrics.Probes.Ask,
		Registerer: env.Metrics.Registerer(), TracerProvider: p.Tel.TracerProvider(),
	})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}
