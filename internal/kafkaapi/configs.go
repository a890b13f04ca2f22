package kafkaapi

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
)

// Kinds of config resources and sources of values, as on the wire.
const (
	resourceTopic  = kmsg.ConfigResourceTypeTopic
	resourceBroker = kmsg.ConfigResourceTypeBroker

	sourceTopic   = kmsg.ConfigSourceDynamicTopicConfig
	sourceBroker  = kmsg.ConfigSourceDynamicBrokerConfig
	sourceCluster = kmsg.ConfigSourceDynamicDefaultBrokerConfig
	sourceStatic  = kmsg.ConfigSourceStaticBrokerConfig
	sourceDefault = kmsg.ConfigSourceDefaultConfig
)

// described is one config of a resource.
type described struct {
	Name     string
	Value    *string
	Source   kmsg.ConfigSource
	ReadOnly bool
	Key      *config.Key
}

// describe lists the keys of a table: a resource's own values over the defaults, with wanted nil all that are not hidden.
func describe(table *config.Table, defaults, own map[string]string, ownSource kmsg.ConfigSource, wanted []string) []described {
	var out []described
	keys := table.Keys()
	for i := range keys {
		k := &keys[i]
		if wanted != nil && !slices.Contains(wanted, k.Name) {
			continue
		}
		d := described{Name: k.Name, Source: sourceDefault, Key: k}
		v, set := own[k.Name]
		switch fallback, ok := defaults[k.Name]; {
		case set:
			d.Source = ownSource
		case k.Hidden:
			continue
		case ok && fallback != k.Default:
			v, d.Source = fallback, sourceStatic
		default:
			v = k.Default
		}
		if k.Kind != config.Password {
			d.Value = &v
		}
		out = append(out, d)
	}
	return out
}

// describeConfigs serves DescribeConfigs (KIP-133, KIP-226, KIP-569).
func (a *API) describeConfigs(_ context.Context, _ *call, req *kmsg.DescribeConfigsRequest) *kmsg.DescribeConfigsResponse {
	resp := respond[*kmsg.DescribeConfigsResponse](req)
	img := a.Image()
	for _, rr := range req.Resources {
		r := kmsg.NewDescribeConfigsResponseResource()
		r.ResourceType, r.ResourceName = rr.ResourceType, rr.ResourceName
		list, err := a.describeResource(img, rr)
		r.ErrorCode, r.ErrorMessage = code(err), message(err)
		for _, d := range list {
			r.Configs = append(r.Configs, a.configEntry(req, d))
		}
		resp.Resources = append(resp.Resources, r)
	}
	return resp
}

func (a *API) describeResource(img *metadata.Image, rr kmsg.DescribeConfigsRequestResource) ([]described, error) {
	broker := a.Config()
	switch rr.ResourceType {
	case resourceTopic:
		if err := controller.CheckTopicName(rr.ResourceName); err != nil {
			return nil, err
		}
		t, ok := img.Topics[rr.ResourceName]
		if !ok {
			return nil, fmt.Errorf("%w: %s", errUnknownTopic, rr.ResourceName)
		}
		return describe(config.Topic, config.TopicDefaults(broker), t.Configs, sourceTopic, rr.ConfigNames), nil
	case resourceBroker:
		if rr.ResourceName == "" {
			own := img.BrokerConfigs[controller.ClusterWide]
			return slices.DeleteFunc(describe(config.Broker, nil, own, sourceCluster, rr.ConfigNames), func(d described) bool { return d.Source != sourceCluster }), nil
		}
		id, err := brokerID(rr.ResourceName)
		if err != nil {
			return nil, err
		}
		if id != a.NodeID {
			return nil, refuse(errInvalidRequest, "Unexpected broker id, expected %d or empty string, but received %s", a.NodeID, rr.ResourceName)
		}
		static := map[string]string{}
		for _, name := range broker.Explicit() {
			static[name] = broker.Get(name)
		}
		list := describe(config.Broker, nil, static, sourceStatic, rr.ConfigNames)
		for i := range list {
			if _, ok := img.BrokerConfigs[id][list[i].Name]; ok {
				list[i].Source = sourceBroker
			} else if _, ok := img.BrokerConfigs[controller.ClusterWide][list[i].Name]; ok {
				list[i].Source = sourceCluster
			}
			list[i].ReadOnly = list[i].Key.Mode == config.ReadOnly
		}
		return list, nil
	}
	return nil, refuse(errInvalidRequest, "Unsupported resource type: %d", rr.ResourceType)
}

