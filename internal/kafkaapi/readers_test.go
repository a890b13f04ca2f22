package kafkaapi

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/varve-io/varve/internal/directfetch"
)

func TestReadersAreSummedUpAndBounded(t *testing.T) {
	r := newReaders()
	r.add("idle", "h", bucketRead{}, time.UnixMilli(1))
	r.add("a", "h", bucketRead{locations: 1, granted: 100}, time.UnixMilli(2))
	r.add("a", "h", bucketRead{use: directfetch.Use{Requests: 2, Bytes: 50}}, time.UnixMilli(3))
	r.add("a", "other", bucketRead{locations: 1, granted: 7}, time.UnixMilli(4))
	list := r.list()
	if len(list) != 2 || list[0].Granted != 100 || list[0].Used != 50 || list[0].Requests != 2 || list[0].Locations != 1 || list[0].Last != 3 || list[1].Host != "other" {
		t.Fatalf("%+v", list)
	}
	for i := range maxReaders {
		r.add(fmt.Sprintf("\xff%d", i), "h", bucketRead{locations: 1}, time.UnixMilli(int64(10+i)))
	}
	list = r.list()
	if len(list) != maxReaders {
		t.Fatalf("%d readers", len(list))
	}
	for _, e := range list {
		if e.Client == "a" {
			t.Error("the oldest is still there")
		}
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(r)
	if _, err := reg.Gather(); err != nil { // the labels must be valid
		t.Error(err)
	}
}
