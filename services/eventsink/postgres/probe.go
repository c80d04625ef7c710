package postgres

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Probe looks whether a sink could work with the database at dsn, and changes
// nothing. It tells what it found, or what is wrong and how to mend it.
func Probe(ctx context.Context, dsn string) (string, error) {
	cfg, err := parse(dsn)
	if err != nil {
		return "", err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return "", explain(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var version, readOnly, schema string
	var create bool
	if err := conn.QueryRow(ctx, `SELECT current_setting('server_version'), current_setting('transaction_read_only'),
  coalesce(current_schema(), ''), coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)`).Scan(&version, &readOnly, &schema, &create); err != nil {
		return "", explain(err)
	}
	found := fmt.Sprintf("PostgreSQL %s, database %q at %s", version, cfg.ConnConfig.Database, cfg.ConnConfig.Host)
	var cursor int64
	err = conn.QueryRow(ctx, `SELECT cursor FROM sink`).Scan(&cursor)
	var refused *pgconn.PgError
	switch {
	case readOnly == "on":
		return "", fmt.Errorf("%s takes no writes: point eventsink.dsn at the primary", found)
	case errors.As(err, &refused) && refused.Code == "42P01" && !create: // undefined table
		return "", fmt.Errorf("%s has no tables yet and the user may not make them: GRANT CREATE, USAGE ON SCHEMA %s to it", found, pgx.Identifier{schema}.Sanitize())
	case errors.As(err, &refused) && refused.Code == "42P01":
		return found + "; the event sink makes its tables when it starts", nil
	case err != nil:
		return "", explain(err)
	}
	return fmt.Sprintf("%s; events up to %d are stored", found, cursor), nil
}
