-- +goose Up
CREATE TABLE events (
    seq        bigint PRIMARY KEY CHECK (seq >= 1),
    event_id   text NOT NULL UNIQUE CHECK (event_id <> ''),
    tenant     text NOT NULL,
    thread_id  text NOT NULL,
    run_id     text NOT NULL,
    task_id    text NOT NULL, -- '' for events of a run
    event_type text NOT NULL CHECK (length(event_type) BETWEEN 1 AND 32),
    category   text NOT NULL CHECK (length(category) BETWEEN 1 AND 16),
    -- json and not jsonb: the text comes back as it went in, to the last digit and
    -- key, and no number is too large. Cast it where jsonb's operators are needed.
    content    json NOT NULL,
    metadata   json NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX events_run ON events (run_id, seq);
CREATE INDEX events_thread ON events (thread_id, seq);
CREATE INDEX events_task ON events (task_id, seq) WHERE task_id <> '';

-- The one row that tells how far the sink is.
CREATE TABLE sink (
    one            boolean PRIMARY KEY DEFAULT true CHECK (one),
    -- Everything up to here has been processed; nobody reads beyond it.
    cursor         bigint NOT NULL DEFAULT 0,
    -- Retention has deleted what was at and below this one.
    pruned         bigint NOT NULL DEFAULT 0,
    -- Where the sequences come from.
    stream         text NOT NULL DEFAULT '',
    stream_created text NOT NULL DEFAULT '',
    -- The process that may write, if only one may.
    owner          text NOT NULL DEFAULT ''
);
INSERT INTO sink DEFAULT VALUES;

-- When the cursor was where, now and then. What an event says of its own time is
-- its writer's word; how long it has been here is ours.
CREATE TABLE marks (
    seq bigint PRIMARY KEY,
    at  timestamptz NOT NULL
);

-- +goose Down
DROP TABLE marks;
DROP TABLE sink;
DROP TABLE events;
