-- +goose Up
-- When the cursor was where, now and then. What an event says of its own time is
-- its writer's word; how long it has been here is ours.
CREATE TABLE marks (
    seq INTEGER PRIMARY KEY,
    at  TEXT NOT NULL -- as events.created_at
) STRICT;

-- +goose Down
DROP TABLE marks;
