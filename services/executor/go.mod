module github.com/herdgate/herdgate/services/executor

go 1.26.0

require (
	github.com/herdgate/herdgate/pkg/contract v0.1.0
	github.com/herdgate/herdgate/pkg/envelope v0.1.0
	github.com/herdgate/herdgate/internal v0.0.0
)

replace (
	github.com/herdgate/herdgate/pkg/contract => ../../pkg/contract
	github.com/herdgate/herdgate/pkg/envelope => ../../pkg/envelope
	github.com/herdgate/herdgate/internal => ../../internal
)
