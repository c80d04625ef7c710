package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/herdgate/herdgate/pkg/contract"
)

// Bounds of what a tool may say of itself.
const (
	maxSchemaBytes  = 64 << 10
	maxSchemaDepth  = 32
	maxDescription  = 4 << 10
	maxToolsServer  = 500
	maxPages        = 100
	maxToolNameText = 256
)

// noLoader keeps schemas from bringing in files and pages.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("it refers to %s, and other documents are not read", url)
}

// checkSchema returns the schema of a tool's arguments as it is shown to models, or
// says what is wrong with it. A schema without a type is taken as one of an object.
func checkSchema(raw json.RawMessage) (json.RawMessage, error) {
	switch {
	case len(raw) == 0 || bytes.Equal(raw, []byte("null")):
		return nil, errors.New("it has no inputSchema; want one of type object")
	case len(raw) > maxSchemaBytes:
		return nil, fmt.Errorf("its inputSchema has %d bytes; want at most %d", len(raw), maxSchemaBytes)
	}
	if err := contract.CheckDepth(raw, maxSchemaDepth); err != nil {
		return nil, fmt.Errorf("its inputSchema: %w", err)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, errors.New("its inputSchema is not a JSON object")
	}
	switch typ := string(fields["type"]); typ {
	case `"object"`:
	case "":
		fields["type"] = json.RawMessage(`"object"`)
		var err error
		if raw, err = json.Marshal(fields); err != nil {
			return nil, fmt.Errorf("its inputSchema: %w", err)
		}
	default:
		return nil, fmt.Errorf("its inputSchema is of type %s; want \"object\"", clip(typ, 40))
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("its inputSchema: %w", err)
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	if err := c.AddResource("mem:tool", doc); err != nil {
		return nil, fmt.Errorf("its inputSchema: %s", clip(err.Error(), 300))
	}
	if _, err := c.Compile("mem:tool"); err != nil {
		return nil, fmt.Errorf("its inputSchema is not valid: %s", clip(err.Error(), 300))
	}
	return raw, nil
}

func clip(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n]) + "…"
}
