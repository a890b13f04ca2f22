package controller

import (
	"maps"
	"slices"
	"strings"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
)

// Op is what IncrementalAlterConfigs does to one key (KIP-339).
type Op int8

const (
	Set      Op = 0
	Delete   Op = 1
	Append   Op = 2
	Subtract Op = 3
)

// Change is one operation on one key.
type Change struct {
	Key   string
	Op    Op
	Value *string
}

// AlterTopic applies changes to a topic's own configs. All or nothing.
func AlterTopic(img *metadata.Image, env Env, topic string, changes []Change) ([]metadata.Record, error) {
	t, err := existing(img, topic)
	if err != nil {
		return nil, err
	}
	raw := maps.Clone(t.Configs)
	if raw == nil {
		raw = map[string]string{}
	}
	if err := alter(config.Topic, raw, config.TopicValues(env.Defaults(img), t.Configs).Get, changes); err != nil {
		return nil, err
	}
	return replaceTopic(img, env, t, raw)
}

// ReplaceTopic sets a topic's own configs to exactly raw: the old AlterConfigs.
func ReplaceTopic(img *metadata.Image, env Env, topic string, raw map[string]string) ([]metadata.Record, error) {
	t, err := existing(img, topic)
	if err != nil {
		return nil, err
	}
	return replaceTopic(img, env, t, raw)
}

func existing(img *metadata.Image, topic string) (*metadata.Topic, error) {
	if err := CheckTopicName(topic); err != nil {
		return nil, err
	}
	t, ok := img.Topics[topic]
	if !ok {
		return nil, refuse(ErrUnknownTopic, "The topic '%s' does not exist.", topic)
	}
	return t, nil
}

func replaceTopic(img *metadata.Image, env Env, t *metadata.Topic, raw map[string]string) ([]metadata.Record, error) {
	defaults := env.Defaults(img)
	was := config.TopicValues(defaults, t.Configs)
	stored, err := env.topicConfigs(defaults, t.Name, raw, &was)
	if err != nil {
		return nil, err
	}
	if maps.Equal(stored, t.Configs) {
		return nil, nil
	}
	return []metadata.Record{metadata.TopicConfigRecord{Topic: t.ID, Configs: stored}}, nil
}

// AlterBroker applies changes to the dynamic configs of a broker, or with ClusterWide of all.
func AlterBroker(img *metadata.Image, env Env, broker int32, changes []Change) ([]metadata.Record, error) {
	raw := maps.Clone(img.BrokerConfigs[broker])
	if raw == nil {
		raw = map[string]string{}
	}
	if err := alter(config.Broker, raw, env.brokerValues(img).Get, changes); err != nil {
		return nil, err
	}
	return ReplaceBroker(img, env, broker, raw)
}

// ReplaceBroker sets the dynamic configs of a broker to exactly raw.
func ReplaceBroker(img *metadata.Image, env Env, broker int32, raw map[string]string) ([]metadata.Record, error) {
	if _, ok := img.Brokers[broker]; !ok && broker != ClusterWide {
		return nil, refuse(ErrInvalidRequest, "No broker with id %d is registered.", broker)
	}
	values, err := config.Broker.NewValues(raw)
	if err != nil {
		return nil, refuse(ErrInvalidConfig, "%s", err)
	}
	stored := map[string]string{}
	for _, name := range values.Explicit() {
		if k, _ := config.Broker.Lookup(name); k.Mode != config.Cluster {
			return nil, refuse(ErrInvalidRequest, "Cannot update these configs dynamically: Set(%s)", name)
		}
		stored[name] = values.Get(name)
	}
	if maps.Equal(stored, img.BrokerConfigs[broker]) {
		return nil, nil
	}
	if stored[drainKey] == "true" && !draining(img, broker) {
		if err := checkDrain(img, broker); err != nil {
			return nil, err
		}
	}
	return []metadata.Record{metadata.BrokerConfigRecord{Broker: broker, Configs: stored}}, nil
}

// AlterGroup applies changes to the configs of a consumer group, which need not exist.
func AlterGroup(img *metadata.Image, env Env, group string, changes []Change) ([]metadata.Record, error) {
	raw := maps.Clone(img.GroupConfigs[group])
	if raw == nil {
		raw = map[string]string{}
	}
	if err := alter(config.Group, raw, config.GroupValues(env.brokerValues(img), raw).Get, changes); err != nil {
		return nil, err
	}
	return ReplaceGroup(img, env, group, raw)
}

// ReplaceGroup sets the configs of a consumer group to exactly raw.
func ReplaceGroup(img *metadata.Image, env Env, group string, raw map[string]string) ([]metadata.Record, error) {
	if group == "" {
		return nil, refuse(ErrInvalidRequest, "Default group resources are not allowed.")
	}
	values, err := config.Group.NewValues(raw)
	if err == nil {
		err = config.CheckGroup(env.brokerValues(img), values)
	}
	if err != nil {
		return nil, refuse(ErrInvalidConfig, "%s", err)
	}
	stored := map[string]string{}
	for _, name := range values.Explicit() {
		stored[name] = values.Get(name)
	}
	if maps.Equal(stored, img.GroupConfigs[group]) {
		return nil, nil
	}
	return []metadata.Record{metadata.GroupConfigRecord{Group: group, Configs: stored}}, nil
}

// alter changes raw in place by the rules of KIP-339. effective gives the value that a list operation starts from.
func alter(table *config.Table, raw map[string]string, effective func(string) string, changes []Change) error {
	seen := map[string]bool{}
	for _, c := range changes {
		if seen[c.Key] {
			return refuse(ErrInvalidRequest, "Error due to duplicate config keys")
		}
		seen[c.Key] = true
		if c.Op == Delete {
			delete(raw, c.Key)
			continue
		}
		if c.Value == nil {
			return refuse(ErrInvalidRequest, "Null value not supported for : %s", c.Key)
		}
		switch c.Op {
		case Set:
			raw[c.Key] = *c.Value
		case Append, Subtract:
			k, ok := table.Lookup(c.Key)
			if !ok || k.Kind != config.List {
				return refuse(ErrInvalidConfig, "Can't %s to key %s because its type is not LIST.", map[Op]string{Append: "APPEND", Subtract: "SUBTRACT"}[c.Op], c.Key)
			}
			items := config.SplitList(effective(c.Key))
			for _, v := range config.SplitList(*c.Value) {
				has := slices.Contains(items, v)
				if c.Op == Append && !has {
					items = append(items, v)
				} else if c.Op == Subtract && has {
					items = slices.DeleteFunc(items, func(s string) bool { return s == v })
				}
			}
			raw[c.Key] = strings.Join(items, ",")
		default:
			return refuse(ErrInvalidRequest, "Unknown config operation %d for key %s", c.Op, c.Key)
		}
	}
	return nil
}
