-- +goose Up
-- Sub-agent definitions that administrators made.
CREATE TABLE agents (
    name       text COLLATE "C" PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 64),
    revision   bigint NOT NULL CHECK (revision >= 1),
    body       json NOT NULL, -- the text comes back as it went in
    updated_at timestamptz NOT NULL
);

-- The one row that has the revision of the store. It grows with every change, deletions
-- included, and whoever changes something holds it until the end of the transaction: a
-- higher revision is never seen before a lower one. It begins with the time, so that a
-- database that is made anew goes on above the one before it.
CREATE TABLE agents_revision (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    revision bigint NOT NULL
);
INSERT INTO agents_revision (revision) VALUES (extract(epoch FROM now())::bigint);

-- +goose Down
DROP TABLE agents_revision;
DROP TABLE agents;
