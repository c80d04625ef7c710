package openai

import (
	"bytes"
	"io"
	"net/http"

	"github.com/openai/openai-go/v3/packages/ssestream"
)

func decoder(body []byte) ssestream.Decoder {
	return ssestream.NewDecoder(&http.Response{Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(bytes.NewReader(body))})
}