func (a *API) configEntry(req *kmsg.DescribeConfigsRequest, d described) kmsg.DescribeConfigsResponseResourceConfig {
	e := kmsg.NewDescribeConfigsResponseResourceConfig()
	e.Name, e.Value, e.Source, e.ReadOnly = d.Name, d.Value, d.Source, d.ReadOnly
	e.IsDefault = d.Source == sourceDefault
	e.IsSensitive = d.Key.Kind == config.Password
	e.ConfigType = kmsg.ConfigType(d.Key.Kind)
	if req.IncludeDocumentation {
		e.Documentation = &d.Key.Doc
	}
	if req.IncludeSynonyms {
		add := func(name string, value *string, source kmsg.ConfigSource) {
			s := kmsg.NewDescribeConfigsResponseResourceConfigConfigSynonym()
			s.Name, s.Value, s.Source = name, value, source
			e.ConfigSynonyms = append(e.ConfigSynonyms, s)
		}
		if d.Source != sourceDefault {
			add(d.Name, d.Value, d.Source)
		}
		if !e.IsSensitive && (d.Key.Synonym != "" || d.Source == sourceDefault) {
			name := d.Key.Synonym
			if name == "" {
				name = d.Name
			}
			add(name, &d.Key.Default, sourceDefault)
		}
	}
	return e
}

func brokerID(name string) (int32, error) {
	id, err := strconv.ParseInt(name, 10, 32)
	if err != nil {
		return 0, refuse(errInvalidRequest, "Broker id must be an integer, but it is: %s", name)
	}
	return int32(id), nil
}

// resource identifies what a config request is about.
type resource struct {
	kind kmsg.ConfigResourceType
	name string
}

// alterResource runs one resource's change. incremental is nil for the old call, which replaces everything.
func (a *API) alterResource(ctx context.Context, r resource, incremental []controller.Change, replace map[string]string, validateOnly bool) error {
	return a.Control.Do(ctx, func(img *metadata.Image, env controller.Env) (records []metadata.Record, err error) {
		switch r.kind {
		case resourceTopic:
			if incremental != nil {
				records, err = controller.AlterTopic(img, env, r.name, incremental)
			} else {
				records, err = controller.ReplaceTopic(img, env, r.name, replace)
			}
		case resourceBroker:
			id := controller.ClusterWide
			if r.name != "" {
				if id, err = brokerID(r.name); err != nil {
					return nil, err
				}
			}
			if incremental != nil {
				records, err = controller.AlterBroker(img, env, id, incremental)
			} else {
				records, err = controller.ReplaceBroker(img, env, id, replace)
			}
		default:
			err = refuse(errInvalidRequest, "Unsupported resource type: %d", r.kind)
		}
		if validateOnly {
			records = nil
		}
		return records, err
	})
}

var errTwice = refuse(errInvalidRequest, "Each resource must appear at most once.")

// incrementalAlterConfigs serves IncrementalAlterConfigs (KIP-339).
func (a *API) incrementalAlterConfigs(ctx context.Context, _ *call, req *kmsg.IncrementalAlterConfigsRequest) *kmsg.IncrementalAlterConfigsResponse {
	resp := respond[*kmsg.IncrementalAlterConfigsResponse](req)
	seen := map[resource]int{}
	for _, rr := range req.Resources {
		seen[resource{rr.ResourceType, rr.ResourceName}]++
	}
	for _, rr := range req.Resources {
		id := resource{rr.ResourceType, rr.ResourceName}
		changes := []controller.Change{}
		for _, c := range rr.Configs {
			changes = append(changes, controller.Change{Key: c.Name, Op: controller.Op(c.Op), Value: c.Value})
		}
		err := errTwice
		if seen[id] == 1 {
			err = a.alterResource(ctx, id, changes, nil, req.ValidateOnly)
		}
		r := kmsg.NewIncrementalAlterConfigsResponseResource()
		r.ResourceType, r.ResourceName, r.ErrorCode, r.ErrorMessage = rr.ResourceType, rr.ResourceName, code(err), message(err)
		resp.Resources = append(resp.Resources, r)
	}
	return resp
}

// alterConfigs serves AlterConfigs, which resets every key that it does not name (KIP-133).
func (a *API) alterConfigs(ctx context.Context, _ *call, req *kmsg.AlterConfigsRequest) *kmsg.AlterConfigsResponse {
	resp := respond[*kmsg.AlterConfigsResponse](req)
	seen := map[resource]int{}
	for _, rr := range req.Resources {
		seen[resource{rr.ResourceType, rr.ResourceName}]++
	}
	for _, rr := range req.Resources {
		id := resource{rr.ResourceType, rr.ResourceName}
		err := errTwice
		if seen[id] == 1 {
			var replace map[string]string
			if replace, err = replacement(rr.Configs); err == nil {
				err = a.alterResource(ctx, id, nil, replace, req.ValidateOnly)
			}
		}
		r := kmsg.NewAlterConfigsResponseResource()
		r.ResourceType, r.ResourceName, r.ErrorCode, r.ErrorMessage = rr.ResourceType, rr.ResourceName, code(err), message(err)
		resp.Resources = append(resp.Resources, r)
	}
	return resp
}

func replacement(configs []kmsg.AlterConfigsRequestResourceConfig) (map[string]string, error) {
	out := map[string]string{}
	for _, c := range configs {
		if c.Value == nil {
			return nil, refuse(errInvalidRequest, "Null value not supported for : %s", c.Name)
		}
		if _, twice := out[c.Name]; twice {
			return nil, refuse(errInvalidRequest, "Error due to duplicate config keys")
		}
		out[c.Name] = *c.Value
	}
	return out, nil
}
