package receipt

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/herdgate/herdgate/internal/agent"
	"github.com/herdgate/herdgate/internal/delegation"
	"github.com/herdgate/herdgate/internal/fault"
	"github.com/herdgate/herdgate/internal/model"
	"github.com/herdgate/herdgate/internal/tool"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Options say for whom receipts are kept.
type Options struct {
	// Lead keeps them for a lead: it sees its ledger only while the result of a
	// delegation of the current turn is there, unless Always is set, and what it was
	// shown is not noted, because nobody judges its answers. A sub-agent always sees
	// its ledger (RECEIPT-03).
	Lead   bool
	Always bool
	Now    func() time.Time
	Log    zerolog.Logger
}

// Receipts keeps the receipts of one conversation.
type Receipts struct {
	o Options

	mu sync.Mutex
	// fresh are the receipts since the last model call, by call: the conversation
	// may end before their results are in it.
	fresh map[string]contract.Receipt
}

// New returns a keeper for one conversation.
func New(o Options) *Receipts {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Receipts{o: o, fresh: map[string]contract.Receipt{}}
}

// Piece is what stands around the loop: it stamps results outside of everything
// else, and takes the list of receipts from the whole conversation, before other
// pieces leave parts of it out.
func (k *Receipts) Piece() agent.Piece {
	return agent.Piece{Name: "receipts", Model: k.collect, AfterTool: k.stamp}
}

// stamp puts the receipt on a result, over whatever stands there (RECEIPT-01).
func (k *Receipts) stamp(call model.ToolCall, res tool.Result) (out tool.Result) {
	out = res
	out.Metadata = maps.Clone(res.Metadata)
	delete(out.Metadata, Key)
	if call.Name != delegation.ToolName || !k.o.Lead {
		out.Metadata = Strip(out.Metadata)
	}
	defer k.guard("a receipt could not be made")
	r := stamp(call, res, k.o.Now())
	if out.Metadata == nil {
		out.Metadata = map[string]any{}
	}
	out.Metadata[Key] = r
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fresh[call.ID] = r
	return out
}

type listKey struct{}

// ledgerID is the id of the message that holds the ledger.
const ledgerID = "receipts"

// collect hands the receipts of the conversation on to the innermost call.
func (k *Receipts) collect(next agent.Generate) agent.Generate {
	return func(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
		k.mu.Lock()
		clear(k.fresh)
		k.mu.Unlock()
		if items, ok := k.list(req.Messages); ok {
			ctx = context.WithValue(ctx, listKey{}, items)
		}
		return next(ctx, req, onDelta)
	}
}

// list is empty if there is nothing to show, and false if that could not be told.
func (k *Receipts) list(messages []model.Message) (items []item, ok bool) {
	defer k.guard("the receipts could not be gathered")
	if k.o.Lead && !k.o.Always && !delegated(messages) {
		return nil, true
	}
	return scan(messages), true
}

// delegated reports whether the result of a delegation of the current turn, which
// began with the last message of a person, is among messages.
func delegated(messages []model.Message) bool {
	from := -1
	for i, m := range messages {
		if m.Role == model.RoleUser && !m.Marked(model.MetaHidden) {
			from = i
		}
	}
	return slices.ContainsFunc(messages[from+1:], func(m model.Message) bool {
		return m.Role == model.RoleTool && m.ToolName == delegation.ToolName && m.Metadata[delegation.StatusKey] != nil
	})
}

// Model is m with the ledger in view. It stands inside of everything else, so
// that what is noted on an answer is exactly what its author was shown
// (RECEIPT-08).
func (k *Receipts) Model(m model.Model) model.Model { return view{Model: m, k: k} }

type view struct {
	model.Model
	k *Receipts
}

// Generate implements [model.Model].
func (v view) Generate(ctx context.Context, req model.Request, onDelta func(model.Delta)) (model.Response, error) {
	req, listed, ok := v.k.show(ctx, req)
	resp, err := v.Model.Generate(ctx, req, onDelta)
	resp.Message.Metadata = Strip(resp.Message.Metadata)
	if err == nil && ok && !v.k.o.Lead {
		meta := maps.Clone(resp.Message.Metadata)
		if meta == nil {
			meta = map[string]any{}
		}
		meta[ShownKey] = receipts(listed)
		resp.Message.Metadata = meta
	}
	return resp, err
}

// show puts the ledger after the leading system messages. It is false if that
// failed: then nothing was shown that could be relied on.
func (k *Receipts) show(ctx context.Context, req model.Request) (with model.Request, listed []item, ok bool) {
	defer k.guard("the receipts could not be shown")
	with = req
	items, collected := ctx.Value(listKey{}).([]item)
	if !collected {
		return req, nil, false
	}
	text, listed := render(items)
	if text == "" {
		return req, nil, true
	}
	at := slices.IndexFunc(req.Messages, func(m model.Message) bool { return m.Role != model.RoleSystem })
	if at < 0 {
		at = len(req.Messages)
	}
	msg := model.Message{ID: ledgerID, Role: model.RoleUser, Text: text, Metadata: map[string]any{model.MetaHidden: true}}
	with.Messages = slices.Insert(slices.Clone(req.Messages), at, msg)
	return with, listed, true
}

// Completed returns the receipts of a completed task and the verdict on its
// report, both bounded for its record. The list is never nil: nothing else may take
// its place, also when it could not be made (RECEIPT-09).
func (k *Receipts) Completed(res agent.Result, report string) (rs []contract.Receipt, v *contract.ReceiptVerdict) {
	rs = []contract.Receipt{}
	defer k.guard("the receipts could not be harvested")
	shown, from := Select(res.Messages, true)
	if from == FromNowhere && len(scan(res.Messages)) > 0 {
		k.o.Log.Warn().Msg("the last answer does not say which receipts its author was shown; none of them counts")
	}
	verdict := Judge(report, shown)
	return append(rs, newest(shown)...), &verdict
}

// Evidence returns the receipts of a task that has not completed: also those of
// calls whose results did not come into the conversation any more (RECEIPT-14).
func (k *Receipts) Evidence(res agent.Result) (rs []contract.Receipt) {
	defer k.guard("the receipts could not be harvested")
	rs, _ = Select(res.Messages, false)
	n := len(res.Messages)
	answered := map[string]bool{}
	i := n - 1
	for ; i >= 0 && res.Messages[i].Role == model.RoleTool; i-- {
		answered[res.Messages[i].ToolCallID] = true
	}
	if i >= 0 {
		k.mu.Lock()
		defer k.mu.Unlock()
		next := 1
		if len(rs) > 0 {
			next = number(rs[len(rs)-1].ID) + 1
		}
		for _, c := range res.Messages[i].ToolCalls {
			if r, ok := k.fresh[c.ID]; ok && !answered[c.ID] {
				r.ID = id(next)
				next++
				rs = append(rs, r)
			}
		}
	}
	return newest(rs)
}

// guard keeps a fault of ours from doing more than leaving receipts out
// (RECEIPT-01, RECEIPT-16).
func (k *Receipts) guard(what string) {
	if f := fault.Of(recover()); f != nil {
		f.Log(k.o.Log.Error()).Msg(what)
	}
}
