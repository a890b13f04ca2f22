package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/testport"
)

// TestOfflinePartitionIsDeletedWithItsTopic: the folder of a log that could not be opened goes with its topic, too.
func TestOfflinePartitionIsDeletedWithItsTopic(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("bad", 1, "segment.bytes=30000000")
	produce(t, n.manual(), "bad", 0, 1000)
	n.stop()
	os.Remove(filepath.Join(n.dir, ".kafka_cleanshutdown")) // as after a crash: the log is scanned
	first := filepath.Join(n.dir, "bad-0", "00000000000000000000.log")
	b, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	os.WriteFile(first, b, 0o644)
	n.start()
	if !strings.Contains(n.log(), "partition is offline") {
		t.Fatal("the partition is not offline")
	}
	if out, code := n.varve("topic", "delete", "bad", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	n.createTopic("bad", 1)
	produce(t, n.manual(), "bad", 0, 10)
	readAll(t, n, "bad", 10)
}

// TestManyMembers: 500 members of one group, with metadata that makes the group's record large.
func TestManyMembers(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("wide", 10)
	const members = 500
	cl := n.client()
	joined := make([]*kmsg.JoinGroupResponse, members)
	// All ids first: v4+ members get theirs and come again.
	var wg sync.WaitGroup
	var mu sync.Mutex
	failed := ""
	for i := range members {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := kgo.NewClient(kgo.SeedBrokers(n.address()))
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			req := kmsg.NewPtrJoinGroupRequest()
			req.Group, req.SessionTimeoutMillis, req.RebalanceTimeoutMillis, req.ProtocolType = "wide", 30000, 3000, "consumer"
			inst := fmt.Sprint("static-", i)
			req.InstanceID = &inst
			p := kmsg.NewJoinGroupRequestProtocol()
			p.Name, p.Metadata = "range", make([]byte, 500)
			req.Protocols = append(req.Protocols, p)
			for try := 0; try < 5; try++ {
				resp, err := req.RequestWith(context.Background(), c)
				if err != nil {
					t.Error(err)
					return
				}
				req.MemberID = resp.MemberID
				if resp.ErrorCode == 27 {
					continue
				}
				joined[i] = resp
				break
			}
			// sync at once with that generation, again if it rebalances
			for try := 0; try < 20; try++ {
				s := kmsg.NewPtrSyncGroupRequest()
				s.Group, s.Generation, s.MemberID, s.InstanceID = "wide", joined[i].Generation, joined[i].MemberID, &inst
				if joined[i].LeaderID == joined[i].MemberID {
					for _, m := range joined[i].Members {
						a := kmsg.NewSyncGroupRequestGroupAssignment()
						a.MemberID, a.MemberAssignment = m.MemberID, make([]byte, 300)
						s.GroupAssignment = append(s.GroupAssignment, a)
					}
				}
				resp, err := s.RequestWith(context.Background(), c)
				if err != nil {
					t.Error(err)
					return
				}
				if resp.ErrorCode == 0 {
					return
				}
				mu.Lock()
				failed = fmt.Sprint("sync ", resp.ErrorCode)
				mu.Unlock()
				req.MemberID = joined[i].MemberID
				r, err := req.RequestWith(context.Background(), c)
				if err != nil {
					t.Error(err)
					return
				}
				joined[i] = r
			}
		}()
	}
	wg.Wait()
	d, err := kadm.NewClient(cl).DescribeGroups(context.Background(), "wide")
	if err != nil || d["wide"].State != "Stable" || len(d["wide"].Members) != members {
		t.Fatal(err, d["wide"].State, len(d["wide"].Members), failed)
	}
	n.kill()
	n.start()
	d, err = n.admin().DescribeGroups(context.Background(), "wide")
	if err != nil || d["wide"].State != "Stable" || len(d["wide"].Members) != members {
		t.Fatal(err, d["wide"].State, len(d["wide"].Members))
	}
	// A static member goes on in its generation. Those that synced before the last ones joined need not be in the newest.
	newest := 0
	for i, r := range joined {
		if r.Generation > joined[newest].Generation {
			newest = i
		}
	}
	hb := kmsg.NewPtrHeartbeatRequest()
	hb.Group, hb.Generation, hb.MemberID, hb.InstanceID = "wide", joined[newest].Generation, joined[newest].MemberID, kmsg.StringPtr(fmt.Sprint("static-", newest))
	resp, err := hb.RequestWith(context.Background(), n.client())
	if err != nil || resp.ErrorCode != 0 {
		t.Fatal(err, resp.ErrorCode)
	}
}

