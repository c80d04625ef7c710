package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// direct is what makes a message of an event past the one writer.
var direct = regexp.MustCompile(`\benvelope\.Encode\(|\.NATSSubject\(|\bev(?:ent)?\.Headers\(\)|\bevent\.Encode\(`)

// I6: every event goes through one writer, which validates it and bounds it to what
// the server takes. Only that writer turns events into messages.
func TestOneWriterOfEvents(t *testing.T) {
	t.Parallel()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	for _, ways := range []string{"envelope.Encode(ev)", "w.Subject = ev.NATSSubject(n)", "nats.Header(ev.Headers())", "event.Encode(ev, 0)"} {
		if !direct.MatchString(ways) {
			t.Errorf("the scan does not see %s", ways)
		}
	}
	allowed := []string{
		"internal/eventwrite/",                  // the writer
		"internal/event/",                       // its pure part
		"internal/stored/",                      // compares subjects, publishes nothing
		"services/lead/internal/feed/feedtest/", // plays a publisher for tests
	}
	seen := 0
	for _, module := range []string{"cmd", "internal", "services"} {
		err := filepath.WalkDir(filepath.Join(dir, module), func(path string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			rel, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			seen += strings.Count(string(b), "eventwrite.Of(")
			for _, a := range allowed {
				if strings.HasPrefix(filepath.ToSlash(rel), a) {
					return nil
				}
			}
			for i, line := range strings.Split(string(b), "\n") {
				if direct.MatchString(line) && !strings.Contains(line, ") != ") { // to compare is no writing
					t.Errorf("%s:%d makes a message of an event by itself; want eventwrite.Of: %s", rel, i+1, strings.TrimSpace(line))
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if seen < 8 {
		t.Errorf("%d uses of the writer were seen, want all", seen)
	}
}
