package vfs

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"
)

// cutReader fails at and behind a position.
type cutReader struct {
	r   io.ReaderAt
	cut int64
	err error
}

func (c *cutReader) ReadAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) <= c.cut {
		return c.r.ReadAt(p, off)
	}
	n := 0
	if off < c.cut {
		n, _ = c.r.ReadAt(p[:c.cut-off], off)
	}
	return n, c.err
}

func TestAheadReaderEqualsWhatItReads(t *testing.T) {
	data := make([]byte, 6*aheadBytes+12345)
	for i := range data {
		data[i] = byte(i ^ i>>8 ^ i>>16)
	}
	broken := errors.New("broken")
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int64{0, 1, aheadBytes - 1, aheadBytes, aheadBytes + 1, 3 * aheadBytes, int64(len(data))}).Draw(t, "size")
		from := rapid.Int64Range(0, size).Draw(t, "from")
		cut := rapid.Int64Range(0, 2*size).Draw(t, "cut")
		plain := &cutReader{bytes.NewReader(data[:size]), cut, broken}
		a := NewAheadReader(plain, from, size)
		defer a.Close()
		pos := from
		for range rapid.IntRange(0, 40).Draw(t, "reads") {
			// Mostly on, over the end of what was read before, now and then anywhere.
			pos += rapid.Int64Range(-10000, 100_000).Draw(t, "on")
			if rapid.IntRange(0, 20).Draw(t, "jump") == 0 {
				pos = rapid.Int64Range(0, size).Draw(t, "to")
			}
			pos = max(pos, 0)
			want := make([]byte, rapid.IntRange(1, 2*aheadBytes+5).Draw(t, "n"))
			got := make([]byte, len(want))
			n, werr := plain.ReadAt(want, pos)
			m, gerr := a.ReadAt(got, pos)
			if n != m || !bytes.Equal(want[:n], got[:m]) || (werr == nil || n == len(want)) != (gerr == nil || m == len(want)) || errors.Is(werr, broken) != errors.Is(gerr, broken) {
				t.Fatalf("%d bytes at %d of %d: want %d, %v; got %d, %v", len(want), pos, size, n, werr, m, gerr)
			}
		}
	})
}
