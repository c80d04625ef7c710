package provision

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"reflect"
	"strings"
	"time"
)

// Kind says what a change is about.
type Kind string

// The kinds of assets.
const (
	KindStream   Kind = "stream"
	KindConsumer Kind = "consumer"
)

// Change is one difference between what is wanted and what a server has.
type Change struct {
	Kind Kind
	// Name is the stream's, or "<stream>/<consumer>".
	Name string
	// Missing: the server has no such asset. Fields then lists all wanted values.
	Missing bool
	Fields  []Field
}

// Field is a setting that differs. Have and Want are for people.
type Field struct {
	Name       string
	Have, Want string
	// InPlace: the server can change it on the existing asset.
	InPlace bool
	// Trims: the change may remove stored messages beyond the new limit.
	Trims bool
	// Unsafe: a service must not work with the value that the server has.
	Unsafe bool
}

// InPlace reports whether [Apply] can make the change: the asset is missing, or
// everything that differs can be changed on it.
func (c Change) InPlace() bool {
	if c.Missing {
		return true
	}
	for _, f := range c.Fields {
		if !f.InPlace {
			return false
		}
	}
	return true
}

// Unsafe reports whether a service must not work with what the server has.
func (c Change) Unsafe() bool {
	if c.Missing {
		return true
	}
	for _, f := range c.Fields {
		if f.Unsafe {
			return true
		}
	}
	return false
}

// String is the change in one line.
func (c Change) String() string {
	if c.Missing {
		return fmt.Sprintf("%s %s is missing", c.Kind, c.Name)
	}
	var list []string
	for _, f := range c.Fields {
		list = append(list, fmt.Sprintf("%s is %s, expected %s", f.Name, f.Have, f.Want))
	}
	return fmt.Sprintf("%s %s: %s", c.Kind, c.Name, strings.Join(list, "; "))
}

