package waterfall

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/herdgate/herdgate/internal/telemetry"
	"github.com/herdgate/herdgate/pkg/contract"
)

// Span is a span of a trace, as far as it is drawn.
type Span struct {
	TraceID  string
	ID       string
	ParentID string
	Service  string
	Name     string
	Start    time.Time
	End      time.Time
	// Failed: its status is an error; Message is what that says.
	Failed  bool
	Message string
	// Attributes are those whose values are text or numbers, as text.
	Attributes map[string]string
}

// otlpAnswer is an answer of Jaeger's /api/v3/traces: OTLP in JSON below "result".
type otlpAnswer struct {
	Result *struct {
		ResourceSpans []struct {
			Resource struct {
				Attributes []otlpAttribute `json:"attributes"`
			} `json:"resource"`
			ScopeSpans []struct {
				Spans []otlpSpan `json:"spans"`
			} `json:"scopeSpans"`
		} `json:"resourceSpans"`
	} `json:"result"`
	Error *struct {
		HTTPCode int    `json:"httpCode"`
		Message  string `json:"message"`
	} `json:"error"`
}

type otlpSpan struct {
	TraceID      string          `json:"traceId"`
	SpanID       string          `json:"spanId"`
	ParentSpanID string          `json:"parentSpanId"`
	Name         string          `json:"name"`
	Start        otlpNumber      `json:"startTimeUnixNano"`
	End          otlpNumber      `json:"endTimeUnixNano"`
	Attributes   []otlpAttribute `json:"attributes"`
	Status       struct {
		Code    json.RawMessage `json:"code"`
		Message string          `json:"message"`
	} `json:"status"`
}

type otlpAttribute struct {
	Key   string `json:"key"`
	Value struct {
		String *string         `json:"stringValue"`
		Int    *otlpNumber     `json:"intValue"`
		Double json.RawMessage `json:"doubleValue"`
		Bool   *bool           `json:"boolValue"`
	} `json:"value"`
}

// otlpNumber is a 64-bit number, which JSON has as text or as a number.
type otlpNumber int64

// UnmarshalJSON implements json.Unmarshaler.
func (n *otlpNumber) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseInt(strings.Trim(string(b), `"`), 10, 64)
	*n = otlpNumber(v)
	return err
}

func (a otlpAttribute) text() (string, bool) {
	switch v := a.Value; {
	case v.String != nil:
		return *v.String, true
	case v.Int != nil:
		return strconv.FormatInt(int64(*v.Int), 10), true
	case len(v.Double) > 0:
		return strings.Trim(string(v.Double), `"`), true
	case v.Bool != nil:
		return strconv.FormatBool(*v.Bool), true
	}
	return "", false
}

// waitSpan is the name of admission's span for the wait.
const waitSpan = "wait for admission"

// ErrNoTrace says that the answer holds no span.
var ErrNoTrace = errors.New("no span of that trace is there")

// ReadSpans reads an answer of Jaeger's /api/v3/traces, one or several JSON values after
// each other.
func ReadSpans(r io.Reader) ([]Span, error) {
	var spans []Span
	dec := json.NewDecoder(r)
	for {
		var answer otlpAnswer
		if err := dec.Decode(&answer); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("the answer is no OTLP in JSON, as /api/v3 of Jaeger has it: %w", err)
		}
		if answer.Error != nil {
			return nil, fmt.Errorf("%w: %s", ErrNoTrace, answer.Error.Message)
		}
		if answer.Result == nil {
			return nil, errors.New(`the answer has no "result", as /api/v3 of Jaeger has it`)
		}
		for _, rs := range answer.Result.ResourceSpans {
			service := ""
			for _, a := range rs.Resource.Attributes {
				if text, ok := a.text(); ok && a.Key == "service.name" {
					service = text
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					spans = append(spans, s.span(service))
				}
			}
		}
	}
	if len(spans) == 0 {
		return nil, ErrNoTrace
	}
	return spans, nil
}

func (s otlpSpan) span(service string) Span {
	code := strings.Trim(string(s.Status.Code), `"`)
	out := Span{
		TraceID: s.TraceID, ID: s.SpanID, ParentID: strings.TrimLeft(s.ParentSpanID, "0"), Service: service, Name: s.Name,
		Start: time.Unix(0, int64(s.Start)).UTC(), End: time.Unix(0, int64(s.End)).UTC(),
		Failed: code == "2" || code == "STATUS_CODE_ERROR", Message: s.Status.Message,
		Attributes: map[string]string{},
	}
	if out.ParentID != "" {
		out.ParentID = s.ParentSpanID
	}
	for _, a := range s.Attributes {
		if text, ok := a.text(); ok {
			out.Attributes[a.Key] = text
		}
	}
	return out
}

