package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Separator stands between a server's name and its tool's.
const Separator = "__"

// maxName is the longest name of a tool that providers take.
const maxName = 64

// Remote reports whether a tool belongs to an MCP server, by its name.
func Remote(name string) bool { return strings.Contains(name, Separator) }

// ServerOf is the server's part of a name.
func ServerOf(name string) string {
	server, _, _ := strings.Cut(name, Separator)
	return server
}

// ToolName is the name by which a server's tool is offered: NAME__TOOL, in characters
// that providers take. What is too long ends in a part of its hash.
func ToolName(server, tool string) string {
	raw := server + Separator + tool
	var b strings.Builder
	for _, r := range raw {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' {
			b.WriteRune(r)
		} else {
			b.WriteByte('_')
		}
	}
	name := b.String()
	if len(name) <= maxName {
		return name
	}
	sum := sha256.Sum256([]byte(raw))
	return name[:maxName-9] + "_" + hex.EncodeToString(sum[:4])
}
