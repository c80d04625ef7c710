package eventsink

import (
	"context"
	"errors"
	"time"

	"github.com/herdgate/herdgate/internal/pause"
)

const (
	// pruneStep is how many events are deleted in one transaction, so that
	// nobody who writes or reads waits long.
	pruneStep = 1000
	// prunePause is between two steps.
	prunePause = 20 * time.Millisecond
)

// keepHouse notes now and then how far the sink is, and deletes what is older than
// it should be, until ctx is done.
func (s *Service) keepHouse(ctx context.Context, st Store) {
	for {
		if err := s.tidy(ctx, st, time.Now()); err != nil && ctx.Err() == nil {
			s.log.Warn().Err(err).Dur("again_in", s.cfg.HouseInterval).Msg("old events were not deleted")
		}
		if pause.For(ctx, s.cfg.HouseInterval) != nil {
			return
		}
	}
}

func (s *Service) tidy(ctx context.Context, st Store, now time.Time) error {
	if err := st.Mark(ctx, now); err != nil {
		return err
	}
	if s.cfg.Retention == 0 {
		return nil
	}
	before, total := now.Add(-s.cfg.Retention), 0
	for {
		n, err := st.Prune(ctx, before, pruneStep)
		if err != nil {
			if errors.Is(err, ErrLost) {
				return nil // who has taken over does it
			}
			return err
		}
		s.metrics.pruned.Add(float64(n))
		if total += n; n < pruneStep {
			break
		}
		if err := pause.For(ctx, prunePause); err != nil {
			return err
		}
	}
	if total > 0 {
		s.log.Info().Int("events", total).Time("stored_before", before).Msg("old events were deleted")
	}
	return nil
}
