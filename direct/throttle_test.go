package direct_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/direct"
)

// A broker answers a client that is over its quota without any partition, and so the client hears how long to wait: its connection
// stays, and what was read ahead waits too.
func TestThrottledAnswersPass(t *testing.T) {
	for _, stock := range []bool{false, true} {
		t.Run(fmt.Sprint("stock ", stock), func(t *testing.T) {
			r := newRig(t, direct.Config{}, one(30, 10))
			if stock {
				r, _ = stockRig(t, direct.Config{}, nil, one(30, 10))
			}
			var over atomic.Bool
			r.broker.spoil = func(resp *kmsg.FetchResponse) {
				if over.Load() {
					resp.Topics, resp.ThrottleMillis = nil, 700
				}
			}
			for _, at := range []int64{0, r.broker.parts[0].end()} {
				over.Store(true)
				o := patient
				o.waitMs = 10
				if resp := r.client.fetch(o, []position{{0, at}}); resp.ThrottleMillis != 700 || len(resp.Topics) != 0 {
					t.Errorf("at %d: %+v", at, resp)
				}
				over.Store(false)
				check(r, r.broker.parts, []int64{at}, o, r.client.fetch(o, []position{{0, at}}))
			}
		})
	}
}
