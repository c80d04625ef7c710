-- +goose Up
CREATE TABLE events (
    seq        INTEGER PRIMARY KEY CHECK (seq >= 1),
    event_id   TEXT NOT NULL UNIQUE CHECK (event_id <> ''),
    tenant     TEXT NOT NULL,
    thread_id  TEXT NOT NULL,
    run_id     TEXT NOT NULL,
    task_id    TEXT NOT NULL, -- '' for events of a run
    event_type TEXT NOT NULL CHECK (length(event_type) BETWEEN 1 AND 32),
    category   TEXT NOT NULL CHECK (length(category) BETWEEN 1 AND 16),
    content    TEXT NOT NULL CHECK (json_valid(content)),
    metadata   TEXT NOT NULL CHECK (json_valid(metadata)),
    created_at TEXT NOT NULL -- RFC 3339 in UTC with six digits, so that text order is time order
) STRICT;

-- Every index of SQLite ends with the row id, which is seq here: these are
-- (run_id, seq), (thread_id, seq) and (task_id, seq).
CREATE INDEX events_run ON events (run_id);
CREATE INDEX events_thread ON events (thread_id);
CREATE INDEX events_task ON events (task_id);

-- cursor: everything up to this sequence has been processed.
-- stream, stream_created: where the sequences come from.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- +goose Down
DROP TABLE meta;
DROP TABLE events;
