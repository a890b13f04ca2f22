package broker

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/varve-io/varve/internal/control"
	"github.com/varve-io/varve/internal/controller"
	"github.com/varve-io/varve/internal/partition"
)

// proposeISRs tells the controller of ISRs that are not what they should be, one request at a time with all that is due.
func (b *broker) proposeISRs(ctx context.Context) error {
	lag := func() time.Duration {
		return b.config().Millis("replica.lag.time.max.ms")
	}
	timer := time.NewTimer(lag() / 2)
	defer timer.Stop()
	for {
		var due []*partition.Partition
		select {
		case <-ctx.Done():
			return nil
		case <-b.isrs.again:
			due = b.isrs.take()
		case <-timer.C:
			due = b.replicas.all() // who has fallen behind says nothing
			timer.Reset(max(lag()/2, time.Millisecond))
		}
		b.proposeAll(ctx, due, lag())
	}
}

func (b *broker) proposeAll(ctx context.Context, due []*partition.Partition, lag time.Duration) {
	cmd := controller.AlterPartitionsCommand{Broker: b.self, Epoch: b.epoch.Load()}
	var parts []*partition.Partition
	var proposals []partition.Proposal
	now := time.Now()
	for _, p := range due {
		o, ok := p.Propose(now, lag)
		if !ok {
			continue
		}
		parts, proposals = append(parts, p), append(proposals, o)
		cmd.Partitions = append(cmd.Partitions, controller.ISRChange{PartitionRef: controller.PartitionRef{Topic: p.TopicID(), Index: p.ID().Index},
			LeaderEpoch: o.LeaderEpoch, PartitionEpoch: o.PartitionEpoch, ISR: o.ISR, Epochs: o.Epochs})
	}
	if len(parts) == 0 {
		return
	}
	attempt, cancel := context.WithTimeout(ctx, b.static.Millis("broker.session.timeout.ms"))
	defer cancel()
	reply, err := control.Record[controller.AlterPartitionsReply](attempt, b.control, cmd)
	now = time.Now()
	for i, p := range parts {
		out := partition.Accepted
		var refused *controller.Error
		switch {
		case errors.As(err, &refused):
			out = partition.Refused
		case err != nil:
			out = partition.Unknown
		case reply.Errors[i] != nil:
			out = partition.Refused
		}
		p.Settle(proposals[i], out, now)
		if out == partition.Refused && err == nil {
			level := slog.LevelInfo
			if errors.Is(reply.Errors[i], controller.ErrIneligibleReplica) {
				level = slog.LevelDebug // a replica on its way out is in sync to the end
			}
			b.log.Log(ctx, level, "the controller refused an ISR", "partition", p.ID().String(), "cause", reply.Errors[i])
		}
		if out != partition.Accepted {
			time.AfterFunc(2*time.Second, func() { b.isrs.mark(p) })
		}
	}
	if err != nil && ctx.Err() == nil {
		b.log.Warn("ISRs were not proposed", "cause", err)
	}
}
