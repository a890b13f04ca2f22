package remoteformat

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/tp"
)

// Object is one of the three objects of a segment.
type Object int

// The objects in the order in which they are written.
const (
	ObjectLog Object = iota
	ObjectIndexes
	ObjectManifest
)

// Suffix is the end of the object's key, with its dot.
func (o Object) Suffix() string {
	return [...]string{".log", ".indexes", ".rsm-manifest"}[o]
}

// Key names a segment in a bucket.
type Key struct {
	Topic     string
	TopicID   tp.UUID
	Partition int32
	Start     int64
	ID        tp.UUID
}

// Path is the common part of the three keys, without prefix and suffix.
func (k Key) Path() string {
	return fmt.Sprintf("%s-%s/%d/%020d-%s", k.Topic, k.TopicID, k.Partition, k.Start, k.ID)
}

// Object is the key of one object. The prefix is put in front as it is; write "kafka/" for a folder.
func (k Key) Object(prefix string, o Object) string { return prefix + k.Path() + o.Suffix() }

const uuidLen = 22

// ParseKey reads an object key below prefix. Ids and topic names may hold '-', so it cuts by length from the right. It
// accepts exactly what Object writes; anything else is ErrKey.
func ParseKey(prefix, key string) (Key, Object, error) {
	bad := func(why string) (Key, Object, error) {
		return Key{}, 0, fmt.Errorf("%w: %q: %s", ErrKey, key, why)
	}
	rest, ok := strings.CutPrefix(key, prefix)
	if !ok {
		return bad("other prefix")
	}
	var k Key
	object := Object(-1)
	for _, o := range []Object{ObjectLog, ObjectIndexes, ObjectManifest} {
		if s, ok := strings.CutSuffix(rest, o.Suffix()); ok {
			rest, object = s, o
			break
		}
	}
	if object < 0 {
		return bad("unknown suffix")
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return bad("want TOPIC-ID/PARTITION/OFFSET-ID")
	}
	var err error
	if k.Topic, k.TopicID, err = cutID(parts[0]); err != nil {
		return bad(err.Error())
	}
	n, err := strconv.ParseInt(parts[1], 10, 32)
	if err != nil || n < 0 {
		return bad("partition")
	}
	k.Partition = int32(n)
	var offset string
	if offset, k.ID, err = cutID(parts[2]); err != nil {
		return bad(err.Error())
	}
	if k.Start, err = strconv.ParseInt(offset, 10, 64); err != nil || k.Start < 0 {
		return bad("offset")
	}
	if k.Object(prefix, object) != key {
		return bad("not in canonical form")
	}
	return k, object, nil
}

func cutID(s string) (string, tp.UUID, error) {
	cut := len(s) - uuidLen - 1
	if cut < 1 || s[cut] != '-' {
		return "", tp.UUID{}, fmt.Errorf("%q: no id at the end", s)
	}
	id, err := tp.ParseUUID(s[cut+1:])
	return s[:cut], id, err
}
