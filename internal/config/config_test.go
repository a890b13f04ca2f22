package config

import (
	"maps"
	"strings"
	"testing"
)

func TestDefaultsAreValid(t *testing.T) {
	for _, table := range []*Table{Topic, Broker} {
		for _, k := range table.Keys() {
			if k.Default == "" || k.Name == "advertised.listeners" {
				continue
			}
			if v, err := k.Normalize(k.Default); err != nil || v != k.Default {
				t.Errorf("%s: default %q normalizes to %q, %v", k.Name, k.Default, v, err)
			}
			if k.Doc == "" {
				t.Errorf("%s has no doc", k.Name)
			}
		}
	}
}

func TestAllProblemsAtOnce(t *testing.T) {
	_, err := Broker.NewValues(map[string]string{"default.replecation.factor": "3", "num.partitions": "10GB", "log.retention.ms": "-5", "node.id": " 7 "})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"default.replecation.factor: did you mean default.replication.factor?", "num.partitions: Not a number of type INT", "log.retention.ms: Value must be at least -1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "node.id") {
		t.Errorf("blanks around a value are an error: %v", err)
	}
}

func TestBadValues(t *testing.T) {
	for _, c := range []struct{ table, key, value string }{
		{"t", "cleanup.policy", "compact,banana"}, {"t", "cleanup.policy", "delete,delete"}, {"t", "retention.ms", "1e9"}, {"t", "retention.ms", "10GB"},
		{"t", "remote.storage.enable", "yes"}, {"t", "segment.bytes", "1024"}, {"t", "compression.gzip.level", "0"}, {"t", "preallocate", "true"},
		{"t", "min.cleanable.dirty.ratio", "NaN"}, {"b", "advertised.listeners", "PLAINTEXT://0.0.0.0:9092"}, {"b", "listeners", "banana"}, {"b", "listeners", ""},
		{"b", "listeners", "SSL://localhost:9093"}, {"b", "node.id", "-1"}, {"b", "varve.log.format", "xml"},
	} {
		table := map[string]*Table{"t": Topic, "b": Broker}[c.table]
		k, ok := table.Lookup(c.key)
		if !ok {
			t.Fatalf("no key %s", c.key)
		}
		if v, err := k.Normalize(c.value); err == nil {
			t.Errorf("%s=%q accepted as %q", c.key, c.value, v)
		} else if !strings.Contains(err.Error(), c.key) {
			t.Errorf("%s: the message does not name the key: %v", c.key, err)
		}
	}
}

func TestTopicRules(t *testing.T) {
	own := func(kv ...string) Values {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		broker, err := Broker.NewValues(nil)
		if err != nil {
			t.Fatal(err)
		}
		return TopicValues(TopicDefaults(broker), m)
	}
	tiered := own("remote.storage.enable", "true")
	for name, c := range map[string]struct {
		v    Values
		was  *Values
		tier bool
		ok   bool
	}{
		"plain":                 {own(), nil, false, true},
		"tiered":                {tiered, nil, true, true},
		"no tier":               {tiered, nil, false, false},
		"compact":               {own("remote.storage.enable", "true", "cleanup.policy", "compact,delete"), nil, true, false},
		"no policy":             {own("remote.storage.enable", "true", "cleanup.policy", ""), nil, true, true},
		"local above total":     {own("remote.storage.enable", "true", "retention.ms", "10", "local.retention.ms", "11"), nil, true, false},
		"local unlimited":       {own("remote.storage.enable", "true", "retention.ms", "10", "local.retention.ms", "-1"), nil, true, false},
		"untiered local":        {own("retention.ms", "10", "local.retention.ms", "11"), nil, true, true},
		"frozen, equal":         {own("remote.storage.enable", "true", "remote.log.copy.disable", "true", "retention.ms", "10", "local.retention.ms", "10"), nil, true, true},
		"frozen, unlike":        {own("remote.storage.enable", "true", "remote.log.copy.disable", "true", "retention.ms", "10", "local.retention.ms", "5"), nil, true, false},
		"lag above local":       {own("remote.storage.enable", "true", "local.retention.ms", "10", "remote.copy.lag.ms", "11"), nil, true, false},
		"disable":               {own(), &tiered, true, false},
		"disable with deletion": {own("remote.log.delete.on.disable", "true"), &tiered, true, true},
	} {
		if err := CheckTopic(c.v, c.was, c.tier); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRetentionFamilies(t *testing.T) {
	for _, c := range []struct {
		raw  map[string]string
		want string
	}{
		{nil, "604800000"},
		{map[string]string{"log.retention.hours": "2"}, "7200000"},
		{map[string]string{"log.retention.hours": "2", "log.retention.minutes": "1"}, "60000"},
		{map[string]string{"log.retention.minutes": "1", "log.retention.ms": "5"}, "5"},
		{map[string]string{"log.retention.hours": "-1"}, "-1"},
	} {
		v, err := Broker.NewValues(c.raw)
		if err != nil {
			t.Fatal(err)
		}
		if got := TopicDefaults(v)["retention.ms"]; got != c.want {
			t.Errorf("%v: retention.ms %s, want %s", c.raw, got, c.want)
		}
	}
}

func TestReadProperties(t *testing.T) {
	raw, err := ReadProperties(strings.NewReader("# note\n\nnode.id=3\n listeners = PLAINTEXT://a:1,\\\n   PLAINTEXT://b:2\nlog.dir: /x\n"))
	if err != nil || raw["node.id"] != "3" || raw["listeners"] != "PLAINTEXT://a:1,PLAINTEXT://b:2" || raw["log.dir"] != "/x" {
		t.Fatal(raw, err)
	}
	raw, err = ReadProperties(strings.NewReader("# no continuation \\\na\t1\nb  =  x=y \r\nc = C:\\\\\nd:\ne 1\\\n\\\n  2\\"))
	if want := map[string]string{"a": "1", "b": "x=y", "c": `C:\`, "d": "", "e": "12"}; err != nil || !maps.Equal(raw, want) {
		t.Fatal(raw, err)
	}
	if _, err := ReadProperties(strings.NewReader("a=1\nb\na=2\n")); err == nil || !strings.Contains(err.Error(), "line 2") || !strings.Contains(err.Error(), "a is set twice") {
		t.Fatal(err)
	}
}
