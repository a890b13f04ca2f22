"""confluent-kafka (librdkafka) against a broker: confluent.py BOOTSTRAP TOPIC write|read|admin|paced|transact|committed"""
import sys
import time

from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition
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


def transact():
    """Moves records from one topic to another, each in a transaction with the offset it was read at; every third transaction is
    aborted and done again. What must not be seen says so."""
    source = topic + "-in"
    failed = []
    report = lambda e, m: e and failed.append(str(e))
    w = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "batch.num.messages": 20})
    for i in range(COUNT):
        w.produce(source, value(i), key=b"k%d" % i, partition=i % 3, on_delivery=report)
    must(w.flush(30) == 0, "not all is delivered")

    def transactional():
        p = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "batch.num.messages": 20})
        p.init_transactions(30)
        return p

    p = transactional()
    c = consumer(**{"isolation.level": "read_committed"})
    c.subscribe([source])
    moved, n, at, deadline = 0, 0, {}, time.time() + 60
    while moved < COUNT:
        must(time.time() < deadline, "%d records moved" % moved)
        batch = c.consume(30, 0.5)
        if not batch:
            continue
        n += 1
        commit = n % 3 != 2
        first, past = {}, {}
        p.begin_transaction()
        for m in batch:
            must(m.error() is None, "consume: %s" % m.error())
            first.setdefault(m.partition(), m.offset())
            past[m.partition()] = m.offset() + 1
            p.produce(topic, m.value() if commit else b"aborted " + m.value(), key=m.key(), partition=m.partition(), on_delivery=report)
        p.send_offsets_to_transaction([TopicPartition(source, k, o) for k, o in past.items()], c.consumer_group_metadata(), 30)
        if commit:
            p.commit_transaction(30)
            moved += len(batch)
            at.update(past)
        else:
            must(p.flush(30) == 0, "not all is delivered")
            p.abort_transaction(30)
            for k, o in first.items():
                c.seek(TopicPartition(source, k, o))
        stored = {t.partition: t.offset for t in c.committed([TopicPartition(source, k) for k in range(3)], timeout=30)}
        must(stored == {k: at.get(k, OFFSET_INVALID) for k in range(3)}, "offsets %r after %d transactions, committed were %r" % (stored, n, at))
    must(n >= 10, "only %d transactions" % n)
    must(sum(at.values()) == COUNT, "offsets %r" % at)
    c.close()
    # Another of that id takes over: what the first has begun never happened.
    p.begin_transaction()
    p.produce(topic, b"aborted", key=b"zombie", partition=0, on_delivery=report)
    must(p.flush(30) == 0, "not all is delivered")
    transactional()
    try:
        p.commit_transaction(30)
        must(False, "a producer committed that another has replaced")
    except KafkaException as e:
        must(e.args[0].code() == KafkaError._FENCED, "commit of a replaced producer: %r" % e)
    must(not failed, "deliveries failed: %r" % failed[:3])


def committed():
    """Reads all that transact wrote, with both isolation levels."""

    def everything(isolation):
        c = consumer(**{"group.id": topic + isolation, "isolation.level": isolation, "enable.partition.eof": True})
        c.assign([TopicPartition(topic, k, OFFSET_BEGINNING) for k in range(3)])
        found, ended, deadline = [], set(), time.time() + 60
        while len(ended) < 3:
            must(time.time() < deadline, "%s: %d records, ends of %r" % (isolation, len(found), ended))
            m = c.poll(0.5)
            if m is None:
                continue
            if m.error() is None:
                found.append(m)
            else:
                must(m.error().code() == KafkaError._PARTITION_EOF, "poll: %s" % m.error())
                ended.add(m.partition())
        c.close()
        return found

    seen = everything("read_committed")
    for k in range(3):
        got = [(m.key(), m.value()) for m in seen if m.partition() == k]
        want = [(b"k%d" % i, value(i)) for i in range(k, COUNT, 3)]
        must(got == want, "partition %d: %d committed records, want %d; unexpected: %r" % (k, len(got), len(want), [g for g in got if g not in want][:3]))
    hidden = [m for m in everything("read_uncommitted") if m.value().startswith(b"aborted")]
    must(len(hidden) > 100, "only %d records of aborted transactions" % len(hidden))


{"write": write, "read": read, "admin": admin, "paced": paced, "transact": transact, "committed": committed}[step]()
