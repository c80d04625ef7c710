package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/herdgate/herdgate/pkg/contract"
)

// maxMessage bounds one message of a server.
const maxMessage = 16 << 20

// maxDepth bounds its nesting.
const maxDepth = contract.MaxDepth

// maxToldBad is how many tools of one list are told of that cannot be read.
const maxToldBad = 20

var errNoMessage = errors.New("not a message of JSON-RPC")

// mend makes a server's message one that the protocol's types can read: what cannot be
// read in it is left out, with a word in its place, instead of costing all the rest
// (F-134, F-136). dropped is told of tools that are left out. The error says that there
// is no message at all.
func mend(raw []byte, dropped func(what string)) ([]byte, error) {
	if err := contract.CheckDepth(raw, maxDepth); err != nil {
		return failure(raw, fmt.Sprintf("the server's answer was not read: %v", err))
	}
	var msg map[string]json.RawMessage
	if err := json.Unmarshal(raw, &msg); err != nil || msg["jsonrpc"] == nil {
		return nil, errNoMessage
	}
	var result map[string]json.RawMessage
	if len(msg["result"]) == 0 || json.Unmarshal(msg["result"], &result) != nil {
		return raw, nil
	}
	var err error
	switch {
	case result["tools"] != nil:
		var tools sdk.ListToolsResult
		if json.Unmarshal(msg["result"], &tools) == nil && noneNil(tools.Tools) {
			return raw, nil
		}
		result["tools"], err = mendTools(result["tools"], dropped)
	case result["content"] != nil || result["structuredContent"] != nil:
		var res sdk.CallToolResult
		if json.Unmarshal(msg["result"], &res) == nil {
			return raw, nil
		}
		result["content"], err = mendContent(result["content"])
		if flag := string(result["isError"]); flag != "true" && flag != "false" {
			delete(result, "isError")
		}
		delete(result, "_meta")
	default:
		return raw, nil
	}
	if err != nil {
		return nil, err
	}
	if msg["result"], err = json.Marshal(result); err != nil {
		return nil, err
	}
	return json.Marshal(msg)
}

func noneNil(tools []*sdk.Tool) bool {
	for _, t := range tools {
		if t == nil {
			return false
		}
	}
	return true
}

// mendTools leaves out what is no tool.
func mendTools(raw json.RawMessage, dropped func(string)) (json.RawMessage, error) {
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		dropped("the list of tools is not a list")
		return json.RawMessage("[]"), nil
	}
	kept := make([]json.RawMessage, 0, len(items))
	bad := 0
	for i, item := range items {
		var t *sdk.Tool
		if err := json.Unmarshal(item, &t); err != nil || t == nil {
			if bad++; bad > maxToldBad {
				continue
			}
			var named struct {
				Name any `json:"name"`
			}
			_ = json.Unmarshal(item, &named) // no name is fine
			dropped(fmt.Sprintf("number %d of the list of tools (name %s) cannot be read", i+1, clip(clean(fmt.Sprintf("%v", named.Name)), 80)))
			continue
		}
		kept = append(kept, item)
	}
	if bad > maxToldBad {
		dropped(fmt.Sprintf("%d more of the list of tools cannot be read", bad-maxToldBad))
	}
	return json.Marshal(kept)
}

// mendContent puts a word in the place of content that cannot be read.
func mendContent(raw json.RawMessage) (json.RawMessage, error) {
	var items []json.RawMessage
	if len(raw) > 0 && json.Unmarshal(raw, &items) != nil {
		items = []json.RawMessage{raw}
	}
	out := make([]json.RawMessage, len(items))
	for i, item := range items {
		one, err := json.Marshal(map[string]any{"content": []json.RawMessage{item}})
		if err != nil {
			return nil, err
		}
		var res sdk.CallToolResult
		if json.Unmarshal(one, &res) == nil {
			out[i] = item
			continue
		}
		var typed struct {
			Type any `json:"type"`
		}
		_ = json.Unmarshal(item, &typed) // no type is fine
		kind := "no kind"
		if s, ok := typed.Type.(string); ok {
			kind = fmt.Sprintf("kind %q", clip(s, 40))
		}
		if out[i], err = json.Marshal(map[string]string{"type": "text", "text": fmt.Sprintf("[content of %s, %d bytes: it cannot be shown]", kind, len(item))}); err != nil {
			return nil, err
		}
	}
	return json.Marshal(out)
}

// failure answers the call that raw, or the beginning of it, is the answer to. Without
// an id there is no such call.
func failure(raw []byte, text string) ([]byte, error) {
	id := idOf(raw)
	if id == nil {
		return nil, errors.New(text)
	}
	return json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": -32603, "message": text}})
}

// idOf finds the id of an answer in the beginning of a message, without recursion.
func idOf(raw []byte) any {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return nil
	}
	depth, key := 1, ""
	expectKey := true
	for {
		tok, err := dec.Token()
		if err != nil {
			return nil
		}
		if d, ok := tok.(json.Delim); ok {
			if d == '{' || d == '[' {
				depth++
			} else {
				depth--
			}
			if depth == 0 {
				return nil
			}
			expectKey = depth == 1 && (d == '}' || d == ']')
			continue
		}
		if depth != 1 {
			continue
		}
		if expectKey {
			key, _ = tok.(string)
			expectKey = false
			continue
		}
		if key == "id" {
			return tok
		}
		expectKey = true
	}
}
