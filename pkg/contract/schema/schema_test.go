package schema

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestGet(t *testing.T) {
	t.Parallel()
	for _, name := range Names() {
		b, err := Get(name)
		if err != nil || !json.Valid(b) || !strings.Contains(string(b), `"$schema": "https://json-schema.org/draft/2020-12/schema"`) {
			t.Errorf("%s: %v, %.100s", name, err, b)
		}
	}
	for _, name := range []string{"", "nosuch", "../asyncapi", "v1/grant", "/etc/passwd", "grant.json", "a\x00b"} {
		if _, err := Get(name); !errors.Is(err, ErrUnknown) {
			t.Errorf("Get(%q): %v, want ErrUnknown", name, err)
		}
	}
	if !json.Valid(Vocabulary()) || !strings.Contains(string(AsyncAPI()), "\nasyncapi: 3.") {
		t.Error("the vocabulary or the AsyncAPI document cannot be read")
	}
}
