package objstore

import (
	"errors"
	"strings"
	"unicode/utf8"
)

// checkKey accepts what every driver can store: 1 to 1024 bytes of UTF-8, '/'-separated, without empty, "."
// or ".." elements, control characters or '\'. (S3's own limit is 1024 bytes.)
func checkKey(key string) error {
	if key == "" || len(key) > 1024 {
		return errors.New("want 1 to 1024 bytes")
	}
	if !utf8.ValidString(key) {
		return errors.New("not UTF-8")
	}
	for part := range strings.SplitSeq(key, "/") {
		if part == "" || part == "." || part == ".." || len(part) > 255 {
			return errors.New("empty, dot or overlong path element")
		}
	}
	if strings.ContainsFunc(key, func(r rune) bool { return r < 0x20 || r == 0x7f || r == '\\' }) {
		return errors.New("control character or backslash")
	}
	return nil
}
