package reader

// Pieces are bytes that follow each other, in slices of cached blocks. Nobody may change them: other readers see the same
// memory, which stays as it is for as long as somebody holds it.
type Pieces [][]byte

// Size is the number of bytes.
func (p Pieces) Size() int {
	n := 0
	for _, b := range p {
		n += len(b)
	}
	return n
}

// Bytes are all bytes in one slice, which is a copy unless there is one piece.
func (p Pieces) Bytes() []byte {
	if len(p) == 1 {
		return p[0]
	}
	return p.AppendTo(make([]byte, 0, p.Size()))
}

// AppendTo appends all bytes to dst.
func (p Pieces) AppendTo(dst []byte) []byte {
	for _, b := range p {
		dst = append(dst, b...)
	}
	return dst
}

// join adds more at the end. Where it goes on in the block in which p ends, the last piece becomes longer instead.
func (p Pieces) join(more Pieces) Pieces {
	if len(p) > 0 && len(more) > 0 {
		last, next := p[len(p)-1], more[0]
		if n := len(last); cap(last) > n && len(next) > 0 && &last[:n+1][n] == &next[0] {
			p[len(p)-1], more = last[:n+len(next)], more[1:]
		}
	}
	return append(p, more...)
}

// clipped is p without the room behind its pieces, which is other data of the blocks.
func (p Pieces) clipped() Pieces {
	for i, b := range p {
		p[i] = b[:len(b):len(b)]
	}
	return p
}
