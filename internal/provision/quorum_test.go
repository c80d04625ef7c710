package provision

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jsm.go/api"
)

// F-040: a leader goes on to answer questions for a while after it has lost the
// others, and stores nothing. The real thing is in test/e2e.
func TestQuorum(t *testing.T) {
	t.Parallel()
	peer := func(name string, active time.Duration, offline bool) *api.PeerInfo {
		return &api.PeerInfo{Name: name, Active: active, Offline: offline}
	}
	joining := peer("joining", 0, true)
	joining.Pending = true
	here, silent, off := peer("a", time.Second, false), peer("b", unseen+1, false), peer("c", time.Second, true)
	for name, tt := range map[string]struct {
		cluster *api.ClusterInfo
		gone    string // "" is a quorum
	}{
		"one server":            {nil, ""},
		"one copy in a cluster": {&api.ClusterInfo{}, ""},
		"three":                 {&api.ClusterInfo{Replicas: []*api.PeerInfo{here, here}}, ""},
		"one of three silent":   {&api.ClusterInfo{Replicas: []*api.PeerInfo{here, silent}}, ""},
		"two of three away":     {&api.ClusterInfo{Replicas: []*api.PeerInfo{silent, off}}, "2 of 3 copies are needed, and b and c did not answer"},
		"one of two away":       {&api.ClusterInfo{Replicas: []*api.PeerInfo{off}}, "2 of 2 copies are needed, and c did not answer"},
		"two of five away":      {&api.ClusterInfo{Replicas: []*api.PeerInfo{here, here, off, silent}}, ""},
		"one that joins":        {&api.ClusterInfo{Replicas: []*api.PeerInfo{here, here, joining}}, ""},
	} {
		err := quorum(tt.cluster)
		if (err != nil) != (tt.gone != "") || err != nil && (!errors.Is(err, ErrNoQuorum) || !strings.Contains(err.Error(), tt.gone)) {
			t.Errorf("%s: %v; want %q", name, err, tt.gone)
		}
	}
}
