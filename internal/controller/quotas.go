package controller

import (
	"maps"

	"github.com/varve-io/varve/internal/metadata"
)

// QuotaChange changes quotas of one entity. A nil value removes a quota.
type QuotaChange struct {
	Entity metadata.QuotaEntity
	Values map[string]*float64
}

// AlterQuotas changes client quotas; the errors are by position (AlterClientQuotas, KIP-546). Kafka's other keys are refused, since nothing here
// goes by them.
func AlterQuotas(img *metadata.Image, changes []QuotaChange) ([]*Error, []metadata.Record) {
	errs := make([]*Error, len(changes))
	next := maps.Clone(img.ClientQuotas)
	var order []metadata.QuotaEntity
	for i, c := range changes {
		if errs[i] = checkQuotas(c); errs[i] != nil {
			continue
		}
		quotas := maps.Clone(next[c.Entity])
		if quotas == nil {
			quotas = map[string]float64{}
		}
		for key, v := range c.Values {
			if v == nil {
				delete(quotas, key)
			} else {
				quotas[key] = *v
			}
		}
		next[c.Entity] = quotas
		order = append(order, c.Entity)
	}
	var records []metadata.Record
	done := map[metadata.QuotaEntity]bool{}
	for _, e := range order {
		if !done[e] && !maps.Equal(next[e], img.ClientQuotas[e]) {
			records = append(records, metadata.ClientQuotaRecord{Entity: e, Quotas: next[e]})
		}
		done[e] = true
	}
	return errs, records
}

func checkQuotas(c QuotaChange) *Error {
	none := metadata.QuotaName{}
	if c.Entity.User == none && c.Entity.ClientID == none {
		return refuse(ErrInvalidRequest, "Invalid empty client quota entity")
	}
	for key, v := range c.Values {
		switch {
		case key != metadata.ProducerByteRate && key != metadata.ConsumerByteRate:
			return refuse(ErrInvalidRequest, "Quota %q is not enforced here, only %s and %s are", key, metadata.ProducerByteRate, metadata.ConsumerByteRate)
		case v != nil && !(*v >= 1 && *v <= 1<<53):
			return refuse(ErrInvalidRequest, "Quota %s of %v: want bytes per second, 1 or more", key, *v)
		}
	}
	return nil
}
