package refund

import "time"

// Window is how long after the purchase an order can be paid back.
const Window = 30 * 24 * time.Hour

// Allowed reports whether an order of that day may still be paid back.
func Allowed(bought, now time.Time) bool { return now.Sub(bought) <= Window }