// FromSpans makes a chart of the spans of a trace: children below their parents, in the
// order in which they began.
func FromSpans(trace string, spans []Span) Chart {
	chart := Chart{TraceID: trace}
	byID := map[string]int{}
	for i, s := range spans {
		byID[s.ID] = i
	}
	children := map[string][]int{}
	var roots []int
	orphans := 0
	for i, s := range spans {
		_, known := byID[s.ParentID]
		switch {
		case s.ParentID == "":
			roots = append(roots, i)
		case !known:
			orphans++
			roots = append(roots, i)
		default:
			children[s.ParentID] = append(children[s.ParentID], i)
		}
	}
	drawn := make([]bool, len(spans))
	var draw func(list []int, depth int)
	draw = func(list []int, depth int) {
		slices.SortStableFunc(list, func(a, b int) int { return spans[a].Start.Compare(spans[b].Start) })
		for _, i := range list {
			if drawn[i] {
				continue
			}
			drawn[i] = true
			chart.Rows = append(chart.Rows, spans[i].row(depth))
			draw(children[spans[i].ID], depth+1)
		}
	}
	draw(roots, 0)
	// Spans that are each other's ancestors hang on no root; they are shown all the same.
	for i := range spans {
		if !drawn[i] {
			orphans++
			draw([]int{i}, 0)
		}
	}
	if orphans > 0 {
		chart.Notes = append(chart.Notes, fmt.Sprintf("%s without the parent they name: spans are still on their way, or were not sampled or lost", count(orphans, "span")))
	}
	chart.finish()
	chart.sum(spans)
	return chart
}

func (c *Chart) sum(spans []Span) {
	services := map[string]bool{}
	failed, turns, tools, tokens := 0, 0, 0, int64(0)
	for _, s := range spans {
		services[s.Service] = true
		if s.Failed {
			failed++
		}
		switch s.attribute(telemetry.AttrGenAIOperation) {
		case "chat":
			turns++
			if u := s.usage(); u != nil {
				tokens += u.TotalTokens
			}
		case "execute_tool":
			tools++
		}
	}
	c.Summary = strings.Join([]string{
		length(c.End.Sub(c.Start)), count(len(spans), "span"), count(len(services), "service"), fmt.Sprintf("%d failed", failed),
		count(turns, "model call"), count(tools, "tool call"), fmt.Sprintf("%d tokens", tokens),
	}, ", ")
}

func (s Span) attribute(key attribute.Key) string { return s.Attributes[string(key)] }

// usage is that of a model call, or nil.
func (s Span) usage() *contract.Usage {
	in, err1 := strconv.ParseInt(s.attribute(telemetry.AttrGenAIInputTokens), 10, 64)
	out, err2 := strconv.ParseInt(s.attribute(telemetry.AttrGenAIOutputTokens), 10, 64)
	if err1 != nil || err2 != nil {
		return nil
	}
	return &contract.Usage{InputTokens: in, OutputTokens: out, TotalTokens: in + out}
}

func (s Span) row(depth int) Row {
	r := Row{
		Depth: depth, Kind: KindSpan, Name: s.Name, Start: s.Start, End: s.End, Service: strings.TrimPrefix(s.Service, "herdgate-"),
		TaskID: contract.TaskID(s.attribute(telemetry.AttrTaskID)), Usage: s.usage(),
		Status: s.attribute(telemetry.AttrStatus), StopReason: s.attribute(telemetry.AttrStopReason),
	}
	switch s.attribute(telemetry.AttrGenAIOperation) {
	case "chat":
		r.Kind = KindModel
	case "execute_tool":
		r.Kind = KindTool
	}
	if s.Name == waitSpan {
		r.Kind = KindWait
	}
	if n, err := strconv.Atoi(s.attribute(telemetry.AttrDeliveryAttempt)); err == nil && n > 1 {
		r.Note = fmt.Sprintf("delivery %d", n)
	}
	if s.Failed {
		r.ErrorCode = cmp.Or(s.attribute(telemetry.AttrErrorCode), s.attribute(telemetry.AttrErrorType), "error")
		r.Error = firstLine(s.Message)
	}
	return r
}
