package admission

import (
	"context"
	"time"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/process"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/services/admission/gate"
)

// Serve runs an admission process as its configuration says.
func Serve(ctx context.Context, env *process.Env) error {
	p, err := env.Open(ctx, "admission", func(n contract.Names) []string {
		return []string{n.WorkStream(), n.GrantStream(), n.EventStream(), n.DeadStream(), contract.KVStream(n.TaskBucket())}
	})
	if err != nil {
		return ended(ctx, err)
	}
	defer p.Close()
	r := env.Config.SubagentRuntime
	svc, err := New(Config{
		Name: env.Name, MaxRunning: r.MaxRunning, Limits: limits(r.Limits), Pools: pools(r.Pools), MaxQueued: r.MaxQueued, Policy: r.AdmissionPolicy,
		QueueTimeout: time.Duration(r.QueueTimeoutSeconds) * time.Second, LeaseTTL: time.Duration(r.LeaseTTLSeconds) * time.Second,
		LeaderTTL: time.Duration(r.LeaderTTLSeconds) * time.Second, RetryLost: gate.RetryLost(env.Config.Executor.RetryLost),
	}, Deps{Bus: p.Bus, Log: p.Log, TracerProvider: p.Tel.TracerProvider(), Registerer: env.Metrics.Registerer(), Ready: p.Ready})
	if err != nil {
		return err
	}
	return svc.Run(ctx)
}

func limits(l config.RuntimeLimits) gate.Limits {
	return gate.Limits{PerTenant: l.PerTenant, PerThread: l.PerThread, PerType: l.PerType}
}

func pools(all map[string]config.RuntimePool) map[contract.Pool]gate.Pool {
	out := map[contract.Pool]gate.Pool{}
	for name, p := range all {
		out[contract.Pool(name)] = gate.Pool{MaxRunning: p.MaxRunning, Limits: limits(p.Limits)}
	}
	return out
}

// ended leaves out an error that only says that we were asked to stop.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
