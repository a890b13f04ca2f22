package vfs

import (
	"io"
	"sync"
)

// AheadReader reads a range in order while its caller is at work on what it has read: a pass over a segment whose time goes half into
// reading and half into looking at what was read takes the longer of the two. Close must be called; it is for one caller at a time.
type AheadReader struct {
	r      io.ReaderAt
	chunks chan *chunk // as far as they are read; closed behind the last
	spent  chan *chunk
	stop   chan struct{}
	reads  sync.WaitGroup

	// The last two, since a batch that ends in one chunk began in the one before.
	held []*chunk
}

// chunk is a piece of the range that was read, as far as err let it.
type chunk struct {
	pos  int64
	data []byte
	err  error
}

// chunks holds idle ones; nothing of their contents is used again.
var chunks = sync.Pool{New: func() any { return &chunk{data: make([]byte, aheadBytes)} }}

func (c *chunk) end() int64 { return c.pos + int64(len(c.data)) }

const (
	aheadBytes  = 256 << 10 // of a chunk
	aheadChunks = 4         // there are: two that are held, one that is ready, one that is being read
)

// NewAheadReader starts to read [pos, end) of r, which must take reads from two goroutines.
func NewAheadReader(r io.ReaderAt, pos, end int64) *AheadReader {
	a := &AheadReader{r: r, chunks: make(chan *chunk, 1), spent: make(chan *chunk, aheadChunks), stop: make(chan struct{})}
	for range min(aheadChunks, (end-pos)/aheadBytes+1) {
		c, _ := chunks.Get().(*chunk)
		a.spent <- c
	}
	a.reads.Go(func() { a.run(pos, end) })
	return a
}

func (a *AheadReader) run(pos, end int64) {
	defer close(a.chunks)
	for pos < end {
		var c *chunk
		select {
		case c = <-a.spent:
		case <-a.stop:
			return
		}
		c.pos, c.data = pos, c.data[:min(int64(cap(c.data)), end-pos)]
		n, err := a.r.ReadAt(c.data, pos)
		if n == len(c.data) {
			err = nil
		}
		c.data, c.err = c.data[:n], err
		pos += int64(n)
		select {
		case a.chunks <- c:
		case <-a.stop:
			return
		}
		if err != nil {
			return
		}
	}
}

// ReadAt is io.ReaderAt's. It waits for bytes that lie ahead; those that are behind, or behind the end of the range, it reads
// itself.
func (a *AheadReader) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at := off + int64(n)
		if len(a.held) > 0 && at < a.held[0].pos {
			break
		}
		for _, c := range a.held {
			if at >= c.pos && at < c.end() {
				n += copy(p[n:], c.data[at-c.pos:])
				at = off + int64(n)
			}
		}
		if n == len(p) {
			return n, nil
		}
		if last := len(a.held) - 1; last >= 0 && a.held[last].err != nil {
			return n, a.held[last].err
		}
		next, ok := <-a.chunks
		if !ok {
			break
		}
		if len(a.held) == 2 {
			a.spent <- a.held[0]
			a.held = append(a.held[:0], a.held[1])
		}
		a.held = append(a.held, next)
	}
	m, err := a.r.ReadAt(p[n:], off+int64(n))
	return n + m, err
}

// Close ends the reading ahead; the file may be closed then.
func (a *AheadReader) Close() {
	close(a.stop)
	a.reads.Wait()
	for c := range a.chunks {
		chunks.Put(c)
	}
	for _, c := range a.held {
		chunks.Put(c)
	}
	close(a.spent)
	for c := range a.spent {
		chunks.Put(c)
	}
}
