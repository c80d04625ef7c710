package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/herdgate/herdgate/cmd/herdgate/internal/printable"
	"github.com/herdgate/herdgate/cmd/herdgate/internal/progress"
	"github.com/herdgate/herdgate/pkg/contract"
)

// printJSON prints v indented, for eyes and programs alike.
func printJSON(w io.Writer, v any) error {
	b, err := marshal(v)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		return err
	}
	out.WriteByte('\n')
	return write(w, out.Bytes())
}

// printJSONLine prints v on one line.
func printJSONLine(w io.Writer, v any) error {
	b, err := marshal(v)
	if err != nil {
		return err
	}
	return write(w, append(b, '\n'))
}

func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return printable.JSON(bytes.TrimRight(b.Bytes(), "\n")), nil
}

func write(w io.Writer, b []byte) error {
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	return nil
}

// table prints aligned columns. Cells must be printable.
type table struct{ rows [][]string }

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer, indent string) error {
	var b bytes.Buffer
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, r := range t.rows {
		fmt.Fprintln(tw, indent+strings.Join(r, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	var out bytes.Buffer
	for line := range strings.Lines(b.String()) {
		out.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return write(w, out.Bytes())
}

// Cells of tables.

func cell(s string) string {
	if s = printable.Cut(s, 60); s == "" {
		return "-"
	}
	return s
}

func cellPtr(s *string) string {
	if s == nil {
		return "-"
	}
	return cell(*s)
}

func cellTime(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

func cellUsage(u *contract.Usage) string {
	if u == nil {
		return "-"
	}
	text := fmt.Sprintf("%d (%d in, %d out)", u.TotalTokens, u.InputTokens, u.OutputTokens)
	if u.CacheReadTokens > 0 {
		text = fmt.Sprintf("%d (%d in, of them %d cached, %d out)", u.TotalTokens, u.InputTokens, u.CacheReadTokens, u.OutputTokens)
	}
	return text
}

// cellCost is "" where no model has a price.
func cellCost(u *contract.Usage) string {
	if u == nil || u.CostUSD == nil {
		return ""
	}
	return progress.Dollars(*u.CostUSD)
}

func cellTokens(u *contract.Usage) string {
	if u == nil {
		return "-"
	}
	return fmt.Sprint(u.TotalTokens)
}

func cellSpan(from, to *time.Time) string {
	switch {
	case from == nil:
		return "-"
	case to == nil:
		return progress.Seconds(time.Since(*from))
	}
	return progress.Seconds(to.Sub(*from))
}
