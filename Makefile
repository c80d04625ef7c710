# Herdgate. `make help` lists the targets.
# Everything goes through the go tool; nothing else has to be installed.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Without go.work the word "work" means one module only, and still exits 0.
ifeq ($(wildcard go.work),)
$(error go.work is missing: run make in the top folder of the checkout)
endif

GOLANGCI_VERSION := v2.15.0
GOLANGCI := bin/golangci-lint-$(GOLANGCI_VERSION)
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# Without -trimpath a build shares what tests have compiled: TRIMPATH= says so.
TRIMPATH ?= -trimpath
GOBUILD := go build $(TRIMPATH) -ldflags '-X github.com/herdgate/herdgate/internal/process.Version=$(VERSION)'

SERVICES := lead admission executor eventsink
# The folders of all modules of the workspace, from go.work alone.
MODULES := $(shell go list -m -f '{{.Dir}}')
# Sample data below _project included, so that it looks like what it pretends to be.
GOFILES = find . -name '*.go' -not -path './.git/*'

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: build
build: bin/herdgate $(SERVICES:%=bin/%) ## build bin/herdgate and the four service binaries

.PHONY: FORCE
bin/herdgate: FORCE
	$(GOBUILD) -o $@ ./cmd/herdgate

$(SERVICES:%=bin/%): bin/%: FORCE
	$(GOBUILD) -o $@ ./services/$*/cmd/$*

.PHONY: demo
demo: bin/herdgate ## run the main job with everything in one process, offline
	bin/herdgate demo

.PHONY: test
test: ## run all tests of all modules with the race detector
	go test -race -shuffle=on -timeout=15m work

.PHONY: test-e2e
test-e2e: ## run the tests over separate processes only (make test runs them too)
	go test -race -shuffle=on -timeout=10m -count=1 -v ./test/e2e/...

.PHONY: bench
bench: ## measure delegation and the gate beside raw JetStream, in one run
	go test -run='^$$' -bench=. -benchtime=2s -timeout=10m ./test/...

.PHONY: bench-sink
bench-sink: ## measure the event sink beside bare inserts and a bare fetch, then with 1,000,000 events (2 minutes)
	go test -run='^$$' -bench=Sink -benchtime=50000x -timeout=10m ./services/eventsink
	go test -count=1 -v -timeout=20m -run='^(TestMemoryIsFlat|TestPagesOfALargeStore)$$' ./services/eventsink -sink.events=1000000

# What chaos does follows from its seed: make chaos CHAOS_SEED=1 does the same again.
CHAOS_SEED ?= 0
CHAOS := go test -count=1 -v ./test/e2e -chaos.seed=$(CHAOS_SEED)
CHAOS_SAYS := grep -vE '^ *(\{|\[[0-9]+\]|=== )'

.PHONY: chaos
chaos: ## everything dies, pauses and is cut off, as a seed plans it, for 9 minutes (CHAOS_SEED=)
	$(CHAOS) -run='^TestChaos$$' -timeout=15m -chaos.length=9m | $(CHAOS_SAYS)

.PHONY: chaos-short
chaos-short: ## the same for 65 seconds, as .ci/run does it
	$(CHAOS) -run='^TestChaos$$' -timeout=5m -chaos.length=65s | $(CHAOS_SAYS)

.PHONY: chaos-mutants
chaos-mutants: ## show that chaos finds services that are broken on purpose (3 minutes)
	$(CHAOS) -run='^TestChaosFindsMutants$$' -timeout=10m -chaos.mutants | $(CHAOS_SAYS)

.PHONY: scale
scale: ## what 100,000 waiting tasks cost, and that they cost no more than they may (1 minute)
	go test -count=1 -v -timeout=10m -run='^TestWaiting$$' ./test/system -scale.waiting=100000

.PHONY: soak
soak: ## 5,000 leases over 4 executors beside busy processes, for 5 minutes; none may run out
	go test -count=1 -v -timeout=15m -run='^TestSoak$$' ./test/system -soak.leases=5000 -soak.ttl=15s -soak.length=5m -soak.burn=4

