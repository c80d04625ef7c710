// Package configured opens the models that a configuration names. It is apart
// from package process so that services without models do not link the
// providers' libraries.
package configured

import (
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/open"
	"github.com/herdgate/herdgate/internal/process"
)

// Open returns the models of a process. With a script of its own, a process has
// the offline model alone.
func Open(env *process.Env, log zerolog.Logger) (*model.Registry, error) {
	if env.Script != nil {
		return open.OpenWithLog([]open.Spec{{Name: "offline", Provider: config.ProviderScript, ScriptData: env.Script, MaxRetries: 3}}, log)
	}
	specs := make([]open.Spec, 0, len(env.Config.Models))
	for _, m := range env.Config.Models {
		var price *model.Price
		if p := m.Price; p != nil {
			price = &model.Price{Input: p.InputPerMillion, Output: p.OutputPerMillion, CachedInput: p.CachedInputPerMillion}
		}
		specs = append(specs, open.Spec{
			Name: m.Name, Provider: m.Provider, Model: m.Model, BaseURL: m.BaseURL, APIKeyEnv: m.APIKeyEnv, Script: m.Script,
			RequestTimeout: time.Duration(m.RequestTimeoutSeconds) * time.Second, IdleTimeout: time.Duration(m.IdleTimeoutSeconds) * time.Second,
			MaxInputTokens: m.MaxInputTokens, MaxOutputTokens: m.MaxOutputTokens, MaxRetries: m.MaxRetries, Price: price,
		})
	}
	return open.OpenWithLog(specs, log)
}
