package controller

import (
	"maps"
	"slices"

	"github.com/varve-io/varve/internal/config"
	"github.com/varve-io/varve/internal/metadata"
)

// Run names a new cluster.
func (c BootstrapCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := Bootstrap(img, env, c.ID)
	return records, nil, err
}

// Run makes the topics that it can.
func (c CreateTopicsCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	created, records, err := CreateTopics(img, env, c.Topics, c.ValidateOnly)
	if err != nil {
		return nil, nil, err
	}
	return records, created, nil
}

// Run removes the topics that it can.
func (c DeleteTopicsCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	errs, records := DeleteTopics(img, env, c.IDs)
	return records, errs, nil
}

// Run grows the topics that it can.
func (c CreatePartitionsCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	errs, records, err := CreatePartitions(img, env, c.Topics, c.ValidateOnly)
	if err != nil {
		return nil, nil, err
	}
	return records, errs, nil
}

// Run changes a topic's own configs, and elects leaders where they allow unclean elections by now.
func (c AlterTopicCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := AlterTopic(img, env, c.Topic, c.Changes)
	return configured(img, env, c.Topic, c.ValidateOnly, records, err)
}

// Run replaces a topic's own configs, and elects leaders where they allow unclean elections by now.
func (c ReplaceTopicCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := ReplaceTopic(img, env, c.Topic, c.Configs)
	return configured(img, env, c.Topic, c.ValidateOnly, records, err)
}

// Run changes dynamic configs of a broker or of all. For all it elects leaders where they allow unclean elections by now.
func (c AlterBrokerCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := AlterBroker(img, env, c.Broker, c.Changes)
	return configured(img, env, "", c.ValidateOnly, records, err)
}

// Run replaces dynamic configs of a broker or of all. For all it elects leaders where they allow unclean elections by now.
func (c ReplaceBrokerCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := ReplaceBroker(img, env, c.Broker, c.Configs)
	return configured(img, env, "", c.ValidateOnly, records, err)
}

// Run changes the configs of a consumer group.
func (c AlterGroupCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := AlterGroup(img, env, c.Group, c.Changes)
	if c.ValidateOnly {
		records = nil
	}
	return records, nil, err
}

// Run replaces the configs of a consumer group.
func (c ReplaceGroupCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := ReplaceGroup(img, env, c.Group, c.Configs)
	if c.ValidateOnly {
		records = nil
	}
	return records, nil, err
}

// Run changes the client quotas that it can.
func (c AlterQuotasCommand) Run(img *metadata.Image, _ Env) ([]metadata.Record, any, error) {
	errs, records := AlterQuotas(img, c.Changes)
	if c.ValidateOnly {
		records = nil
	}
	return records, errs, nil
}

// configured adds to a change of configs the elections that it allows: in one topic or, where the cluster's default came
// to allow them, in all.
func configured(img *metadata.Image, env Env, topic string, validateOnly bool, records []metadata.Record, err error) ([]metadata.Record, any, error) {
	if err != nil || validateOnly || len(records) == 0 {
		return nil, nil, err
	}
	next, err := img.Apply(records)
	if err != nil {
		return nil, nil, err
	}
	b := newBatch(next, env)
	if topic != "" {
		b.electLeaderless(next.Topics[topic])
	} else if value := func(img *metadata.Image) string { return config.TopicDefaults(env.brokerValues(img))[uncleanKey] }; value(img) != value(next) {
		b.electLeaderless(slices.Collect(maps.Values(next.Topics))...)
	}
	return append(records, b.finish()...), nil, nil
}

// Run reserves producer ids.
func (c ProducerIDsCommand) Run(img *metadata.Image, _ Env) ([]metadata.Record, any, error) {
	first, records := AllocateProducerIDs(img)
	return records, first, nil
}

// Run registers an upload.
func (c StartCopyCommand) Run(img *metadata.Image, _ Env) ([]metadata.Record, any, error) {
	records, err := StartCopy(img, c.Segment)
	return records, nil, err
}

// Run makes an uploaded segment readable.
func (c FinishCopyCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := FinishCopy(img, c.Segment, c.Finished, env.Now)
	return records, nil, err
}

// Run hides remote segments and moves the log start.
func (c StartDeleteCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := StartDelete(img, c.Topic, c.Index, c.Leader, c.Epoch, c.Segments, c.LogStart, env.Now)
	return records, nil, err
}

// Run forgets remote segments whose objects are gone.
func (c FinishDeleteCommand) Run(img *metadata.Image, _ Env) ([]metadata.Record, any, error) {
	records, err := FinishDelete(img, c.Topic, c.Index, c.Segments)
	return records, nil, err
}

// Run takes a partition out of the tier.
func (c DisableRemoteCommand) Run(img *metadata.Image, env Env) ([]metadata.Record, any, error) {
	records, err := DisableRemote(img, c.Topic, c.Index, c.Leader, c.Epoch, c.LogStart, env.Now)
	return records, nil, err
}

func (BootstrapCommand) reply() any        { return nil }
func (RegisterCommand) reply() any         { return &Registered{} }
func (HeartbeatCommand) reply() any        { return &HeartbeatReply{} }
func (TickCommand) reply() any             { return nil }
func (AlterPartitionsCommand) reply() any  { return &AlterPartitionsReply{} }
func (ElectLeadersCommand) reply() any     { return &ElectLeadersReply{} }
func (ReassignCommand) reply() any         { return &ReassignReply{} }
func (UnregisterCommand) reply() any       { return nil }
func (CreateTopicsCommand) reply() any     { return &[]CreatedTopic{} }
func (DeleteTopicsCommand) reply() any     { return &[]*Error{} }
func (CreatePartitionsCommand) reply() any { return &[]*Error{} }
func (AlterTopicCommand) reply() any       { return nil }
func (ReplaceTopicCommand) reply() any     { return nil }
func (AlterBrokerCommand) reply() any      { return nil }
func (ReplaceBrokerCommand) reply() any    { return nil }
func (AlterGroupCommand) reply() any       { return nil }
func (ReplaceGroupCommand) reply() any     { return nil }
func (AlterQuotasCommand) reply() any      { return &[]*Error{} }
func (ProducerIDsCommand) reply() any      { return new(int64) }
func (StartCopyCommand) reply() any        { return nil }
func (FinishCopyCommand) reply() any       { return nil }
func (StartDeleteCommand) reply() any      { return nil }
func (FinishDeleteCommand) reply() any     { return nil }
func (DisableRemoteCommand) reply() any    { return nil }