// TestSourcesOfConfigs: DescribeConfigs names every place that a value has, the one that counts first, also after a kill.
func TestSourcesOfConfigs(t *testing.T) {
	n := newNode(t, "log.retention.ms=3600000", "varve.bucket.secret.key=hush")
	n.start()
	n.createTopic("cfg", 1, "retention.bytes=7")
	adm := n.admin()
	set := func(k, v string, brokers ...int32) {
		t.Helper()
		r, err := adm.AlterBrokerConfigs(context.Background(), []kadm.AlterConfig{{Op: kadm.SetConfig, Name: k, Value: &v}}, brokers...)
		if err != nil || r[0].Err != nil {
			t.Fatal(err, r)
		}
	}
	set("log.segment.bytes", "2000000")
	set("message.max.bytes", "3000000", 1)
	set("message.max.bytes", "2000000")
	show := func() map[string]string {
		out := map[string]string{}
		r, err := adm.DescribeTopicConfigs(context.Background(), "cfg")
		if err != nil {
			t.Fatal(err)
		}
		b, err := adm.DescribeBrokerConfigs(context.Background(), 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, rc := range []kadm.ResourceConfig{r[0], b[0]} {
			for _, c := range rc.Configs {
				text := fmt.Sprint(c.MaybeValue(), " ", int(c.Source))
				for _, s := range c.Synonyms {
					v := "-"
					if s.Value != nil {
						v = *s.Value
					}
					text += fmt.Sprint(", ", s.Key, " ", v, " ", int(s.Source))
				}
				out[c.Key] = text
			}
		}
		return out
	}
	check := func() {
		t.Helper()
		got := show()
		for key, want := range map[string]string{
			"retention.bytes":         "7 1, retention.bytes 7 1, log.retention.bytes -1 5",
			"retention.ms":            "3600000 4, log.retention.ms 3600000 4, log.retention.ms 604800000 5",
			"segment.bytes":           "2000000 3, log.segment.bytes 2000000 3, log.segment.bytes 1073741824 5",
			"max.message.bytes":       "3000000 2, message.max.bytes 3000000 2, message.max.bytes 2000000 3, message.max.bytes 1048588 5",
			"message.max.bytes":       "3000000 2, message.max.bytes 3000000 2, message.max.bytes 2000000 3, message.max.bytes 1048588 5",
			"varve.bucket.secret.key": " 4, varve.bucket.secret.key - 4, varve.bucket.secret.key - 5",
		} {
			if got[key] != want {
				t.Errorf("%s: got  %s\nwant %s", key, got[key], want)
			}
		}
	}
	check()
	n.kill()
	n.start()
	check()
}

// TestOrdinaryDaysAreQuiet: starts, stops, clients that vanish and topics that are deleted under a consumer are no errors.
func TestOrdinaryDaysAreQuiet(t *testing.T) {
	port := testport.Free(t)
	n := newNode(t, "varve.http.listener=127.0.0.1:"+fmt.Sprint(port))
	n.start()
	get := func(path string) string {
		r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", port, path))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return fmt.Sprint(r.StatusCode, " ", string(b))
	}
	if ready := get("/ready"); ready != "200 ready\n" {
		t.Errorf("%q", ready)
	}
	n.createTopic("q", 1, tieredConfig...)
	produce(t, n.manual(), "q", 0, 3000)
	n.tiered("q")
	for i := range 20 {
		c := n.client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics("q"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(20*i)*time.Millisecond)
		c.PollFetches(ctx)
		cancel()
		c.CloseAllowingRebalance()
	}
	c := n.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"q": {0: kgo.NewOffset().AtStart()}}))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c.PollRecords(ctx, 10)
	if out, code := n.varve("topic", "delete", "q", "-b", n.address()); code != 0 {
		t.Fatal(out)
	}
	n.until("gone", func() bool { return n.objects("q") == 0 })
	n.until("no series of the topic is left", func() bool { return !strings.Contains(get("/metrics"), `topic="q"`) })
	n.stop()
	if strings.Contains(n.log(), "level=ERROR") || strings.Contains(n.log(), "level=WARN") {
		t.Error(n.log())
	}
}