# What goes wrong with which answer follows from the seed; 0 takes one from the clock.
AGENTS_SEED ?= 0

.PHONY: soak-agents
soak-agents: ## 200 sub-agents with tools, every third answer of their models spoilt; nothing may be left (1 minute)
	go test -count=1 -v -timeout=15m -run='^TestAgentsSoak$$' ./test/system -agents.runs=200 -agents.seed=$(AGENTS_SEED)

.PHONY: failover
failover: ## measure how long fail-overs of the gate take, ten times each kind (4 minutes)
	go test -count=1 -v -timeout=25m -run='^(TestFailOver|TestNetworkCut)$$' ./test/e2e -failover.samples=10 -failover.waiting=1000 | grep -E '_test.go|^ *---|^ok|^FAIL'

.PHONY: lint
lint: $(GOLANGCI) ## go vet and golangci-lint
	go vet work
	for m in $(MODULES); do (cd "$$m" && "$(CURDIR)/$(GOLANGCI)" run --config "$(CURDIR)/.golangci.yml" ./...); done

$(GOLANGCI):
	mkdir -p bin
	GOWORK=off GOBIN="$(CURDIR)/bin" go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	mv bin/golangci-lint $@

.PHONY: fmt
fmt: ## format all Go files
	$(GOFILES) -exec gofmt -w {} +

.PHONY: tidy
tidy: mod-link ## go mod tidy in every module
	for m in $(MODULES); do (cd "$$m" && GOFLAGS=-mod=mod go mod tidy); done

.PHONY: mod-link
mod-link: ## give every module the require and replace lines of the local modules it reaches
	scripts/mod-link.sh

# The first tidy may load what it needs; the second proves that no local module is
# looked for in the network.
.PHONY: check
check: ## the cheap half of verify: format, module files, a build of each module on its own
	@bad=$$($(GOFILES) -exec gofmt -l {} +); [ -z "$$bad" ] || { echo "gofmt would change:"; echo "$$bad"; exit 1; }
	scripts/mod-link.sh --check
	for m in $(MODULES); do echo "module $${m#$(CURDIR)/}"; (cd "$$m" && go mod tidy -diff && GOPROXY=off go mod tidy -diff && GOWORK=off go build ./...); done
	for m in examples/*/go.mod; do echo "example $$m"; (cd "$$(dirname "$$m")" && GOWORK=off go vet ./... && GOWORK=off go build -o /dev/null .); done

.PHONY: verify
verify: check ## check, vet, and no difference to what is committed
	go vet work
	git diff --exit-code

.PHONY: behaviours
behaviours: ## list every rule with the tests that name it, and the rules without a test
	go run ./test/behaviours

# node_modules is made anew only when what is asked for changes.
tools/asyncapi/node_modules/.installed: tools/asyncapi/package.json tools/asyncapi/package-lock.json
	npm ci --prefix tools/asyncapi --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

.PHONY: asyncapi
asyncapi: tools/asyncapi/node_modules/.installed ## check the AsyncAPI document with the official parser (needs node and npm)
	node tools/asyncapi/check.mjs pkg/contract/schema/asyncapi.yaml

examples/subscriber-node/node_modules/.installed: examples/subscriber-node/package.json examples/subscriber-node/package-lock.json
	npm ci --prefix examples/subscriber-node --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

bin/nats: tools/nats/go.mod
	cd tools/nats && GOWORK=off go build -o "$(CURDIR)/$@" github.com/nats-io/natscli/nats

.PHONY: test-examples
test-examples: examples/subscriber-node/node_modules/.installed bin/nats ## run all examples against a live system (needs node, npm and python3)
	PATH="$(CURDIR)/bin:$$PATH" go test -count=1 -v -timeout=10m -run='^Test(Subscriber|SubmitPython)' ./test/e2e -examples

.PHONY: model
model: ## check the admission protocol with Spin (needs spin and gcc; 2 to 6 minutes)
	docs/model/check.sh

.PHONY: clean
clean: ## remove what build and demo have made
	rm -rf bin .herdgate
