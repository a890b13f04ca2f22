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
	resourceGroup  = kmsg.ConfigResourceTypeGroupConfig

	sourceTopic   = kmsg.ConfigSourceDynamicTopicConfig
	sourceGroup   = kmsg.ConfigSourceGroupConfig
	sourceBroker  = kmsg.ConfigSourceDynamicBrokerConfig
	sourceCluster = kmsg.ConfigSourceDynamicDefaultBrokerConfig
	sourceStatic  = kmsg.ConfigSourceStaticBrokerConfig
	sourceDefault = kmsg.ConfigSourceDefaultConfig
)

// setting is a value that a key has somewhere.
type setting struct {
	Name   string
	Value  string
	Source kmsg.ConfigSource
}

// described is one config of a resource: its settings, the one that counts first.
type described struct {
	Key      *config.Key
	Settings []setting
	ReadOnly bool
}

// describer knows where the values of an image's resources come from.
type describer struct {
	node     int32
	img      *metadata.Image
	static   config.Values
	fallback map[string]string // what holds for topics without values of their own
}

func (a *API) describer() describer {
	return describer{a.NodeID, a.Image(), a.Static, config.TopicDefaults(a.Config())}
}

// topics lists the configs of a topic whose own are given; with wanted nil all that are not hidden.
func (d describer) topics(own map[string]string, wanted []string) (list []described) {
	keys := config.Topic.Keys()
	for i := range keys {
		k := &keys[i]
		if !wants(wanted, k.Name) {
			continue
		}
		if s := d.topic(k, own); len(s) > 0 {
			list = append(list, described{Key: k, Settings: s})
		}
	}
	return list
}

// group lists the configs of a consumer group whose own are given.
func (d describer) group(own map[string]string, wanted []string) (list []described) {
	keys := config.Group.Keys()
	for i := range keys {
		k := &keys[i]
		if !wants(wanted, k.Name) {
			continue
		}
		var settings []setting
		if v, ok := own[k.Name]; ok {
			settings = append(settings, setting{k.Name, v, sourceGroup})
		}
		list = append(list, described{Key: k, Settings: append(settings, d.broker(k.Synonym)...)})
	}
	return list
}

// broker lists the settings of a broker's key. A key that has neither a value nor a table row has none.
func (d describer) broker(name string) (out []setting) {
	for _, own := range []struct {
		set    map[string]string
		source kmsg.ConfigSource
	}{{d.img.BrokerConfigs[d.node], sourceBroker}, {d.img.BrokerConfigs[controller.ClusterWide], sourceCluster}} {
		if v, ok := own.set[name]; ok {
			out = append(out, setting{name, v, own.source})
		}
	}
	k, ok := config.Broker.Lookup(name)
	if !ok {
		return out
	}
	if d.static.IsSet(name) {
		out = append(out, setting{name, d.static.Get(name), sourceStatic})
	}
	return append(out, setting{name, k.Default, sourceDefault})
}

// topic lists the settings of a topic's key.
func (d describer) topic(k *config.Key, own map[string]string) (out []setting) {
	if v, ok := own[k.Name]; ok {
		out = append(out, setting{k.Name, v, sourceTopic})
	} else if k.Hidden {
		return nil
	}
	if k.Synonym == "" {
		return append(out, setting{k.Name, k.Default, sourceDefault})
	}
	of := d.broker(k.Synonym)
	if fallback := d.fallback[k.Name]; of[0].Source == sourceDefault && fallback != k.Default {
		of = append([]setting{{k.Synonym, fallback, sourceStatic}}, of...) // given in another unit
	}
	return append(out, of...)
}

