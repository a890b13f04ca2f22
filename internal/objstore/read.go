package objstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
)

// ReadRange returns exactly n bytes from off. Fewer are ErrShortBody. They are read straight into a buffer of their size, which
// above a first megabyte grows with what arrives, so that a wrong n cannot exhaust memory.
func ReadRange(ctx context.Context, b Bucket, key string, off, n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	r, err := b.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, got := make([]byte, min(n, 1<<20)), 0
	for {
		k, err := io.ReadFull(r, out[got:])
		got += k
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF: // of ReadFull itself, or a bare one of the connection
			return nil, &Error{Op: "get", Key: key, Kind: ErrShortBody, Err: fmt.Errorf("%d bytes of %d from %d", got, n, off)}
		case err != nil:
			return nil, readError(key, err)
		case int64(got) == n:
			return out, nil
		}
		out = append(make([]byte, 0, min(n, 8*int64(got))), out...)
		out = out[:cap(out)]
	}
}

// ReadAll returns the whole object, which may have at most limit bytes.
func ReadAll(ctx context.Context, b Bucket, key string, limit int64) ([]byte, error) {
	r, err := b.Get(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, readError(key, err)
	}
	if int64(len(out)) > limit {
		return nil, fmt.Errorf("object store: get %q: larger than the %d bytes allowed", key, limit)
	}
	return out, nil
}

func readError(key string, err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return &Error{Op: "get", Key: key, Kind: ErrShortBody, Err: err}
	}
	return &Error{Op: "get", Key: key, Err: err}
}

// Same reports whether the object holds exactly the size bytes of body. It reads the object, so it is for the
// rare question whether a create-only put that met an object had written that object itself.
func Same(ctx context.Context, b Bucket, key string, body io.ReaderAt, size int64) (bool, error) {
	info, err := b.Stat(ctx, key)
	if err != nil {
		return false, err
	}
	if info.Size != size {
		return false, nil
	}
	r, err := b.Get(ctx, key, 0, -1)
	if err != nil {
		return false, err
	}
	defer r.Close()
	want, have := make([]byte, 64<<10), make([]byte, 64<<10)
	for off := int64(0); off < size; {
		n := int(min(int64(len(want)), size-off))
		if _, err := io.ReadFull(r, have[:n]); err != nil {
			return false, readError(key, err)
		}
		if k, err := body.ReadAt(want[:n], off); k < n {
			return false, &Error{Op: "compare", Key: key, Err: err}
		}
		if !bytes.Equal(want[:n], have[:n]) {
			return false, nil
		}
		off += int64(n)
	}
	return true, nil
}
