package system

import (
	"context"
	"fmt"
	"testing"

	"github.com/herdgate/herdgate/internal/invariant"
	"github.com/herdgate/herdgate/internal/natstest"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/test/history"
)

// judge waits until everything has come to an end, and checks what must hold always.
func (s *System) judge(t *testing.T) []contract.EventRecord {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	natstest.Eventually(t, Timeout, func() (bool, string) {
		st, err := s.Bus.JS.Stream(ctx, s.Bus.Names.WorkStream())
		if err != nil {
			return false, err.Error()
		}
		n := st.CachedInfo().State.Msgs
		return n == 0, fmt.Sprint(n, " requests are left")
	})
	past, err := history.Read(ctx, s.Bus)
	if err != nil {
		t.Fatal(err)
	}
	s.mustHold(invariant.Options{Settled: true})
	return past
}
