package kafkaapi

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/metadata"
	"github.com/varve-io/varve/internal/quota"
	"github.com/varve-io/varve/internal/wire"
)

// charge is the account that a request is charged to.
type charge struct {
	accounts *quota.Accounts
	account  quota.Account
	rate     float64 // bytes per second
}

// quotaOf finds the quota that bounds a request, nil if none does. Other brokers have none.
func (a *API) quotaOf(key string, c *call) *charge {
	quotas := a.Image().ClientQuotas
	if len(quotas) == 0 || c.peer.Node != wire.NoNode {
		return nil
	}
	rate, account, ok := quota.Find(quotas, key, quota.Anonymous, c.header.ClientID)
	if !ok {
		return nil
	}
	return &charge{&a.accounts, account, rate}
}

// left returns the bytes that may be sent, and if that is none how long the connection is muted, in ms.
func (q *charge) left(peer *wire.Peer, now time.Time) (int64, int32) {
	bytes, wait := q.accounts.Left(q.account, q.rate, now)
	return bytes, mute(peer, now, wait)
}

// take charges bytes and returns how long the connection is muted, in ms. The client is told at once and may wait by itself; its next request
// is held until then (KIP-219).
func (q *charge) take(peer *wire.Peer, bytes int64, now time.Time) int32 {
	return mute(peer, now, q.accounts.Take(q.account, q.rate, bytes, now))
}

func mute(peer *wire.Peer, now time.Time, wait time.Duration) int32 {
	if wait <= 0 {
		return 0
	}
	peer.MuteUntil(now.Add(wait))
	return int32((wait + time.Millisecond - 1) / time.Millisecond)
}

// unmuted waits until a connection is not muted any more.
func (a *API) unmuted(ctx context.Context, peer *wire.Peer) {
	wait := time.Until(peer.MutedUntil())
	if wait <= 0 {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Types of a quota's entity. Kafka has "ip", too, whose only quota is none that is enforced here.
const (
	entityUser   = "user"
	entityClient = "client-id"
)

// alterClientQuotas serves AlterClientQuotas (KIP-546).
func (a *API) alterClientQuotas(ctx context.Context, _ *call, req *kmsg.AlterClientQuotasRequest) *kmsg.AlterClientQuotasResponse {
	resp := respond[*kmsg.AlterClientQuotasResponse](req)
	var changes []controller.QuotaChange
	var at []int
	for i, e := range req.Entries {
		out := kmsg.NewAlterClientQuotasResponseEntry()
		for _, part := range e.Entity {
			out.Entity = append(out.Entity, kmsg.AlterClientQuotasResponseEntryEntity{Type: part.Type, Name: part.Name})
		}
		entity, err := quotaEntity(e.Entity)
		if err == nil {
			change := controller.QuotaChange{Entity: entity, Values: map[string]*float64{}}
			for _, op := range e.Ops {
				if change.Values[op.Key] = nil; !op.Remove {
					change.Values[op.Key] = &op.Value
				}
			}
			changes, at = append(changes, change), append(at, i)
		}
		out.ErrorCode, out.ErrorMessage = code(err), message(err)
		resp.Entries = append(resp.Entries, out)
	}
	if len(changes) == 0 {
		return resp
	}
	ctx, cancel := within(ctx, patience)
	defer cancel()
	errs, err := control.Do[[]*controller.Error](ctx, a.Control, controller.AlterQuotasCommand{Changes: changes, ValidateOnly: req.ValidateOnly})
	for j, i := range at {
		why := err
		if why == nil {
			why = errs[j].OrNil()
		}
		resp.Entries[i].ErrorCode, resp.Entries[i].ErrorMessage = code(why), message(why)
	}
	return resp
}

func quotaEntity(parts []kmsg.AlterClientQuotasRequestEntryEntity) (e metadata.QuotaEntity, err error) {
	for _, p := range parts {
		name := metadata.QuotaName{Default: true}
		if p.Name != nil {
			name = metadata.QuotaName{Named: true, Name: *p.Name}
		}
		place := &e.User
		switch p.Type {
		case entityUser:
		case entityClient:
			place = &e.ClientID
		default:
			return e, fmt.Errorf("%w: no quotas of entity type %q are enforced here, only of %s and %s", errInvalidRequest, p.Type, entityUser, entityClient)
		}
		if *place != (metadata.QuotaName{}) || p.Name != nil && *p.Name == "" {
			return e, fmt.Errorf("%w: entity type %s is given twice or its name is empty", errInvalidRequest, p.Type)
		}
		*place = name
	}
	return e, nil
}

// describeClientQuotas serves DescribeClientQuotas (KIP-546).
func (a *API) describeClientQuotas(_ context.Context, _ *call, req *kmsg.DescribeClientQuotasRequest) *kmsg.DescribeClientQuotasResponse {
	resp := respond[*kmsg.DescribeClientQuotasResponse](req)
	want := map[string]func(metadata.QuotaName) bool{}
	for _, c := range req.Components {
		err := error(nil)
		switch {
		case c.EntityType != entityUser && c.EntityType != entityClient && c.EntityType != "ip":
			err = fmt.Errorf("%w: no entity type %q", errInvalidRequest, c.EntityType)
		case want[c.EntityType] != nil:
			err = fmt.Errorf("%w: entity type %s is given twice", errInvalidRequest, c.EntityType)
		case c.MatchType == kmsg.QuotasMatchTypeExact && c.Match == nil, c.MatchType < kmsg.QuotasMatchTypeExact, c.MatchType > kmsg.QuotasMatchTypeAny:
			err = fmt.Errorf("%w: match type %d", errInvalidRequest, c.MatchType)
		}
		if err != nil {
			resp.ErrorCode, resp.ErrorMessage = code(err), message(err)
			return resp
		}
		want[c.EntityType] = func(n metadata.QuotaName) bool {
			switch c.MatchType {
			case kmsg.QuotasMatchTypeExact:
				return n.Named && n.Name == *c.Match
			case kmsg.QuotasMatchTypeDefault:
				return n.Default
			}
			return n.Named || n.Default
		}
	}
	img := a.Image()
	resp.Entries = []kmsg.DescribeClientQuotasResponseEntry{} // null would be an error
	for _, e := range img.QuotaEntities() {
		out := kmsg.NewDescribeClientQuotasResponseEntry()
		fits := want["ip"] == nil
		for _, part := range []struct {
			kind string
			name metadata.QuotaName
		}{{entityClient, e.ClientID}, {entityUser, e.User}} {
			given := part.name != metadata.QuotaName{}
			switch matches := want[part.kind]; {
			case matches != nil:
				fits = fits && matches(part.name)
			case given && req.Strict:
				fits = false
			}
			if given {
				entity := kmsg.DescribeClientQuotasResponseEntryEntity{Type: part.kind}
				if part.name.Named {
					entity.Name = &part.name.Name
				}
				out.Entity = append(out.Entity, entity)
			}
		}
		if !fits {
			continue
		}
		for _, key := range slices.Sorted(maps.Keys(img.ClientQuotas[e])) {
			out.Values = append(out.Values, kmsg.DescribeClientQuotasResponseEntryValue{Key: key, Value: img.ClientQuotas[e][key]})
		}
		resp.Entries = append(resp.Entries, out)
	}
	return resp
}
