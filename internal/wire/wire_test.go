package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

func flexible(key, version int16) bool {
	r := kmsg.RequestForKey(key)
	if r == nil {
		return false
	}
	r.SetVersion(version)
	return r.IsFlexible()
}

func TestHeaderRoundTrip(t *testing.T) {
	for _, version := range []int16{0, 8, 13} {
		r := kmsg.NewPtrMetadataRequest()
		r.Version = version
		frame := AppendRequest(nil, 77, "client", r)
		h, body, err := ParseHeader(frame[4:], flexible)
		if err != nil || h != (Header{3, version, 77, "client"}) {
			t.Fatal(h, err)
		}
		if err := r.ReadFrom(body); err != nil {
			t.Fatal(err)
		}
	}
}

func TestResponseHeaderOfApiVersionsIsV0(t *testing.T) {
	r := kmsg.NewPtrApiVersionsResponse()
	r.Version = 4
	got := AppendResponse(nil, 1, r)
	if !bytes.Equal(got[4:10], []byte{0, 0, 0, 1, 0, 0}) {
		t.Fatalf("% x", got)
	}
}

func TestSniff(t *testing.T) {
	for first, want := range map[string]bool{"GET ": true, "\x16\x03\x01\x02": true, "SSH-": true, "\x00\x00\x00\x10": false, "G": false} {
		if got := Sniff([]byte(first)) != ""; got != want {
			t.Errorf("%q: %v", first, got)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add(AppendRequest(nil, 1, "c", kmsg.NewPtrMetadataRequest())[4:])
	f.Add([]byte{0, 3, 0, 13, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1})
	f.Fuzz(func(t *testing.T, frame []byte) {
		_, body, err := ParseHeader(frame, flexible)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		if len(body) > len(frame) {
			t.Fatal("body outgrew its frame")
		}
	})
}