// wants tells whether a request asks for a key; nil asks for all.
func wants(names []string, name string) bool { return names == nil || slices.Contains(names, name) }

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
	d := a.describer()
	var list []described
	switch rr.ResourceType {
	case resourceTopic:
		if err := controller.CheckTopicName(rr.ResourceName); err != nil {
			return nil, err
		}
		t, ok := img.Topics[rr.ResourceName]
		if !ok {
			return nil, fmt.Errorf("%w: %s", errUnknownTopic, rr.ResourceName)
		}
		return d.topics(t.Configs, rr.ConfigNames), nil
	case resourceBroker:
		if rr.ResourceName != "" {
			id, err := brokerID(rr.ResourceName)
			if err != nil {
				return nil, err
			}
			if id != a.NodeID {
				return nil, refuse(errInvalidRequest, "Unexpected broker id, expected %d or empty string, but received %s", a.NodeID, rr.ResourceName)
			}
		}
		keys := config.Broker.Keys()
		for i := range keys {
			k := &keys[i]
			if !wants(rr.ConfigNames, k.Name) || k.Hidden && !a.Static.IsSet(k.Name) {
				continue
			}
			settings := d.broker(k.Name)
			if rr.ResourceName == "" { // what is set for the cluster, and nothing else
				settings = slices.DeleteFunc(settings, func(s setting) bool { return s.Source != sourceCluster })
			}
			list = append(list, described{k, settings, k.Mode == config.ReadOnly && rr.ResourceName != ""})
		}
	case resourceGroup:
		if rr.ResourceName == "" {
			return nil, refuse(errInvalidRequest, "Group name must not be empty")
		}
		return d.group(img.GroupConfigs[rr.ResourceName], rr.ConfigNames), nil
	default:
		return nil, refuse(errInvalidRequest, "Unsupported resource type: %d", rr.ResourceType)
	}
	return slices.DeleteFunc(list, func(d described) bool { return len(d.Settings) == 0 }), nil
}

func (a *API) configEntry(req *kmsg.DescribeConfigsRequest, d described) kmsg.DescribeConfigsResponseResourceConfig {
	e := kmsg.NewDescribeConfigsResponseResourceConfig()
	sensitive := d.Key.Kind == config.Password
	shown := func(s setting) *string {
		if sensitive {
			return nil
		}
		return &s.Value
	}
	counts := d.Settings[0]
	e.Name, e.Value, e.Source, e.ReadOnly = d.Key.Name, shown(counts), counts.Source, d.ReadOnly
	e.IsDefault = counts.Source == sourceDefault
	e.IsSensitive = sensitive
	e.ConfigType = kmsg.ConfigType(d.Key.Kind)
	if req.IncludeDocumentation {
		e.Documentation = &d.Key.Doc
	}
	if req.IncludeSynonyms {
		for _, from := range d.Settings {
			s := kmsg.NewDescribeConfigsResponseResourceConfigConfigSynonym()
			s.Name, s.Value, s.Source = from.Name, shown(from), from.Source
			e.ConfigSynonyms = append(e.ConfigSynonyms, s)
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
	var c controller.Command
	switch r.kind {
	case resourceTopic:
		c = controller.ReplaceTopicCommand{Topic: r.name, Configs: replace, ValidateOnly: validateOnly}
		if incremental != nil {
			c = controller.AlterTopicCommand{Topic: r.name, Changes: incremental, ValidateOnly: validateOnly}
		}
	case resourceBroker:
		id := controller.ClusterWide
		if r.name != "" {
			var err error
			if id, err = brokerID(r.name); err != nil {
				return err
			}
		}
		c = controller.ReplaceBrokerCommand{Broker: id, Configs: replace, ValidateOnly: validateOnly}
		if incremental != nil {
			c = controller.AlterBrokerCommand{Broker: id, Changes: incremental, ValidateOnly: validateOnly}
		}
	case resourceGroup:
		c = controller.ReplaceGroupCommand{Group: r.name, Configs: replace, ValidateOnly: validateOnly}
		if incremental != nil {
			c = controller.AlterGroupCommand{Group: r.name, Changes: incremental, ValidateOnly: validateOnly}
		}
	default:
		return refuse(errInvalidRequest, "Unsupported resource type: %d", r.kind)
	}
	ctx, cancel := within(ctx, patience)
	defer cancel()
	_, err := a.Control.Do(ctx, c)
	return err
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
