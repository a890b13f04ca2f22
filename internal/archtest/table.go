// Package archtest keeps the house as ARCHITECTURE.md draws it: which package may import which, which third-party modules
// appear where, and that pure cores stay pure. The table is data; its test reads the sources.
package archtest

// Kind says what a package may do.
type Kind byte

const (
	Core   Kind = iota // pure: no goroutine, select, channel receive, clock, global randomness, I/O
	Mutex              // a core that may hold a mutex and files through vfs
	Shell              // goroutines, clocks, sockets
	Seam               // an interface to the outside and its implementations
	Public             // a shell that other modules may import
	Test               // only tests import it
)

// Row is one package. It may import the rows above it.
type Row struct {
	Path    string // below the module
	Kind    Kind
	Modules []string // third-party modules, by prefix
}

// everywhere are modules that any shell, seam or public package may import.
var everywhere = []string{"github.com/prometheus/client_golang", "golang.org/x/sync", "golang.org/x/time", "golang.org/x/sys"}

const (
	kmsg     = "github.com/twmb/franz-go/pkg/kmsg"
	kgo      = "github.com/twmb/franz-go/pkg/kgo"
	kadm     = "github.com/twmb/franz-go/pkg/kadm"
	kerr     = "github.com/twmb/franz-go/pkg/kerr"
	compress = "github.com/klauspost/compress"
	lz4      = "github.com/pierrec/lz4"
	minio    = "github.com/minio/minio-go"
	raft     = "github.com/hashicorp/"
	goplugin = "github.com/hashicorp/go-plugin"
	xxh3     = "github.com/zeebo/xxh3"
	cbor     = "github.com/fxamacker/cbor"
	cobra    = "github.com/spf13/cobra"
	bar      = "github.com/schollz/progressbar"
	sarama   = "github.com/IBM/sarama"
)

// Table lists every package, lower ones first.
var Table = []Row{
	{"internal/tp", Core, nil},
	{"internal/config", Core, nil},
	{"internal/vfs", Seam, nil},
	{"internal/objstore", Seam, nil},
	{"internal/objstore/s3", Seam, []string{minio}},
	{"internal/bucket", Shell, nil},
	{"internal/recordbatch", Core, []string{compress, lz4}},
	{"internal/leaderepoch", Core, nil},
	{"internal/producerstate", Core, nil},
	{"internal/compact", Core, nil},
	{"internal/segment", Mutex, nil},
	{"internal/remoteformat", Core, []string{compress}},
	{"internal/remotelog", Core, nil},
	{"internal/tier", Core, nil},
	{"internal/metadata", Core, []string{cbor}},
	{"internal/quota", Mutex, nil},
	{"internal/directfetch", Core, []string{kmsg}},
	{"internal/tierinfo", Core, []string{kmsg, cbor}},
	{"internal/wire", Core, []string{kmsg}},
	{"direct", Public, []string{kmsg}},
	{"direct/objectstore", Public, nil},
	{"direct/fetcherplugin", Public, []string{goplugin, "github.com/hashicorp/go-hclog"}},
	{"internal/bucketlayout", Core, nil},
	{"direct/kafkatier", Public, []string{kgo, kmsg, kerr}},
	{"internal/log", Mutex, nil},
	{"internal/tier/uploader", Shell, nil},
	{"internal/tier/reader", Shell, nil},
	{"internal/peer", Shell, []string{cbor, kmsg}},
	{"internal/quorum", Shell, []string{raft}},
	{"internal/controller", Core, []string{cbor}},
	{"internal/partition", Mutex, nil},
	{"internal/follower", Core, nil},
	{"internal/commit", Shell, nil},
	{"internal/txn", Core, []string{kmsg}},
	{"internal/grouprecord", Core, []string{kmsg}},
	{"internal/committed", Core, nil},
	{"internal/group", Core, []string{kmsg}},
	{"internal/assignor", Core, nil},
	{"internal/consumergroup", Core, []string{kmsg, xxh3}},
	{"internal/fetch", Shell, nil},
	{"internal/control", Shell, []string{cbor}},
	{"internal/replication", Shell, []string{kmsg, kerr}},
	{"internal/coordinator", Shell, nil},
	{"internal/transact", Shell, []string{kmsg, kerr}},
	{"internal/tiering", Shell, nil},
	{"internal/kafkaapi", Shell, []string{kmsg, kerr}},
	{"internal/server", Shell, nil},
	{"internal/debughttp", Shell, nil},
	{"internal/gateway/rewrite", Core, []string{kmsg}},
	{"internal/gateway", Shell, []string{kmsg}},
	{"internal/quietlog", Shell, nil},
	{"internal/broker", Shell, nil},
	{"internal/inspect", Shell, []string{kmsg}},
	{"internal/bucketscan", Shell, nil},
	{"cmd/varve", Shell, []string{cobra, bar, kgo, kadm, "github.com/twmb/franz-go/pkg/sasl", kmsg, kerr, "golang.org/x/term"}},
	{"bench", Shell, []string{kgo, kadm, kmsg, kerr, minio}},
	{"direct/example/kgo", Shell, []string{kgo}},
	{"direct/example/plugin", Shell, nil},
	{"direct/example/sarama", Shell, []string{sarama}},
	{"internal/fixtures", Test, nil},
	{"internal/testport", Test, nil},
	{"internal/s3test", Test, nil},
	{"internal/objstore/objstoretest", Test, nil},
	{"internal/archtest", Test, nil},
	{"internal/checker", Test, nil},
	{"internal/listappend", Test, nil},
	{"internal/sim", Test, nil},
	{"internal/simnet", Test, nil},
	{"internal/clustertest", Test, nil},
}
