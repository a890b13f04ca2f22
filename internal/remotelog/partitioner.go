package remotelog

import (
	"encoding/binary"

	"github.com/varve-io/varve/internal/tp"
)

// MetadataPartition is the partition of the metadata topic, of count partitions, that tells of a user's partition. The
// topic's name has no part in it.
func MetadataPartition(topic tp.UUID, partition int32, count int) int32 {
	fold := func(b []byte) uint32 {
		return binary.BigEndian.Uint32(b) ^ binary.BigEndian.Uint32(b[4:])
	}
	h := uint32(1)
	for _, x := range []uint32{fold(topic[8:]), fold(topic[:8]), uint32(partition)} {
		h = 31*h + x
	}
	return int32(murmur2(h) & 0x7fffffff % uint32(max(count, 1)))
}

// murmur2 is Kafka's hash of the four bytes of a big-endian number.
func murmur2(v uint32) uint32 {
	const m = 0x5bd1e995
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	k := binary.LittleEndian.Uint32(b[:]) * m
	k = (k ^ k>>24) * m
	h := uint32(0x9747b28c ^ len(b))
	h = h*m ^ k
	h = (h ^ h>>13) * m
	return h ^ h>>15
}
