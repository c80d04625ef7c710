module github.com/herdgate/herdgate/services/lead

go 1.26.0

require (
	github.com/herdgate/herdgate/internal v0.0.0
	github.com/herdgate/herdgate/pkg/contract v0.1.0
	github.com/herdgate/herdgate/pkg/envelope v0.1.0
)

require (
	github.com/danielgtaylor/huma/v2 v2.37.2 // indirect
	github.com/tmaxmax/go-sse v0.12.0 // indirect
)

replace (
	github.com/herdgate/herdgate/internal => ../../internal
	github.com/herdgate/herdgate/pkg/contract => ../../pkg/contract
	github.com/herdgate/herdgate/pkg/envelope => ../../pkg/envelope
)
