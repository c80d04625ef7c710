module github.com/herdgate/herdgate/pkg/contract

go 1.26.0
