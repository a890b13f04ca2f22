package kafkaapi

import (
	"context"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// saslHandshake turns SASL clients away from a PLAINTEXT listener in words that they understand (KIP-43).
func (a *API) saslHandshake(_ context.Context, _ *call, req *kmsg.SASLHandshakeRequest) *kmsg.SASLHandshakeResponse {
	resp := respond[*kmsg.SASLHandshakeResponse](req)
	resp.ErrorCode = kerr.IllegalSaslState.Code
	return resp
}

// saslAuthenticate does the same for clients that did not shake hands (KIP-152).
func (a *API) saslAuthenticate(_ context.Context, _ *call, req *kmsg.SASLAuthenticateRequest) *kmsg.SASLAuthenticateResponse {
	resp := respond[*kmsg.SASLAuthenticateResponse](req)
	resp.ErrorCode = kerr.IllegalSaslState.Code
	text := "This is a PLAINTEXT listener: connect without SASL, or to a listener with it."
	resp.ErrorMessage = &text
	return resp
}
