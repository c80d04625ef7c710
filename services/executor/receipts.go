package executor

import (
	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/outcome"
	"github.com/herdgate/herdgate/internal/receipt"
	"github.com/herdgate/herdgate/pkg/contract"
)

// addReceipts keeps the receipts of the task, unless they are switched off: then
// nothing is stamped, shown, harvested or judged (RECEIPT-15).
func (c *chain) addReceipts(j *job) {
	if !j.a.s.cfg.Settings.Verification.ReceiptsEnabled {
		return
	}
	c.receipts = receipt.New(receipt.Options{Now: j.a.s.now, Log: j.a.log})
	c.pieces = append(c.pieces, c.receipts.Piece())
}

// model is m as the task's chain shows it the conversation.
func (c *chain) model(m model.Model) model.Model {
	if c.receipts == nil {
		return m
	}
	return c.receipts.Model(m)
}

// spent is what the work used and left behind, however it ends (RECEIPT-14). It
// goes into the one write of the end (RECEIPT-13).
func (c *chain) spent(res agent.Result, m model.Model) outcome.End {
	end := outcome.End{Usage: res.Usage, ModelName: res.ModelName}
	if end.ModelName == "" {
		end.ModelName = m.ModelName()
	}
	if c.receipts != nil {
		end.Receipts = c.receipts.Evidence(res)
	}
	return end
}

// harvest gives a completed end the receipts that its report could cite, and the
// verdict on its citations.
func (c *chain) harvest(end outcome.End, res agent.Result) outcome.End {
	if c.receipts != nil && end.State == contract.StateCompleted {
		end.Receipts, end.Verdict = c.receipts.Completed(res, end.Result)
	}
	return end
}
