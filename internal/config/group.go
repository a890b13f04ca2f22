package config

import (
	"fmt"
)

// Group is the table of what may be set for a single consumer group (GroupConfig of Kafka 4.4). Synonym names the broker key that gives the
// default.
var Group = newTable(
	Key{Name: "consumer.session.timeout.ms", Kind: Int, Default: "45000", Min: 1, Max: maxInt, Synonym: "group.consumer.session.timeout.ms", Doc: "Silence after which a member is put out. Between group.consumer.min.session.timeout.ms and group.consumer.max.session.timeout.ms."},
	Key{Name: "consumer.heartbeat.interval.ms", Kind: Int, Default: "5000", Min: 1, Max: maxInt, Synonym: "group.consumer.heartbeat.interval.ms", Doc: "How often members are told to send heartbeats. Between group.consumer.min.heartbeat.interval.ms and group.consumer.max.heartbeat.interval.ms."},
	Key{Name: "consumer.assignment.interval.ms", Kind: Int, Default: "1000", Min: 0, Max: maxInt, Synonym: "group.consumer.assignment.interval.ms", Doc: "Least time between two target assignments (KIP-1263). Between group.consumer.min.assignment.interval.ms and group.consumer.max.assignment.interval.ms."},
)

// groupBounds are what the broker allows for one of the keys, without its prefix.
func groupBounds(broker Values, name string) (low, high int64) {
	return broker.Int64("group.consumer.min." + name), broker.Int64("group.consumer.max." + name)
}

// GroupValues overlays a group's own configs on the broker's. What the broker does not allow any more counts as the nearest value that it does;
// if a session would not outlast a heartbeat then, the group's own values count for nothing.
func GroupValues(broker Values, own map[string]string) Values {
	set := map[string]string{}
	for _, k := range Group.Keys() {
		set[k.Name] = broker.Get(k.Synonym)
		if _, ok := own[k.Name]; ok {
			v := Values{Group, own}.Int64(k.Name)
			low, high := groupBounds(broker, k.Name[len("consumer."):])
			set[k.Name] = fmt.Sprint(min(max(v, low), high))
		}
	}
	v := Values{Group, set}
	if v.Int64("consumer.session.timeout.ms") <= v.Int64("consumer.heartbeat.interval.ms") && len(own) > 0 {
		return GroupValues(broker, nil)
	}
	return v
}

// CheckGroup applies the rules that span a group's keys and the broker's.
func CheckGroup(broker Values, own Values) error {
	for _, name := range own.Explicit() {
		low, high := groupBounds(broker, name[len("consumer."):])
		if n := own.Int64(name); n < low || n > high {
			return fmt.Errorf("%s must be in the range %d to %d inclusive.", name, low, high)
		}
	}
	get := func(name string) int64 {
		if own.IsSet(name) {
			return own.Int64(name)
		}
		return broker.Int64("group." + name)
	}
	if get("consumer.session.timeout.ms") <= get("consumer.heartbeat.interval.ms") {
		return fmt.Errorf("consumer.session.timeout.ms must be greater than consumer.heartbeat.interval.ms")
	}
	return nil
}
