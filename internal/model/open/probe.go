package open

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/herdgate/herdgate/internal/model/anthropic"
	"github.com/herdgate/herdgate/internal/model/openai"
)

// Probe asks the provider whether it has the model and takes the key, and has
// nothing generated. False without an error: the server is there, and does not tell
// which models it has. A failure of the server is a *model.Error.
func Probe(ctx context.Context, s Spec, key string) (bool, error) {
	cfg := s.config()
	cfg.Key = func() string { return key }
	key = strings.TrimSpace(key)
	header := http.Header{}
	switch s.Provider {
	case "openai":
		cfg, err := cfg.Checked(openai.DefaultBaseURL)
		if err != nil {
			return false, err
		}
		if key != "" {
			header.Set("Authorization", "Bearer "+key)
		}
		return cfg.Probe(ctx, strings.TrimRight(cfg.BaseURL, "/")+"/models", header)
	case "anthropic":
		cfg, err := cfg.Checked(anthropic.DefaultBaseURL)
		if err != nil {
			return false, err
		}
		header.Set("Anthropic-Version", "2023-06-01")
		if key != "" {
			header.Set("X-Api-Key", key)
		}
		return cfg.Probe(ctx, strings.TrimSuffix(strings.TrimRight(cfg.BaseURL, "/"), "/v1")+"/v1/models", header)
	}
	return false, fmt.Errorf("provider %q has no server to ask", s.Provider)
}
