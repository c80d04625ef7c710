package contract

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/herdgate/herdgate/internal/event"
	"github.com/herdgate/herdgate/internal/eventapi"
	"github.com/herdgate/herdgate/pkg/contract"
	"github.com/herdgate/herdgate/pkg/contract/schema"
	"github.com/herdgate/herdgate/pkg/envelope"
)

// STATUS-19: PROTOCOL.md explains every word, subject and limit, with the values of
// the code, and its links lead somewhere.
func TestProtocolSaysWhatTheCodeDoes(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile(filepath.Join(root, "PROTOCOL.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(b)), " ")
	var vocabulary map[string]any
	if err := json.Unmarshal(schema.Vocabulary(), &vocabulary); err != nil {
		t.Fatal(err)
	}
	for _, list := range []string{"states", "task_statuses", "run_statuses", "run_stop_reasons", "error_codes"} {
		entries, _ := vocabulary[list].([]any)
		for _, w := range texts(entries) {
			if !strings.Contains(text, "`"+w+"`") {
				t.Errorf("%s: %s is not explained", list, w)
			}
		}
	}
	for _, a := range document(t).addresses() {
		subject := placeholder.ReplaceAllString(a, "<$1>")
		if rest, ok := strings.CutPrefix(subject, "$KV."); ok { // only the first of a bucket is in full
			_, key, _ := strings.Cut(rest, ".")
			kind, _, variable := strings.Cut(key, ".")
			if !strings.Contains(text, "`"+subject+"`") && (!variable && !strings.Contains(text, "`"+kind+"`") || variable && !strings.Contains(text, "`"+kind+".…`")) {
				t.Errorf("the key %s is not explained", subject)
			}
			continue
		}
		if !strings.Contains(text, "`"+subject+"`") {
			t.Errorf("the subject %s is not explained", subject)
		}
	}
	for _, want := range []string{
		envelope.ContentType, envelope.HeaderMsgID, envelope.HeaderTraceParent, envelope.HeaderTraceState, "`urn:herdgate:event:<type>:" + contract.Version + "`",
		"task request, encoded | " + kib(contract.MaxRequestBytes), "prompt | " + kib(contract.MaxPromptBytes), "grant, encoded | " + kib(contract.MaxGrantBytes),
		"event, encoded | " + kib(envelope.MaxBytes), "result inside of a record | " + kib(contract.MaxInlineResultBytes),
		thousands(contract.MaxStepChars) + " characters, `truncated`", thousands(event.MaxRunOutputChars) + " characters, `output_truncated`",
		thousands(contract.MaxDescriptionChars) + " characters; " + thousands(contract.MaxCriteria) + " of " + thousands(contract.MaxCriterionChars),
		thousands(contract.MaxDepth) + " levels", thousands(eventapi.MaxLimit) + " events and " + kib(eventapi.MaxReplyBytes), "up to " + thousands(contract.MaxThreadID) + " bytes",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not there", want)
		}
	}
	for _, m := range regexp.MustCompile(`\]\(([^)#]+)\)`).FindAllStringSubmatch(string(b), -1) {
		if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
			t.Errorf("a link: %v", err)
		}
	}
	for _, m := range regexp.MustCompile("schemas? `([a-z_.]+)`").FindAllStringSubmatch(text, -1) {
		if _, err := schema.Get(m[1]); err != nil {
			t.Errorf("it names a schema: %v", err)
		}
	}
}

func kib(n int) string { return thousands(n>>10) + " KiB" }

func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%d,%03d", n/1000, n%1000)
}
