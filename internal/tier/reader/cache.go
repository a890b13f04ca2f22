package reader

import (
	"container/list"

	"github.com/varve-io/varve/internal/remoteformat"
	"github.com/varve-io/varve/internal/tp"
)

// kind is what a cached piece is.
type kind int8

const (
	kindManifest kind = iota
	kindIndex         // number is the remoteformat.IndexKind
	kindBlock         // number is the block's
)

type key struct {
	id     tp.UUID
	kind   kind
	number int
}

// piece is a fetched part of a segment. It is immutable, so that whoever holds it is not hurt by its eviction.
type piece struct {
	data    []byte
	segment *remoteformat.Segment // of a manifest
	cost    int64
}

type entry struct {
	key    key
	piece  *piece
	wanted bool // somebody gave up waiting for it and will come back
}

// cache keeps pieces up to a number of bytes, by last use. Pieces that are still wanted go last, so that readers who
// are slower than the store do not chase each other's pieces out; the newest piece always stays.
type cache struct {
	limit, bytes int64
	order        *list.List // of *entry, latest use in front
	entries      map[key]*list.Element
}

func newCache(limit int64) *cache {
	return &cache{limit: limit, order: list.New(), entries: map[key]*list.Element{}}
}

func (c *cache) get(k key) *piece {
	e := c.entries[k]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	x := e.Value.(*entry)
	x.wanted = false
	return x.piece
}

func (c *cache) has(k key) bool { return c.entries[k] != nil }

func (c *cache) put(k key, p *piece, wanted bool) {
	c.drop(k)
	c.entries[k] = c.order.PushFront(&entry{k, p, wanted})
	c.bytes += p.cost
	for c.bytes > c.limit && c.order.Len() > 1 {
		victim := c.order.Back()
		for e := victim; e != c.order.Front(); e = e.Prev() {
			if !e.Value.(*entry).wanted {
				victim = e
				break
			}
		}
		c.drop(victim.Value.(*entry).key)
	}
}

func (c *cache) drop(k key) {
	if e := c.entries[k]; e != nil {
		c.order.Remove(e)
		delete(c.entries, k)
		c.bytes -= e.Value.(*entry).piece.cost
	}
}

func (c *cache) forget(id tp.UUID) {
	for e := c.order.Front(); e != nil; {
		next := e.Next()
		if k := e.Value.(*entry).key; k.id == id {
			c.drop(k)
		}
		e = next
	}
}
