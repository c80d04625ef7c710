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
	github.com/antithesishq/antithesis-sdk-go v0.8.0 // indirect
	github.com/compose-spec/compose-go/v2 v2.16.2 // indirect
	github.com/google/go-tpm v0.9.8 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/minio/highwayhash v1.0.4 // indirect
	github.com/nats-io/jwt/v2 v2.8.2 // indirect
	github.com/nats-io/nats-server/v2 v2.15.2 // indirect
	github.com/nats-io/nkeys v0.4.16 // indirect
	github.com/nats-io/nuid v1.0.1 // indirect
	go.opentelemetry.io/otel/sdk v1.47.0 // indirect
	go.opentelemetry.io/proto/otlp v1.11.0 // indirect
	go.starlark.net v0.0.0-20260908191801-89a6a09411d5 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/crypto v0.58.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	golang.org/x/time v0.16.0 // indirect
	golang.org/x/tools v0.52.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
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
