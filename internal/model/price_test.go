package model

import (
	"testing"

	"github.com/herdgate/herdgate/pkg/contract"
)

func TestPrice(t *testing.T) {
	t.Parallel()
	tenth := 0.1
	for _, c := range []struct {
		price Price
		usage contract.Usage
		want  contract.Money
	}{
		{Price{Input: 2, Output: 10}, contract.Usage{InputTokens: 1_000_000, OutputTokens: 500_000}, 7},
		{Price{Input: 2, Output: 10}, contract.Usage{InputTokens: 1_000_000, CacheReadTokens: 400_000}, 2},
		{Price{Input: 1, Output: 10, CachedInput: &tenth}, contract.Usage{InputTokens: 1_000_000, CacheReadTokens: 500_000, OutputTokens: 1000}, 0.56},
		// More from the cache than there was: all of it was cached.
		{Price{Input: 1, CachedInput: &tenth}, contract.Usage{InputTokens: 1_000_000, CacheReadTokens: 9_000_000}, 0.1},
		{Price{}, contract.Usage{InputTokens: 5, OutputTokens: 5}, 0},
		{Price{Input: 1, Output: 1}, contract.Usage{InputTokens: -5, OutputTokens: -5, CacheReadTokens: -1}, 0},
	} {
		got := c.price.Of(&c.usage)
		if got == nil || *got-c.want > 1e-9 || c.want-*got > 1e-9 {
			t.Errorf("%+v of %+v = %v, want %v", c.price, c.usage, got, c.want)
		}
	}
	if got := (Price{Input: 1}).Of(nil); got != nil {
		t.Errorf("nothing costs %v, want unknown", *got)
	}
}
