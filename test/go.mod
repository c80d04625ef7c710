module github.com/herdgate/herdgate/test

go 1.26.0

require (
	github.com/herdgate/herdgate/internal v0.0.0
	github.com/herdgate/herdgate/pkg/contract v0.1.0
	github.com/herdgate/herdgate/pkg/envelope v0.1.0
	github.com/herdgate/herdgate/services/admission v0.0.0
	github.com/herdgate/herdgate/services/eventsink v0.0.0
	github.com/herdgate/herdgate/services/executor v0.0.0
	github.com/herdgate/herdgate/services/lead v0.0.0
)

require (
	github.com/compose-spec/compose-go/v2 v2.16.2 // indirect
	go.starlark.net v0.0.0-20260908191801-89a6a09411d5 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
	pgregory.net/rapid v1.3.0 // indirect
)

replace (
	github.com/herdgate/herdgate/internal => ../internal
	github.com/herdgate/herdgate/pkg/contract => ../pkg/contract
	github.com/herdgate/herdgate/pkg/envelope => ../pkg/envelope
	github.com/herdgate/herdgate/services/admission => ../services/admission
	github.com/herdgate/herdgate/services/eventsink => ../services/eventsink
	github.com/herdgate/herdgate/services/executor => ../services/executor
	github.com/herdgate/herdgate/services/lead => ../services/lead
)
