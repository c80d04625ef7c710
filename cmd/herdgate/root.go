package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/nats-io/jsm.go/natscontext"
	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/client"
	"github.com/herdgate/herdgate/internal/process"
)

// defaultServer is where the lead listens unless it is configured otherwise.
const defaultServer = "http://127.0.0.1:8484"

// app holds the flags that all verbs share.
type app struct {
	process.Options
	server   string
	output   string
	tokenEnv string
}

// The values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

func (a *app) json() bool { return a.output == outputJSON }

func newRoot() *cobra.Command {
	a := &app{}
	a.Contexts = findContext
	root := &cobra.Command{
		Use:   "herdgate",
		Short: "delegates LLM sub-agent work over NATS, in order and within limits",
		Long: `Herdgate lets a lead agent hand parts of its work to sub-agents, in order and
never more at a time than allowed.

  herdgate demo            the main job with nothing set up
  herdgate up              everything in one process
  herdgate run "PROMPT"    ask a running system for something
  herdgate doctor          find out what is wrong`,
		SilenceUsage: true, SilenceErrors: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if a.output != outputText && a.output != outputJSON {
				return fmt.Errorf("--output: %q is no format; want %s or %s", a.output, outputText, outputJSON)
			}
			return nil
		},
	}
	flags := root.PersistentFlags()
	a.Flags(flags)
	flags.StringVar(&a.server, "server", defaultServer, "address of the lead's HTTP API, for the verbs that ask it")
	flags.StringVar(&a.output, "output", outputText, "text or json")
	flags.StringVar(&a.tokenEnv, "token-env", "", "environment variable that holds the token for the HTTP API")
	root.AddGroup(
		&cobra.Group{ID: "start", Title: "Start it:"},
		&cobra.Group{ID: "use", Title: "Work with a running system:"},
		&cobra.Group{ID: "care", Title: "Set up and look after it:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("start", a.demoCommand(), a.upCommand(), a.mcpCommand())
	add("start", a.serviceCommands()...)
	add("use", a.runCommand(), a.runsCommand(), a.traceCommand(), a.tasksCommand(), a.agentsCommand(), a.eventsCommand())
	add("care", a.doctorCommand(), a.fakeModelCommand(), a.provisionCommand(), a.configCommand(), a.contractCommand(), a.versionCommand())
	return root
}

// findContext reads a context of the nats command-line tool.
func findContext(name string) (string, []nats.Option, error) {
	c, err := natscontext.New(name, true)
	if err != nil {
		return "", nil, err
	}
	opts, err := c.NATSOptions()
	if err != nil {
		return "", nil, err
	}
	return c.ServerURL(), opts, nil
}

// client returns a client for the lead that --server names.
func (a *app) client() (*client.Client, error) {
	token := ""
	if a.tokenEnv != "" {
		if token = os.Getenv(a.tokenEnv); token == "" {
			return nil, fmt.Errorf("--token-env: the environment variable %s is empty or not set", a.tokenEnv)
		}
	}
	c, err := client.New(a.server, token, nil)
	if err != nil {
		return nil, fmt.Errorf("--server: %w", err)
	}
	return c, nil
}

// explain adds to an error of the client what a person can do about it.
func (a *app) explain(err error) error {
	if err == nil {
		return nil
	}
	var dns *net.DNSError
	var api *client.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody answers at %s; is `herdgate up` running? --server names another address (%w)", a.server, err)
	case errors.As(err, &dns):
		return fmt.Errorf("%s cannot be found; --server names another address (%w)", a.server, err)
	case errors.As(err, &api) && api.Status == 401:
		return fmt.Errorf("%w; --token-env names the environment variable that holds your token", err)
	case errors.As(err, &api) && api.RetryAfter > 0:
		return fmt.Errorf("%w; try again in %d s", err, int(api.RetryAfter/time.Second))
	}
	return err
}
