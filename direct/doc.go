// Package direct lets Kafka consumers read tiered records from the object store by themselves (KIP-1248, KIP-1254),
// without a change to the client library. It is a transport: a dialer whose connections speak Kafka. Whatever client
// sits above keeps its groups, commits, seeks, pauses and isolation; the transport watches its Fetch requests, asks the
// broker for the places of tiered batches, reads them through a Fetcher, and answers with ordinary Fetch responses.
//
//	t, err := direct.New(direct.Config{Enabled: true, Fetcher: f})
//	client, err := kgo.NewClient(kgo.Dialer(t.DialContext), …)
//
// Guarantees:
//
//   - A client gets the records that it would get without the transport: none missing, repeated or in another order.
//     Every batch that did not come from the broker has passed its checksum, and its offsets continue those before it.
//   - Whatever fails (the store, the object, the broker's word about it) is a fallback: the broker itself is asked for
//     the same offset. Failures that repeat make direct reads rest for a while.
//   - A slow object delays no other partition, and memory for read-ahead is bounded by Config.MemoryBytes.
//   - Without a Fetcher, with Enabled false, or with a broker that does not announce the feature and no Locator that knows its
//     tier, nothing is changed.
//
// All connections that a Transport dials share its read-ahead. Serve puts it behind a listener instead. A Transport and its connections may be used concurrently.
// docs/direct-fetch.md is the protocol.
package direct
