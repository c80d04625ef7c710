package deploy

import (
	"context"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// Compose loads a compose file as docker compose would, without Docker: an
// unknown key or an undefined dependency is an error. env is all the environment
// that it sees, as NAME=value.
func Compose(ctx context.Context, file string, env ...string) (*types.Project, error) {
	o, err := cli.NewProjectOptions([]string{file}, cli.WithEnv(env), cli.WithInterpolation(true), cli.WithResolvedPaths(true))
	if err != nil {
		return nil, err
	}
	return o.LoadProject(ctx)
}
