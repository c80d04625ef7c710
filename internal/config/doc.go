// Package config reads herdgate.yaml.
//
// The structs of [Config] are the one source of truth: their tags make the JSON
// Schema, the schema checks the document, and the schema's own words make the
// messages. What a schema cannot say (a default above its maximum, a model that
// does not exist) is checked in Go afterwards. All faults are found in one go,
// each with file, line and column, or with the environment variable it came
// from.
//
// Later sources win: defaults, the file, the environment; command-line flags
// are laid on top by the caller. The environment reaches scalar keys outside
// lists and named maps: HERDGATE_ and the path in capitals, levels joined by
// two underscores, as in HERDGATE_SUBAGENT_RUNTIME__MAX_RUNNING.
//
// A section, a list or a named map that is null counts as missing. For lists
// where missing, null and empty differ, the field's description says how. A
// Config is safe to log: secrets are named by environment variables, and where
// an address or a header may hold one, its text form leaves it out.
package config
