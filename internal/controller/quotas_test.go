package controller

import (
	"errors"
	"maps"
	"math"
	"testing"

	"github.com/varve-io/varve/internal/metadata"
)

func TestAlterQuotas(t *testing.T) {
	img := metadata.Empty()
	alter := func(changes ...QuotaChange) []*Error {
		t.Helper()
		errs, records := AlterQuotas(img, changes)
		next, err := img.Apply(records)
		if err != nil {
			t.Fatal(err)
		}
		img = next
		again, err := metadata.Empty().Apply(img.Records())
		if err != nil || !maps.EqualFunc(again.ClientQuotas, img.ClientQuotas, maps.Equal[map[string]float64, map[string]float64]) {
			t.Fatalf("a snapshot has %v instead of %v, %v", again.ClientQuotas, img.ClientQuotas, err)
		}
		return errs
	}
	rate := func(v float64) *float64 { return &v }
	app := metadata.QuotaEntity{ClientID: metadata.QuotaName{Named: true, Name: "app"}}
	all := metadata.QuotaEntity{User: metadata.QuotaName{Default: true}}
	errs := alter(QuotaChange{app, map[string]*float64{"producer_byte_rate": rate(1000)}}, QuotaChange{all, map[string]*float64{"consumer_byte_rate": rate(5)}},
		QuotaChange{app, map[string]*float64{"consumer_byte_rate": rate(2000)}}, QuotaChange{metadata.QuotaEntity{}, nil})
	if errs[0] != nil || errs[1] != nil || errs[2] != nil || !errors.Is(errs[3], ErrInvalidRequest) {
		t.Fatal(errs)
	}
	if q := img.ClientQuotas[app]; q["producer_byte_rate"] != 1000 || q["consumer_byte_rate"] != 2000 || img.ClientQuotas[all]["consumer_byte_rate"] != 5 {
		t.Fatal(img.ClientQuotas)
	}
	for _, values := range []map[string]*float64{{"request_percentage": rate(5)}, {"producer_byte_rate": rate(0)}, {"producer_byte_rate": rate(-1)}, {"producer_byte_rate": rate(math.NaN())},
		{"producer_byte_rate": rate(math.Inf(1))}, {"consumer_byte_rate": rate(1), "nonsense": nil}} {
		if errs := alter(QuotaChange{app, values}); !errors.Is(errs[0], ErrInvalidRequest) {
			t.Errorf("%v: %v", values, errs[0])
		}
	}
	alter(QuotaChange{app, map[string]*float64{"producer_byte_rate": nil, "consumer_byte_rate": nil}}, QuotaChange{all, map[string]*float64{"producer_byte_rate": nil}})
	if _, there := img.ClientQuotas[app]; there || len(img.ClientQuotas) != 1 {
		t.Fatal(img.ClientQuotas)
	}
	if _, records := AlterQuotas(img, []QuotaChange{{all, map[string]*float64{"consumer_byte_rate": rate(5)}}}); len(records) != 0 {
		t.Fatal("a change to what is there already is written:", records)
	}
}
