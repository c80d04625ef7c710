package workspace

import (
	"fmt"
	"testing"
)

// What a task pays for its copy: made of a snapshot, and pushed with one change.
func BenchmarkCopy(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprint(n, " files of 4 KiB"), func(b *testing.B) {
			h := hosts(b, 1)[0]
			c := h.checkout("a")
			content := make([]byte, 4<<10)
			for i := range n {
				copy(content, fmt.Sprint(i))
				c.put(b, fmt.Sprintf("d%d/f%d", i%20, i), string(content))
			}
			h.push(c)
			for i := 0; b.Loop(); i++ {
				c := h.checkout("b")
				c.put(b, "changed", fmt.Sprint(i))
				h.push(c)
				c.Close()
			}
		})
	}
}
