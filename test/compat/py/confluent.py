"""confluent-kafka (librdkafka) against a broker: confluent.py BOOTSTRAP TOPIC write|read|admin|paced"""
import sys
import time

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic

bootstrap, topic, step = sys.argv[1:]
COUNT = 1000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def value(i):
    return b"value %06d " % i + b"x" * 48


def must(ok, what):
    if not ok:
        sys.exit("confluent: " + what)


def write():
    failed = []
    for n, codec in enumerate(CODECS):
        p = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "compression.type": codec, "batch.num.messages": 20, "linger.ms": 5})
        part = COUNT // len(CODECS)
        for i in range(n * part, (n + 1) * part):
            p.produce(topic, value(i), key=b"k%d" % i, partition=i % 3, headers={"h": b"%d" % i}, on_delivery=lambda e, m: e and failed.append(str(e)))
        must(p.flush(30) == 0, "not all is delivered")
    must(not failed, "deliveries failed: %r" % failed[:3])


def paced():
    """About ten seconds of records, so that the broker can be stopped and started in between."""
    failed = []
    p = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "reconnect.backoff.max.ms": 500, "message.timeout.ms": 60000})
    for i in range(10000):
        p.produce(topic, value(i), partition=i % 3, on_delivery=lambda e, m: e and failed.append(str(e)))
        p.poll(0.001)
        time.sleep(0.001)
    must(p.flush(60) == 0, "not all is delivered")
    must(not failed, "deliveries failed: %r" % failed[:3])


def consumer(**more):
    return Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False, **more})


def read():
    # Two members share the partitions.
    members = [consumer(), consumer()]
    for c in members:
        c.subscribe([topic])
    seen, owners, deadline = {}, set(), time.time() + 30
    while len(seen) < COUNT and time.time() < deadline:
        for c in members:
            m = c.poll(0.05)
            if m is None:
                continue
            must(m.error() is None, "poll: %s" % m.error())
            seen[m.key()] = m
    for i in range(COUNT):
        m = seen.get(b"k%d" % i)
        must(m is not None and m.value() == value(i) and m.partition() == i % 3 and m.headers() == [("h", b"%d" % i)], "record %d is %r of %d" % (i, m, len(seen)))
    ends = [TopicPartition(topic, p, members[0].get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1]) for p in range(3)]
    must(sum(e.offset for e in ends) == COUNT, "watermarks %r" % ends)
    found = members[0].offsets_for_times([TopicPartition(topic, 0, seen[b"k0"].timestamp()[1])], timeout=10)
    must(found[0].offset == 0, "offset of time %r" % found)
    while time.time() < deadline and not all(c.assignment() for c in members):
        for c in members:
            c.poll(0.05)
    must(sum(len(c.assignment()) for c in members) == 3, "assignments %r" % [c.assignment() for c in members])
    members[1].close()
    members[0].close()
    c = consumer()
    c.commit(offsets=ends, asynchronous=False)
    must([t.offset for t in c.committed(ends, timeout=10)] == [e.offset for e in ends], "committed")
    c.close()


def admin():
    a = AdminClient({"bootstrap.servers": bootstrap})
    name = topic + "-made"
    for f in a.create_topics([NewTopic(name, 2, 1, config={"retention.ms": "1234567"})]).values():
        f.result(10)
    for f in a.create_partitions([NewPartitions(name, 4)]).values():
        f.result(10)
    r = ConfigResource("topic", name)
    got = a.describe_configs([r])[r].result(10)
    must(got["retention.ms"].value == "1234567", "retention.ms %r" % got["retention.ms"].value)
    deadline = time.time() + 10
    while len(a.list_topics(name, timeout=10).topics[name].partitions) != 4:
        must(time.time() < deadline, "partitions")
    must(topic in [g.id for g in a.list_groups(timeout=10)], "groups")
    for f in a.delete_topics([name]).values():
        f.result(10)


{"write": write, "read": read, "admin": admin, "paced": paced}[step]()
