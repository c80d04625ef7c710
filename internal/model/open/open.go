// Package open makes the configured models ready.
package open

import (
	"fmt"
	"os"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/model/anthropic"
	"github.com/herdgate/herdgate/internal/model/openai"
	"github.com/herdgate/herdgate/internal/model/provider"
	"github.com/herdgate/herdgate/internal/model/retry"
	"github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/model/tokens"
)

// Providers lists the providers of this build.
func Providers() []string { return []string{"openai", "anthropic", "script"} }

// Spec describes one model, as configured.
type Spec struct {
	// Name is unique among the models.
	Name string
	// Provider is one of [Providers].
	Provider string
	// Model is the provider's name of the model; script takes its own.
	Model   string
	BaseURL string
	// APIKeyEnv names the environment variable with the key. It is read at every
	// request, so that a key can be changed, and may be empty for local servers.
	APIKeyEnv string
	// Script is the path of a script, ScriptData its text instead of a file.
	Script     string
	ScriptData []byte
	// RequestTimeout and IdleTimeout: 0 takes the provider's default.
	RequestTimeout, IdleTimeout time.Duration
	// MaxOutputTokens bounds one answer; 0 takes the provider's default.
	MaxOutputTokens int
	// MaxInputTokens is what the model reads at most; 0: not known.
	MaxInputTokens int
	// Price is nil when what tokens cost is not to be told.
	Price *model.Price
	// MaxRetries: 0 is no retry.
	MaxRetries int
	// RetryBase is the first wait between tries: 0 is 500 ms, for scripts 20 ms.
	// RetryCap is the longest one: 0 is 30 s.
	RetryBase, RetryCap time.Duration
}

// Open returns the models of specs with their retries, the first one being the
// default.
func Open(specs []Spec) (*model.Registry, error) { return OpenWithLog(specs, zerolog.Nop()) }

// OpenWithLog is [Open]; retries are logged to log.
func OpenWithLog(specs []Spec, log zerolog.Logger) (*model.Registry, error) {
	models := make([]model.Model, 0, len(specs))
	for i, s := range specs {
		m, err := open(s)
		if err != nil {
			return nil, fmt.Errorf("models[%d]: %w", i, err)
		}
		if s.MaxInputTokens > 0 {
			m = tokens.Limit(m, s.MaxInputTokens)
		}
		if s.Price != nil {
			m = model.Priced(m, *s.Price)
		}
		if s.MaxRetries > 0 {
			m = retry.Retry(m, retry.Policy{MaxRetries: s.MaxRetries, Base: retryBase(s), Cap: s.RetryCap}, log)
		}
		models = append(models, m)
	}
	return model.NewRegistry(models...)
}

func open(s Spec) (model.Model, error) {
	if s.Name == "" {
		return nil, fmt.Errorf("name is empty; want a name to call the model by")
	}
	switch s.Provider {
	case "openai":
		return openai.New(s.config())
	case "anthropic":
		return anthropic.New(s.config())
	case "script":
		parsed, err := loadScript(s)
		if err != nil {
			return nil, fmt.Errorf("model %q: %w", s.Name, err)
		}
		return script.New(s.Name, parsed), nil
	}
	return nil, fmt.Errorf("model %q: provider is %q; want one of %q", s.Name, s.Provider, Providers())
}

func (s Spec) config() provider.Config {
	return provider.Config{
		Name: s.Name, Model: s.Model, BaseURL: s.BaseURL,
		Key: func() string { return lookup(s.APIKeyEnv) }, KeyEnv: s.APIKeyEnv,
		RequestTimeout: s.RequestTimeout, IdleTimeout: s.IdleTimeout, MaxOutputTokens: s.MaxOutputTokens,
	}
}

func loadScript(s Spec) (*script.Script, error) {
	switch {
	case s.ScriptData != nil:
		return script.Parse(s.Name, s.ScriptData)
	case s.Script == "":
		return nil, fmt.Errorf("script is empty; want the path of a script file")
	}
	return script.Load(s.Script)
}

func lookup(env string) string {
	if env == "" {
		return ""
	}
	return os.Getenv(env)
}

func retryBase(s Spec) time.Duration {
	if s.RetryBase == 0 && s.Provider == "script" {
		return 20 * time.Millisecond // nobody to spare
	}
	return s.RetryBase
}
