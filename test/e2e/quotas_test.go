package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// TestClientQuotas: a quota survives a kill, holds for its client alone, and its client is told to wait.
func TestClientQuotas(t *testing.T) {
	n := newNode(t)
	n.start()
	n.createTopic("q", 1)
	app := "app"
	entity := kadm.ClientQuotaEntity{{Type: "client-id", Name: &app}}
	answers, err := n.admin().AlterClientQuotas(t.Context(), []kadm.AlterClientQuotaEntry{
		{Entity: entity, Ops: []kadm.AlterClientQuotaOp{{Key: "producer_byte_rate", Value: 1000}}},
		{Entity: kadm.ClientQuotaEntity{{Type: "ip", Name: &app}}, Ops: []kadm.AlterClientQuotaOp{{Key: "connection_creation_rate", Value: 5}}},
	})
	if err != nil || answers[0].Err != nil || answers[1].Err == nil {
		t.Fatal(err, answers)
	}
	n.kill()
	n.start()
	quotas, err := n.admin().DescribeClientQuotas(t.Context(), false, []kadm.DescribeClientQuotaComponent{{Type: "client-id", MatchType: kmsg.QuotasMatchTypeAny}})
	if err != nil || len(quotas) != 1 || quotas[0].Entity.String() != entity.String() || quotas[0].Values[0] != (kadm.ClientQuotaValue{Key: "producer_byte_rate", Value: 1000}) {
		t.Fatal(err, quotas)
	}
	if quotas, err := n.admin().DescribeClientQuotas(t.Context(), false, []kadm.DescribeClientQuotaComponent{{Type: "client-id", MatchType: kmsg.QuotasMatchTypeDefault}}); err != nil || len(quotas) != 0 {
		t.Fatal(err, quotas)
	}
	for client, throttled := range map[string]bool{"app": true, "other": false} {
		told := &throttle{}
		cl := n.manual(kgo.ClientID(client), kgo.WithHooks(told))
		// More than the quota's window of ten seconds holds, by a few milliseconds' worth.
		if err := cl.ProduceSync(context.Background(), &kgo.Record{Topic: "q", Value: make([]byte, 10_100)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if told.waits != throttled {
			t.Errorf("%s was told to wait: %v", client, told.waits)
		}
	}
}

// throttle notes that a client was throttled.
type throttle struct{ waits bool }

func (h *throttle) OnBrokerThrottle(kgo.BrokerMetadata, time.Duration, bool) { h.waits = true }
