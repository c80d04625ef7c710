package tool

import (
	"path/filepath"

	"github.com/herdgate/herdgate/pkg/contract"
)

// ThreadDir is the folder of a thread's workspace beneath root. The lead and all
// its sub-agents of one thread share it; tenants and threads never do (CTX-01).
func ThreadDir(root string, tenant contract.Tenant, thread contract.ThreadID) string {
	return filepath.Join(root, string(tenant), thread.Token())
}
