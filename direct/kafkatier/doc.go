// Package kafkatier lets package direct read the tier of a stock Apache Kafka (3.6 or later), whose brokers know nothing of
// direct reads. A Locator learns the remote segments from the topic __remote_log_metadata (KIP-405), as brokers do among
// themselves, and their bytes' places from the segments' own indexes in the object store:
//
//	f, err := objectstore.Open(bucket, objectstore.Options{…})
//	l, err := kafkatier.Open(f, kafkatier.Options{Seeds: seeds, Layout: kafkatier.Aiven("prefix/")})
//	t, err := direct.New(direct.Config{Enabled: true, Fetcher: f, Locator: l})
//
// It needs read access to that topic, and to describe the topics that are read. Only offsets that the leader no longer has
// itself are located, only segments that the topic shows as copied and not as being deleted, and of those only what is in
// the present leader's lineage. What cannot be known for sure is left to the broker. docs/direct-fetch.md says what that
// means. A Locator only ever reads, and is safe for concurrent use.
package kafkatier
