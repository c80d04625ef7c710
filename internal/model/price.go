package model

import (
	"context"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Price is what a million tokens of a model cost, in US dollars.
type Price struct {
	Input, Output float64
	// CachedInput is for input that the provider had cached; nil: as other input.
	CachedInput *float64
}

// Of is what u costs, or nil if nothing is known.
func (p Price) Of(u *contract.Usage) *contract.Money {
	if u == nil {
		return nil
	}
	cached := min(max(u.CacheReadTokens, 0), max(u.InputTokens, 0))
	rate := p.Input
	if p.CachedInput != nil {
		rate = *p.CachedInput
	}
	cost := contract.Money((float64(max(u.InputTokens, 0)-cached)*p.Input + float64(cached)*rate + float64(max(u.OutputTokens, 0))*p.Output) / 1e6)
	return &cost
}

// Priced returns m, whose usage then says what it cost. It is put around the model
// itself, so that each call has the price of the model that answered it.
func Priced(m Model, p Price) Model { return &priced{Model: m, price: p} }

type priced struct {
	Model
	price Price
}

func (m *priced) Generate(ctx context.Context, req Request, onDelta func(Delta)) (Response, error) {
	res, err := m.Model.Generate(ctx, req, onDelta)
	if res.Usage != nil {
		u := *res.Usage
		u.CostUSD = m.price.Of(res.Usage)
		res.Usage = &u
	}
	return res, err
}
