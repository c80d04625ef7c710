module github.com/herdgate/herdgate/pkg/envelope

go 1.26.0

require github.com/herdgate/herdgate/pkg/contract v0.1.0

replace github.com/herdgate/herdgate/pkg/contract => ../contract
