// A module of its own, outside of the workspace: it stands for a program of
// somebody else.
module example.com/subscriber-go

go 1.26.0

require (
	github.com/herdgate/herdgate/pkg/contract v0.1.0
	github.com/herdgate/herdgate/pkg/envelope v0.1.0
	github.com/nats-io/nats.go v1.55.0
)

require (
	github.com/klauspost/compress v1.20.0 // indirect
	github.com/nats-io/nkeys v0.4.16 // indirect
	github.com/nats-io/nuid v1.0.1 // indirect
	golang.org/x/crypto v0.57.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
)

// In a checkout only; a program elsewhere has no replace lines.
replace (
	github.com/herdgate/herdgate/pkg/contract => ../../pkg/contract
	github.com/herdgate/herdgate/pkg/envelope => ../../pkg/envelope
)
