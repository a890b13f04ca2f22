// Package rewrite puts other addresses of brokers into the answers of Kafka that carry them. It is pure.
package rewrite

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

// ErrAnswer is an answer that cannot be rewritten, and must not reach a client as it is.
var ErrAnswer = errors.New("answer that cannot be rewritten")

// Map tells the address at which clients shall look for a broker whose own is host:port. ok false leaves the broker out: it is
// not to be reached.
type Map func(node int32, host string, port int32) (newHost string, newPort int32, ok bool)

// API keys whose answers are looked at.
const (
	Produce          = 0
	Fetch            = 1
	Metadata         = 3
	FindCoordinator  = 10
	ApiVersions      = 18
	DescribeCluster  = 60
	ShareFetch       = 78
	ShareAcknowledge = 79
)

// first is the first version of each API whose answer is of interest. Those of Produce and Fetch can have the tagged field of
// addresses from the time on that they have any, though brokers send it in later ones alone (10 and 16, KIP-951).
var first = map[int16]int16{Produce: 9, Fetch: 12, Metadata: 0, FindCoordinator: 0, ApiVersions: 0, DescribeCluster: 0, ShareFetch: 0, ShareAcknowledge: 0}

const (
	errNone                    = 0
	errCoordinatorNotAvailable = 15
	errUnsupportedVersion      = 35
	controllers                = 2 // EndpointType of DescribeCluster
)

// Wanted reports whether the answer to a request may carry addresses, or versions that must be limited.
func Wanted(key, version int16) bool {
	least, ok := first[key]
	return ok && version >= least
}

// Answer makes the client's answer out of the broker's: a frame with its size, as the result is. Where nothing is to be
// changed the result is frame itself. Unknown tagged fields stay. What does not parse, or has a version that is not known, is
// ErrAnswer.
func Answer(key, version int16, frame []byte, to Map) ([]byte, error) {
	if len(frame) < 8 {
		return nil, fmt.Errorf("%w: %d bytes", ErrAnswer, len(frame))
	}
	resp := kmsg.ResponseForKey(key)
	if key == ApiVersions && len(frame) >= 10 && binary.BigEndian.Uint16(frame[8:]) == errUnsupportedVersion {
		version = 0 // a broker that does not know the version answers in the first (KIP-511)
	}
	if version > resp.MaxVersion() {
		return nil, fmt.Errorf("%w: %s v%d", ErrAnswer, kmsg.NameForKey(key), version)
	}
	resp.SetVersion(version)
	head := 8
	if resp.IsFlexible() && key != ApiVersions {
		n, err := wire.Tags(frame[8:])
		if err != nil {
			return nil, fmt.Errorf("%w: %s v%d: %w", ErrAnswer, kmsg.NameForKey(key), version, err)
		}
		head += n
	}
	if err := resp.ReadFrom(frame[head:]); err != nil {
		return nil, fmt.Errorf("%w: %s v%d: %w", ErrAnswer, kmsg.NameForKey(key), version, err)
	}
	if !change(resp, to) {
		return frame, nil
	}
	out := resp.AppendTo(append(make([]byte, 0, len(frame)+256), frame[:head]...))
	binary.BigEndian.PutUint32(out, uint32(len(out)-4))
	return out, nil
}

// change changes what it has to and reports whether that is anything.
func change(resp kmsg.Response, to Map) bool {
	switch r := resp.(type) {
	case *kmsg.ApiVersionsResponse:
		return limit(r)
	case *kmsg.MetadataResponse:
		return each(&r.Brokers, to, func(b *kmsg.MetadataResponseBroker) (int32, *string, *int32) { return b.NodeID, &b.Host, &b.Port })
	case *kmsg.DescribeClusterResponse:
		if r.EndpointType == controllers {
			return false
		}
		return each(&r.Brokers, to, func(b *kmsg.DescribeClusterResponseBroker) (int32, *string, *int32) {
			return b.NodeID, &b.Host, &b.Port
		})
	case *kmsg.FindCoordinatorResponse:
		changed := coordinator(r.NodeID, &r.Host, &r.Port, &r.ErrorCode, to)
		for i := range r.Coordinators {
			c := &r.Coordinators[i]
			changed = coordinator(c.NodeID, &c.Host, &c.Port, &c.ErrorCode, to) || changed
		}
		return changed
	case *kmsg.ProduceResponse:
		return each(&r.Brokers, to, func(b *kmsg.ProduceResponseBroker) (int32, *string, *int32) { return b.NodeID, &b.Host, &b.Port })
	case *kmsg.FetchResponse:
		return each(&r.Brokers, to, func(b *kmsg.FetchResponseBroker) (int32, *string, *int32) { return b.NodeID, &b.Host, &b.Port })
	case *kmsg.ShareFetchResponse:
		return each(&r.NodeEndpoints, to, func(b *kmsg.ShareFetchResponseNodeEndpoint) (int32, *string, *int32) {
			return b.NodeID, &b.Host, &b.Port
		})
	case *kmsg.ShareAcknowledgeResponse:
		return each(&r.NodeEndpoints, to, func(b *kmsg.ShareAcknowledgeResponseNodeEndpoint) (int32, *string, *int32) {
			return b.NodeID, &b.Host, &b.Port
		})
	}
	return false
}

// each maps the brokers of a list.
func each[T any](list *[]T, to Map, fields func(*T) (node int32, host *string, port *int32)) bool {
	if len(*list) == 0 {
		return false
	}
	kept := (*list)[:0]
	for i := range *list {
		b := (*list)[i]
		node, host, port := fields(&b)
		var ok bool
		if *host, *port, ok = to(node, *host, *port); ok {
			kept = append(kept, b)
		}
	}
	*list = kept
	return true
}

// coordinator maps one coordinator. One that is not to be reached is not available.
func coordinator(node int32, host *string, port *int32, code *int16, to Map) bool {
	if *code != errNone || node < 0 || *host == "" {
		return false
	}
	var ok bool
	if *host, *port, ok = to(node, *host, *port); !ok {
		*code, *host, *port = errCoordinatorNotAvailable, "", -1
	}
	return true
}

// limit takes versions whose answers could not be rewritten out of what a broker offers.
func limit(r *kmsg.ApiVersionsResponse) bool {
	changed := false
	r.ApiKeys = slices.DeleteFunc(r.ApiKeys, func(k kmsg.ApiVersionsResponseApiKey) bool {
		if _, ok := first[k.ApiKey]; !ok {
			return false
		}
		gone := k.MinVersion > kmsg.ResponseForKey(k.ApiKey).MaxVersion()
		changed = changed || gone
		return gone
	})
	for i := range r.ApiKeys {
		k := &r.ApiKeys[i]
		if _, ok := first[k.ApiKey]; !ok {
			continue
		}
		if known := kmsg.ResponseForKey(k.ApiKey).MaxVersion(); k.MaxVersion > known {
			k.MaxVersion, changed = known, true
		}
	}
	return changed
}