// WriteDiff prints changes for a person: + is created, ~ is changed in place,
// ! cannot be changed in place.
func WriteDiff(w io.Writer, changes []Change) error {
	var b bytes.Buffer
	if len(changes) == 0 {
		b.WriteString("nothing to change\n")
	}
	for _, c := range changes {
		sign := "~"
		switch {
		case c.Missing:
			sign = "+"
		case !c.InPlace():
			sign = "!"
		}
		fmt.Fprintf(&b, "%s %s %s\n", sign, c.Kind, c.Name)
		for _, f := range c.Fields {
			switch {
			case c.Missing:
				fmt.Fprintf(&b, "    %s: %s\n", f.Name, f.Want)
			case !f.InPlace:
				fmt.Fprintf(&b, "  ! %s: %s -> %s (cannot be changed on an existing %s)\n", f.Name, f.Have, f.Want, c.Kind)
			case f.Trims:
				fmt.Fprintf(&b, "  ~ %s: %s -> %s (stored messages beyond the limit are removed)\n", f.Name, f.Have, f.Want)
			default:
				fmt.Fprintf(&b, "  ~ %s: %s -> %s\n", f.Name, f.Have, f.Want)
			}
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// object is a configuration as the server's JSON has it. Working on JSON keeps
// settings alive that this program does not know.
type object map[string]any

func toObject(v any) (object, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return parseObject(b)
}

func parseObject(b []byte) (object, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber() // limits are 64-bit integers
	var o object
	if err := d.Decode(&o); err != nil {
		return nil, err
	}
	return o, nil
}

// setting is the rule for one managed field.
type setting struct {
	name string
	// inPlace tells whether the server can change have to want; nil: always.
	inPlace func(have, want any) bool
	// unsafe tells whether a service must refuse to work; nil: never.
	unsafe func(have, want any) bool
	// trims tells whether a change from have to want may drop messages; nil: never.
	trims func(have, want any) bool
	// extra: a value is harmless where none is wanted.
	extra bool
	kind  valueKind
}

type valueKind int

const (
	plain valueKind = iota
	duration
	limit // 0 and below mean "no limit"
)

func never(_, _ any) bool  { return false }
func always(_, _ any) bool { return true }

// notFromTrue: the server lets the flag be set, but not be taken back.
func notFromTrue(have, _ any) bool { return have != true }

// tighter: there is a limit now where the service expects none.
func tighter(have, want any) bool { return number(want) <= 0 && number(have) > 0 }

// unbounded: there is no limit where the service needs one.
func unbounded(have, want any) bool { return number(want) > 0 && number(have) <= 0 }

func lower(have, want any) bool {
	return number(want) > 0 && (number(have) <= 0 || number(want) < number(have))
}

var streamSettings = []setting{
	{name: "subjects", unsafe: always},
	{name: "retention", inPlace: never, unsafe: always},
	{name: "discard", unsafe: always},
	{name: "discard_new_per_subject", unsafe: always},
	{name: "max_msgs", kind: limit, unsafe: unbounded, trims: lower},
	{name: "max_msgs_per_subject", kind: limit, unsafe: always, trims: lower},
	{name: "max_bytes", kind: limit, trims: lower},
	{name: "max_age", kind: duration, unsafe: tighter, trims: lower},
	{name: "max_msg_size", kind: limit},
	{name: "max_consumers", kind: limit},
	// A server that loses acknowledged writes at a restart breaks every promise;
	// the other way round nothing is lost.
	{name: "storage", inPlace: never, unsafe: func(_, want any) bool { return want == "file" }},
	{name: "num_replicas"},
	{name: "duplicate_window", kind: duration},
	{name: "no_ack", unsafe: always},
	{name: "sealed", inPlace: notFromTrue, unsafe: always},
	{name: "deny_delete", inPlace: notFromTrue, unsafe: func(have, _ any) bool { return have == true }},
	{name: "deny_purge", inPlace: notFromTrue, unsafe: always},
	{name: "allow_rollup_hdrs", unsafe: always},
	{name: "allow_direct", extra: true, unsafe: always},
	{name: "allow_msg_ttl", extra: true, unsafe: always},
	{name: "subject_delete_marker_ttl", kind: duration, unsafe: unbounded},
	{name: "persist_mode", inPlace: never, unsafe: always},
	{name: "mirror", inPlace: never, unsafe: always},
	{name: "subject_transform", unsafe: always},
}

var consumerSettings = []setting{
	{name: "deliver_policy", inPlace: never, unsafe: always},
	{name: "deliver_subject", inPlace: never, unsafe: always},
	{name: "ack_policy", inPlace: never, unsafe: always},
	{name: "replay_policy", inPlace: never},
	{name: "filter_subject", unsafe: always},
	{name: "filter_subjects", unsafe: always},
	{name: "ack_wait", kind: duration},
	{name: "max_deliver", kind: limit, unsafe: tighter},
	{name: "max_ack_pending", kind: limit},
	{name: "backoff"},
	{name: "headers_only", unsafe: always},
	{name: "inactive_threshold", kind: duration, unsafe: tighter},
	{name: "mem_storage", inPlace: never, unsafe: func(have, _ any) bool { return have == true }},
	{name: "priority_policy", unsafe: always},
	{name: "priority_groups", unsafe: always},
}

func settingsOf(k Kind) []setting {
	if k == KindConsumer {
		return consumerSettings
	}
	return streamSettings
}

// compare lists the managed settings in which have differs from want.
func compare(k Kind, have, want object) []Field {
	var out []Field
	for _, s := range settingsOf(k) {
		h, w := s.value(have), s.value(want)
		if reflect.DeepEqual(h, w) || s.extra && w == nil {
			continue
		}
		f := Field{Name: s.name, Have: s.print(h), Want: s.print(w)}
		f.InPlace = s.inPlace == nil || s.inPlace(h, w)
		f.Unsafe = s.unsafe != nil && s.unsafe(h, w)
		f.Trims = s.trims != nil && s.trims(h, w)
		// With discard new the server refuses what comes and keeps what it has;
		// the limit per subject cuts in either case.
		if s.name == "max_msgs" && want["discard"] == "new" {
			f.Trims = false
		}
		out = append(out, f)
	}
	return out
}

// wanted lists all settings of an asset that is missing.
func wanted(k Kind, want object) []Field {
	var out []Field
	for _, s := range settingsOf(k) {
		if w := s.value(want); w != nil {
			out = append(out, Field{Name: s.name, Have: "not set", Want: s.print(w), InPlace: true})
		}
	}
	return out
}

// overlay puts the managed settings of want over have.
func overlay(k Kind, have, want object) object {
	out := maps.Clone(have)
	for _, s := range settingsOf(k) {
		w, ok := want[s.name]
		switch {
		case s.extra && s.value(want) == nil:
		case ok:
			out[s.name] = w
		default:
			delete(out, s.name)
		}
	}
	return out
}

// value returns the setting in the one form in which it is compared: nil for
// everything that means "not set", be it absent, zero, false or empty.
func (s setting) value(o object) any {
	v := o[s.name]
	switch t := v.(type) {
	case bool:
		if !t {
			return nil
		}
	case string:
		if t == "" || s.name == "persist_mode" && t == "default" || s.name == "priority_policy" && t == "none" {
			return nil
		}
	case []any:
		if len(t) == 0 {
			return nil
		}
	case json.Number:
		n, err := t.Int64()
		if err != nil {
			return v
		}
		if n == 0 || s.kind == limit && n < 0 {
			return nil
		}
		return n
	}
	return v
}

func (s setting) print(v any) string {
	switch {
	case v == nil && s.kind == limit:
		return "unlimited"
	case v == nil:
		return "not set"
	case s.kind == duration:
		if n, ok := v.(int64); ok {
			return printDuration(time.Duration(n))
		}
	}
	if t, ok := v.(string); ok {
		return t
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(b)
}

// printDuration is Duration.String without trailing zero units.
func printDuration(d time.Duration) string {
	const day = 24 * time.Hour
	if d >= day && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func number(v any) int64 {
	n, _ := v.(int64)
	return n
}
