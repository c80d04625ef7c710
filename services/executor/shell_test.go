package executor

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/sandbox"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// REG-16, REG-18: commands are run where they can be confined, or on the bare host
// if that was allowed; elsewhere the shell type is refused with its own reason, and
// the others go without the tool.
func TestShell(t *testing.T) {
	t.Parallel()
	confined, _ := sandbox.Available()
	for _, c := range []struct {
		sandbox string
		host    bool
		want    bool
	}{
		{config.SandboxLandlock, false, confined},
		{config.SandboxLandlock, true, true},
		{config.SandboxNone, false, false},
		{config.SandboxNone, true, true},
	} {
		w := config.Default().Workspace
		w.Sandbox, w.AllowHostBash = c.sandbox, c.host
		o := shell(w, nil)
		if o.Bash != c.want {
			t.Errorf("%s, allow_host_bash %v: bash %v, want %v", c.sandbox, c.host, o.Bash, c.want)
		}
		if o.Limits != (sandbox.Limits{Processes: 512, MemoryBytes: 4 << 30, FileBytes: 4 << 30, CPUSeconds: 3600}) {
			t.Errorf("limits = %+v", o.Limits)
		}
		for name, refused := range map[string]bool{"bash": !c.want, "general-purpose": false} {
			_, err := shellFor(o, contract.TaskRequest{Subagent: contract.Subagent{Name: name}})
			if errors.Is(err, errNoShell) != refused {
				t.Errorf("%s, allow_host_bash %v, type %s: %v, want refused %v", c.sandbox, c.host, name, err, refused)
			}
		}
	}
}

// REG-18: such a task ends as failed, and says why.
func TestNoShell(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.svc.deps.Tools = func(contract.TaskRequest) ([]tool.Tool, func(), error) { return nil, nil, errNoShell }
	w.begin(w.granted("t_1", 1))()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrPolicyDenied || !strings.Contains(rec.Error, "allow_host_bash") {
		t.Errorf("record = %+v", rec)
	}
}

// REG-14: an executor goes by the copy of the caller's policy in the request.
func TestGrantAgainstItsOwnPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.granted("t_1", 1)
	g.Request.AllowedSubagents = []string{}
	w.begin(g)()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrPolicyDenied || !strings.Contains(rec.Error, "allowed_subagents") {
		t.Errorf("record = %+v", rec)
	}
}

// CTX-06, CTX-10: an executor runs nothing for nobody.
func TestGrantForNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.granted("t_1", 1)
	g.Request.Identity = contract.Identity{}
	w.begin(g)()
	rec, _ := w.record("t_1")
	if rec.State != contract.StateFailed || rec.ErrorCode != contract.ErrPolicyDenied || !strings.Contains(rec.Error, "identity.user_id is missing") {
		t.Errorf("record = %+v", rec)
	}
}

// A definition's network is that of the commands of its tasks.
func TestNetworkOfTask(t *testing.T) {
	t.Parallel()
	if ok, reason := sandbox.Available(); !ok {
		t.Skip(reason)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ws, err := tool.NewWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer ws.Close()
	for _, network := range []bool{false, true} {
		o, err := shellFor(shell(config.Default().Workspace, nil), contract.TaskRequest{Subagent: contract.Subagent{Name: "x", Network: network}})
		if err != nil {
			t.Fatal(err)
		}
		command := strings.ReplaceAll(l.Addr().String(), ":", "/") // a form that bash knows
		args := fmt.Sprintf(`{"command":"bash -c ': </dev/tcp/%s'"}`, command)
		res, err := tool.Tools(ws, o)[0].Call(t.Context(), tool.Call{ID: "c", Args: []byte(args)})
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(res.Text, "not found") {
			t.Skip("this machine has no bash")
		}
		if res.IsError == network {
			t.Errorf("network %v: %q, error %v", network, res.Text, res.IsError)
		}
	}
}
