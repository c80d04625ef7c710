-- +goose Up
-- For pages by type and by tenant. Like the others they end with seq.
CREATE INDEX events_type ON events (event_type);
CREATE INDEX events_tenant ON events (tenant);
-- Both together. Steps are by far the most, so a page of a tenant's steps is found
-- among the tenant's events; without them this index costs a tenth.
CREATE INDEX events_tenant_type ON events (tenant, event_type) WHERE event_type <> 'subagent.step';

-- +goose Down
DROP INDEX events_tenant_type;
DROP INDEX events_tenant;
DROP INDEX events_type;
