package kafkaapi

import (
	"context"
	"regexp"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/directfetch"
)

const apiVersionsKey = 18

// levels are what all brokers speak beyond versions of APIs; clients of older ones are served, too.
var levels = []struct {
	name  string
	level int16
}{
	{"group.version", 1},       // the consumer protocol (KIP-848)
	{"transaction.version", 2}, // KIP-890
}

var softwareName = regexp.MustCompile(`^[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?$`)

// apiVersions tells the client what is served (KIP-35, KIP-511, KIP-584).
func (a *API) apiVersions(_ context.Context, _ *call, req *kmsg.ApiVersionsRequest) *kmsg.ApiVersionsResponse {
	resp := respond[*kmsg.ApiVersionsResponse](req)
	if req.Version >= 3 && (!softwareName.MatchString(req.ClientSoftwareName) || !softwareName.MatchString(req.ClientSoftwareVersion)) {
		resp.ErrorCode = kerr.InvalidRequest.Code
		return resp
	}
	if req.Version >= 5 {
		switch {
		case (req.ClusterID == nil) != (req.NodeID == -1):
			resp.ErrorCode = kerr.InvalidRequest.Code
			return resp
		case req.ClusterID != nil && (*req.ClusterID != a.Image().ClusterID || req.NodeID != a.NodeID):
			resp.ErrorCode = kerr.RebootstrapRequired.Code
			return resp
		}
	}
	for _, e := range a.table {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = e.key, e.min, e.max
		if e.advertisedMin >= 0 {
			k.MinVersion = e.advertisedMin
		}
		resp.ApiKeys = append(resp.ApiKeys, k)
	}
	for _, l := range levels {
		f := kmsg.NewApiVersionsResponseSupportedFeature()
		f.Name, f.MinVersion, f.MaxVersion = l.name, 0, l.level
		resp.SupportedFeatures = append(resp.SupportedFeatures, f)
		level := kmsg.NewApiVersionsResponseFinalizedFeature()
		level.Name, level.MinVersionLevel, level.MaxVersionLevel = l.name, l.level, l.level
		resp.FinalizedFeatures = append(resp.FinalizedFeatures, level)
	}
	resp.FinalizedFeaturesEpoch = 0
	if a.DirectFetch {
		f := kmsg.NewApiVersionsResponseSupportedFeature()
		f.Name, f.MinVersion, f.MaxVersion = directfetch.Feature, directfetch.FeatureLevel, directfetch.FeatureLevel
		resp.SupportedFeatures = append(resp.SupportedFeatures, f)
	}
	return resp
}

// unsupportedApiVersions answers a version from the future in the oldest form, with the range that will do.
func (a *API) unsupportedApiVersions() kmsg.Response {
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.ErrorCode = kerr.UnsupportedVersion.Code
	e, _ := a.lookup(apiVersionsKey)
	k := kmsg.NewApiVersionsResponseApiKey()
	k.ApiKey, k.MinVersion, k.MaxVersion = e.key, e.min, e.max
	resp.ApiKeys = append(resp.ApiKeys, k)
	return resp
}
