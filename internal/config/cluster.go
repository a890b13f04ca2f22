package config

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Voter is one element of controller.quorum.voters.
type Voter struct {
	ID      int32
	Address string // HOST:PORT; names are resolved at each use
}

func (v Voter) String() string { return fmt.Sprintf("%d@%s", v.ID, v.Address) }

// ParseVoters reads a comma list of ID@HOST:PORT and returns it by id.
func ParseVoters(list string) ([]Voter, error) {
	var out []Voter
	for _, item := range SplitList(list) {
		id, address, ok := strings.Cut(item, "@")
		n, err := strconv.ParseInt(id, 10, 32)
		if !ok || err != nil || n < 0 {
			return nil, fmt.Errorf("want ID@HOST:PORT, got %q", item)
		}
		if err := checkAddress(address); err != nil {
			return nil, err
		}
		for _, v := range out {
			if v.ID == int32(n) || v.Address == address {
				return nil, fmt.Errorf("%q repeats an id or an address", item)
			}
		}
		out = append(out, Voter{int32(n), address})
	}
	slices.SortFunc(out, func(a, b Voter) int { return int(a.ID) - int(b.ID) })
	return out, nil
}

func checkVoters(v string) error {
	_, err := ParseVoters(v)
	return err
}

func checkAddress(address string) error {
	host, port, err := net.SplitHostPort(address)
	n, err2 := strconv.Atoi(port)
	if err != nil || err2 != nil || host == "" || n < 1 || n > 65535 {
		return fmt.Errorf("want HOST:PORT, got %q", address)
	}
	return nil
}

func checkProtocolMap(v string) error {
	for _, item := range SplitList(v) {
		if _, protocol, ok := strings.Cut(item, ":"); !ok || !strings.EqualFold(protocol, "PLAINTEXT") {
			return fmt.Errorf("want NAME:PLAINTEXT, got %q", item)
		}
	}
	return nil
}

var throttled = regexp.MustCompile(`^(\*|\d+:\d+)$`)

func checkThrottled(v string) error {
	for _, item := range SplitList(v) {
		if !throttled.MatchString(item) {
			return fmt.Errorf("want PARTITION:BROKER or *, got %q", item)
		}
	}
	return nil
}

// PeerListener is the name of the listener on which nodes reach each other.
func PeerListener(v Values) string {
	if name := strings.ToUpper(v.Get("inter.broker.listener.name")); name != "" {
		return name
	}
	if l, err := ParseListeners(v.Get("listeners")); err == nil && len(l) > 0 {
		return l[0].Name
	}
	return ""
}

// CheckBroker applies the rules that span a server's keys. All problems are reported.
func CheckBroker(v Values) error {
	var problems []error
	listeners, _ := ParseListeners(v.Get("listeners"))
	names := map[string]bool{}
	mapped := map[string]bool{"PLAINTEXT": true}
	for _, item := range v.List("listener.security.protocol.map") {
		name, _, _ := strings.Cut(item, ":")
		mapped[strings.ToUpper(name)] = true
	}
	for _, l := range listeners {
		if names[l.Name] {
			problems = append(problems, fmt.Errorf("listeners: the name %s is used twice", l.Name))
		}
		if names[l.Name] = true; !mapped[l.Name] {
			problems = append(problems, fmt.Errorf("listeners: %s is not in listener.security.protocol.map: add %s:PLAINTEXT", l.Name, l.Name))
		}
	}
	advertised, _ := ParseListeners(v.Get("advertised.listeners"))
	for _, l := range advertised {
		if !names[l.Name] {
			problems = append(problems, fmt.Errorf("advertised.listeners: there is no listener %s", l.Name))
		}
	}
	if name := PeerListener(v); !names[name] {
		problems = append(problems, fmt.Errorf("inter.broker.listener.name: there is no listener %s", name))
	}
	if session, beat := v.Int64("broker.session.timeout.ms"), v.Int64("broker.heartbeat.interval.ms"); beat >= session {
		problems = append(problems, fmt.Errorf("broker.heartbeat.interval.ms (%d) must be below broker.session.timeout.ms (%d)", beat, session))
	}
	for _, name := range []string{"session.timeout.ms", "heartbeat.interval.ms", "assignment.interval.ms"} {
		n := v.Int64("group.consumer." + name)
		if low, high := groupBounds(v, name); n < low || n > high {
			problems = append(problems, fmt.Errorf("group.consumer.%[1]s (%[2]d) must be between group.consumer.min.%[1]s (%[3]d) and group.consumer.max.%[1]s (%[4]d)", name, n, low, high))
		}
	}
	if session, beat := v.Int64("group.consumer.session.timeout.ms"), v.Int64("group.consumer.heartbeat.interval.ms"); beat >= session {
		problems = append(problems, fmt.Errorf("group.consumer.heartbeat.interval.ms (%d) must be below group.consumer.session.timeout.ms (%d)", beat, session))
	}
	return errors.Join(problems...)
}

func checkNotEmpty(v string) error {
	if len(SplitList(v)) == 0 {
		return errors.New("at least one element is needed")
	}
	return nil
}

func checkAddresses(v string) error {
	for _, item := range SplitList(v) {
		if err := checkAddress(item); err != nil {
			return err
		}
	}
	return nil
}
