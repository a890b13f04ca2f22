// kafkajs against a broker: kafkajs.js BOOTSTRAP TOPIC write|read|admin|print [COUNT GROUP]
const { Kafka, CompressionTypes, logLevel } = require('kafkajs')

const [bootstrap, topic, step, count, group] = process.argv.slice(2)
const COUNT = 900
const kafka = new Kafka({ clientId: 'compat', brokers: [bootstrap], logLevel: logLevel.ERROR })
const value = (i) => `value ${String(i).padStart(6, '0')} ${'x'.repeat(48)}`
const must = (ok, what) => {
  if (!ok) throw new Error(what)
}

async function write() {
  for (const [n, compression] of [CompressionTypes.None, CompressionTypes.GZIP].entries()) {
    const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
    await producer.connect()
    // One batch is one request here: batches of 30 leave several in a small segment.
    for (let from = (n * COUNT) / 2; from < ((n + 1) * COUNT) / 2; from += 30) {
      const messages = []
      for (let i = from; i < from + 30; i++) messages.push({ key: `k${i}`, value: value(i), headers: { h: `${i}` }, partition: i % 3 })
      await producer.send({ topic, acks: -1, compression, messages })
    }
    await producer.disconnect()
  }
}

async function read() {
  const consumer = kafka.consumer({ groupId: topic })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const seen = new Map()
  await new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`${seen.size} of ${COUNT} records`)), 40000)
    consumer.on(consumer.events.CRASH, (e) => reject(e.payload.error))
    consumer.run({
      eachMessage: async ({ partition, message }) => {
        seen.set(message.key.toString(), { partition, message })
        if (seen.size === COUNT) {
          clearTimeout(timer)
          resolve()
        }
      },
    })
  })
  for (let i = 0; i < COUNT; i++) {
    const got = seen.get(`k${i}`)
    must(got && got.message.value.toString() === value(i) && got.partition === i % 3 && got.message.headers.h.toString() === `${i}`, `record ${i}`)
  }
  await consumer.commitOffsets([0, 1, 2].map((partition) => ({ topic, partition, offset: `${COUNT / 3}` })))
  await consumer.disconnect()
}

async function admin() {
  const a = kafka.admin()
  await a.connect()
  const name = `${topic}-made`
  await a.createTopics({ topics: [{ topic: name, numPartitions: 2, replicationFactor: 1, configEntries: [{ name: 'retention.ms', value: '1234567' }] }] })
  await a.createPartitions({ topicPartitions: [{ topic: name, count: 4 }] })
  const d = await a.describeConfigs({ includeSynonyms: true, resources: [{ type: 2, name, configNames: ['retention.ms'] }] })
  must(d.resources[0].configEntries[0].configValue === '1234567', JSON.stringify(d))
  await a.alterConfigs({ resources: [{ type: 2, name, configEntries: [{ name: 'retention.ms', value: '7654321' }] }] })
  const offsets = await a.fetchTopicOffsets(topic)
  must(offsets.length === 3 && offsets.every((o) => Number(o.high) === COUNT / 3 && o.low === '0'), JSON.stringify(offsets))
  const committed = await a.fetchOffsets({ groupId: topic, topics: [topic] })
  must(committed[0].partitions.every((p) => Number(p.offset) === COUNT / 3), JSON.stringify(committed))
  await a.resetOffsets({ groupId: topic, topic, earliest: true })
  const groups = await a.listGroups()
  must(groups.groups.some((g) => g.groupId === topic), JSON.stringify(groups))
  const cluster = await a.describeCluster()
  must(cluster.brokers.length === 1 && cluster.controller === cluster.brokers[0].nodeId, JSON.stringify(cluster))
  await a.fetchTopicOffsets(name) // deleteTopicRecords goes by the topics that the client happens to know leaders of
  await a.deleteTopicRecords({ topic: name, partitions: [{ partition: 0, offset: '-1' }] })
  await a.deleteGroups([topic])
  await a.deleteTopics({ topics: [name] })
  await a.disconnect()
}

// Prints partition, offset and value of the first records that are committed.
async function print() {
  const consumer = kafka.consumer({ groupId: group })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const lines = []
  await new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`${lines.length} of ${count} records`)), 40000)
    consumer.on(consumer.events.CRASH, (e) => reject(e.payload.error))
    consumer.run({
      eachMessage: async ({ partition, message }) => {
        if (lines.push(`${partition} ${message.offset} ${message.value}`) === Number(count)) {
          clearTimeout(timer)
          resolve()
        }
      },
    })
  })
  console.log(lines.join('\n'))
  await consumer.disconnect()
}

const steps = { write, read, admin, print }
steps[step]().catch((e) => {
  console.error(`kafkajs: ${e.stack}`)
  process.exit(1)
})
