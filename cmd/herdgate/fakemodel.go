package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/herdgate/herdgate/internal/model/fakeserver"
	"github.com/herdgate/herdgate/internal/model/script"
	"github.com/herdgate/herdgate/internal/rungroup"
)

func (a *app) fakeModelCommand() *cobra.Command {
	var file, listen string
	cmd := &cobra.Command{
		Use: "fake-model --script FILE", Short: "a strict local model server that answers out of a script, faults included", Args: cobra.NoArgs,
		Long: `Serves the rules of a script over HTTP as a provider would: POST /v1/chat/completions
(provider: openai) and POST /v1/messages (provider: anthropic), streamed or not. Requests
that a provider would refuse are refused with status 400, and the reason is printed.
The rules are those of provider: script; a request that offers the tool task is the
lead's, all others fit the rules of any sub-agent. No key is asked for.`,
		Example: `  herdgate fake-model --script rules.yaml --listen 127.0.0.1:9000
  # models: [{name: main, provider: openai, model: any, base_url: "http://127.0.0.1:9000/v1"}]`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.fakeModel(cmd, file, listen)
		},
	}
	cmd.Flags().StringVar(&file, "script", "", "file of rules")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "host:port on this machine; port 0 takes a free one")
	_ = cmd.MarkFlagRequired("script") // the flag is there
	return cmd
}

func (a *app) fakeModel(cmd *cobra.Command, file, listen string) error {
	soft, _, stop := rungroup.Signals(cmd.Context())
	defer stop()
	rules, err := script.Load(file)
	if err != nil {
		return fmt.Errorf("--script: %w", err)
	}
	l, err := listenLocally(soft, listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	fake := fakeserver.New(rules)
	var mu sync.Mutex
	stderr := cmd.ErrOrStderr()
	fake.OnRequest = func(path, refusal string) {
		if refusal != "" {
			mu.Lock()
			defer mu.Unlock()
			fmt.Fprintf(stderr, "refused %s: %s\n", path, refusal)
		}
	}
	fmt.Fprintf(cmd.OutOrStdout(), "serving %s at http://%s/v1; Ctrl-C stops it\n", file, l.Addr())
	server := &http.Server{Handler: fake, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	select {
	case err = <-done:
	case <-soft.Done():
		fake.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(soft), 2*time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			_ = server.Close() // what goes on after that is cut off
		}
		err = <-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve: %w", err)
}

// listenLocally opens addr, which nobody but this machine reaches.
func listenLocally(ctx context.Context, addr string) (net.Listener, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("%q: %w; want host:port", addr, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, fmt.Errorf("%q is not on this machine alone; want 127.0.0.1, [::1] or localhost, because no key is asked for", addr)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if ip, ok := l.Addr().(*net.TCPAddr); !ok || !ip.IP.IsLoopback() {
		return nil, errors.Join(fmt.Errorf("%q is not on this machine alone", addr), l.Close())
	}
	return l, nil
}
