package config

import (
	"maps"
	"testing"
)

func TestGroupConfigs(t *testing.T) {
	broker := func(raw map[string]string) Values {
		v, err := Broker.NewValues(raw)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	plain := broker(nil)
	get := func(v Values) [3]int64 {
		return [3]int64{v.Int64("consumer.session.timeout.ms"), v.Int64("consumer.heartbeat.interval.ms"), v.Int64("consumer.assignment.interval.ms")}
	}
	narrow := broker(map[string]string{"group.consumer.max.session.timeout.ms": "50000", "group.consumer.min.heartbeat.interval.ms": "4000", "group.consumer.heartbeat.interval.ms": "4500"})
	upsideDown := broker(map[string]string{"group.consumer.min.session.timeout.ms": "1000", "group.consumer.max.heartbeat.interval.ms": "50000"})
	for _, c := range []struct {
		broker Values
		own    map[string]string
		want   [3]int64
	}{
		{plain, nil, [3]int64{45_000, 5000, 1000}},
		{plain, map[string]string{"consumer.session.timeout.ms": "50000", "consumer.assignment.interval.ms": "0"}, [3]int64{50_000, 5000, 0}},
		// What was set under other bounds is what is nearest now; what makes no sense any more counts for nothing.
		{narrow, map[string]string{"consumer.session.timeout.ms": "60000", "consumer.heartbeat.interval.ms": "1"}, [3]int64{50_000, 4000, 1000}},
		{upsideDown, map[string]string{"consumer.session.timeout.ms": "2000", "consumer.heartbeat.interval.ms": "6000"}, [3]int64{45_000, 5000, 1000}},
	} {
		own := maps.Clone(c.own)
		if got := get(GroupValues(c.broker, own)); got != c.want {
			t.Errorf("%v: %v, want %v", c.own, got, c.want)
		}
	}
	for _, c := range []struct {
		own  map[string]string
		want string
	}{
		{nil, ""},
		{map[string]string{"consumer.session.timeout.ms": "45000"}, ""},
		{map[string]string{"consumer.session.timeout.ms": "44999"}, "consumer.session.timeout.ms must be in the range 45000 to 60000 inclusive."},
		{map[string]string{"consumer.heartbeat.interval.ms": "15001"}, "consumer.heartbeat.interval.ms must be in the range 5000 to 15000 inclusive."},
		{map[string]string{"consumer.assignment.interval.ms": "15001"}, "consumer.assignment.interval.ms must be in the range 0 to 15000 inclusive."},
	} {
		v, err := Group.NewValues(c.own)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if err := CheckGroup(plain, v); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%v: %q, want %q", c.own, got, c.want)
		}
	}
	v, _ := Group.NewValues(map[string]string{"consumer.session.timeout.ms": "2000", "consumer.heartbeat.interval.ms": "6000"})
	if err := CheckGroup(upsideDown, v); err == nil {
		t.Error("a session that does not outlast a heartbeat")
	}
}
