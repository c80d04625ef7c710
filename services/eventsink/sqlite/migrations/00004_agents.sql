-- +goose Up
-- Sub-agent definitions that administrators made. The store's revision is under
-- agents_revision in meta. It grows with every change, deletions included, and begins
-- with the time, so that a database that is made anew goes on above the one before it.
CREATE TABLE agents (
    name       TEXT PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 64),
    revision   INTEGER NOT NULL CHECK (revision >= 1),
    body       TEXT NOT NULL CHECK (json_valid(body)),
    updated_at TEXT NOT NULL -- as events.created_at
) STRICT, WITHOUT ROWID;
INSERT INTO meta (key, value) VALUES ('agents_revision', strftime('%s', 'now'));

-- +goose Down
DELETE FROM meta WHERE key = 'agents_revision';
DROP TABLE agents;
