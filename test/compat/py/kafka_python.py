"""kafka-python against a broker: kafka_python.py BOOTSTRAP TOPIC write|read|admin|print [COUNT]"""
import os
import sys

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic

bootstrap, topic, step = sys.argv[1:4]
COUNT = 900


def value(i):
    return b"value %06d " % i + b"x" * 48


def must(ok, what):
    if not ok:
        sys.exit("kafka-python: " + what)


def write():
    for codec in (None, "gzip"):
        producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", compression_type=codec, batch_size=1000)
        start = 0 if codec is None else COUNT // 2
        sent = [producer.send(topic, value(i), key=b"k%d" % i, headers=[("h", b"%d" % i)], partition=i % 3) for i in range(start, start + COUNT // 2)]
        producer.flush(30)
        for f in sent:
            f.get(10)
        producer.close()


def read():
    consumer = KafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=topic, auto_offset_reset="earliest", enable_auto_commit=False, consumer_timeout_ms=15000)
    seen = {}
    for r in consumer:
        seen[r.key] = r
        if len(seen) == COUNT:
            break
    for i in range(COUNT):
        r = seen.get(b"k%d" % i)
        must(r is not None and r.value == value(i) and r.partition == i % 3 and r.headers == [("h", b"%d" % i)], "record %d is %r" % (i, r))
    consumer.commit()
    tp = TopicPartition(topic, 0)
    must(consumer.committed(tp) == COUNT // 3, "committed %r" % consumer.committed(tp))
    must(consumer.beginning_offsets([tp])[tp] == 0, "beginning %r" % consumer.beginning_offsets([tp]))
    must(consumer.end_offsets([tp])[tp] == COUNT // 3, "end %r" % consumer.end_offsets([tp]))
    mid = seen[b"k300"]
    found = consumer.offsets_for_times({tp: mid.timestamp})[tp]
    must(found is not None and found.offset <= mid.offset and found.timestamp >= mid.timestamp, "offset of time %r" % (found,))
    consumer.close()
    # A second member of the group begins where the first left off.
    again = KafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=topic, auto_offset_reset="earliest", consumer_timeout_ms=2000)
    must(sum(1 for _ in again) == 0, "committed records are delivered again")
    again.close()


def admin():
    a = KafkaAdminClient(bootstrap_servers=bootstrap)
    must(topic in a.list_topics(), "the topic is not listed")
    name = topic + "-made"
    a.create_topics([NewTopic(name, 2, 1, topic_configs={"retention.ms": "1234567"})])
    d = a.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    configs = {c[0]: c[1] for c in d[0].resources[0][4]}
    must(configs.get("retention.ms") == "1234567", "configs %r" % configs.get("retention.ms"))
    must(len(a.describe_topics([name])[0]["partitions"]) == 2, "partitions")
    must((topic, "consumer") in a.list_consumer_groups(), "groups %r" % a.list_consumer_groups())
    g = a.describe_consumer_groups([topic])[0]
    must(g.state == "Empty" and g.group == topic, "group %r" % (g,))
    offsets = a.list_consumer_group_offsets(topic)
    must(offsets[TopicPartition(topic, 1)].offset == COUNT // 3, "group offsets %r" % offsets)
    a.delete_topics([name])
    a.close()


def show():
    """Prints partition, offset and value of the first records. SASL=USER:PASSWORD in the environment authenticates."""
    left = int(sys.argv[4])
    sasl = {}
    if "SASL" in os.environ:
        user, password = os.environ["SASL"].split(":")
        sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_plain_username": user, "sasl_plain_password": password}
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=20000, **sasl)
    consumer.assign([TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic))])
    for r in consumer:
        print(r.partition, r.offset, r.value.decode())
        left -= 1
        if left == 0:
            break
    must(left == 0, "%d records are missing" % left)
    consumer.close()


{"write": write, "read": read, "admin": admin, "print": show}[step]()
