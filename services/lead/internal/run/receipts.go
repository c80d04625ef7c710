package run

import (
	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/config"
	"github.com/herdgate/herdgate/internal/receipt"
)

// receiptsOn says whether there are receipts: if not, the lead neither makes nor
// shows any, and takes over no verdict (RECEIPT-15).
func (c Config) receiptsOn() bool {
	return c.Settings != nil && c.Settings.Verification.ReceiptsEnabled
}

// receipts keeps those of the lead's own tools; it is nil if there are none. The
// lead's model reads in their list what became of its sub-agents' citations
// (RECEIPT-03, RESULT-07).
func (d *drive) receipts() *receipt.Receipts {
	if !d.e.cfg.receiptsOn() {
		return nil
	}
	return receipt.New(receipt.Options{
		Lead: true, Always: d.e.cfg.Settings.Verification.ReceiptsRenderMode == config.RenderAlways,
		Now: d.e.deps.Now, Log: d.log,
	})
}

// withReceipts adds them to what the loop is made of.
func withReceipts(cfg agent.Config, k *receipt.Receipts) (agent.Config, error) {
	if k == nil {
		return cfg, nil
	}
	var err error
	cfg.Chain, err = agent.Chain(append(cfg.Chain[:len(cfg.Chain):len(cfg.Chain)], k.Piece())...)
	cfg.Model = k.Model(cfg.Model)
	return cfg, err
}
