package controller

import (
	"maps"
	"testing"
)

func TestGroupConfigs(t *testing.T) {
	w := newCluster(t, "")
	session, beat := "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
	is := func(want map[string]string) {
		t.Helper()
		for range 2 {
			if got := w.img.GroupConfigs["g"]; !maps.Equal(got, want) {
				t.Fatalf("%v, want %v", got, want)
			}
			w.restart()
		}
	}
	w.run(AlterGroupCommand{Group: "g", Changes: []Change{{session, Set, ptr("50000")}, {beat, Set, ptr("6000")}}})
	is(map[string]string{session: "50000", beat: "6000"})
	w.run(AlterGroupCommand{Group: "g", Changes: []Change{{session, Delete, nil}}, ValidateOnly: true})
	w.run(ReplaceGroupCommand{Group: "g", Configs: map[string]string{}, ValidateOnly: true})
	is(map[string]string{session: "50000", beat: "6000"})
	w.refused(AlterGroupCommand{Group: "g", Changes: []Change{{session, Set, ptr("5")}}}, ErrInvalidConfig, "must be in the range 45000 to 60000 inclusive")
	w.refused(AlterGroupCommand{Group: "g", Changes: []Change{{"session.timeout.ms", Set, ptr("5")}}}, ErrInvalidConfig, "Unknown configuration key")
	w.refused(AlterGroupCommand{Group: "", Changes: []Change{{session, Set, ptr("50000")}}}, ErrInvalidRequest, "Default group resources are not allowed.")
	w.run(ReplaceGroupCommand{Group: "g", Configs: map[string]string{session: " 60000 "}})
	is(map[string]string{session: "60000"})
	w.run(AlterGroupCommand{Group: "g", Changes: []Change{{session, Delete, nil}}})
	is(nil)
}
