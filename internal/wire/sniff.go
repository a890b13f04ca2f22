package wire

import "bytes"

// Sniff names the protocol that a connection seems to speak, from its first four bytes, or "" if they may be Kafka's.
func Sniff(first []byte) string {
	if len(first) < 4 {
		return ""
	}
	for _, verb := range []string{"GET ", "POST", "HEAD", "PUT ", "DELE", "OPTI", "CONN", "PATC", "PRI "} {
		if string(first[:4]) == verb {
			return "an HTTP request"
		}
	}
	switch {
	case first[0] == 0x16 && first[1] == 3:
		return "a TLS hello on a PLAINTEXT listener"
	case bytes.HasPrefix(first, []byte("SSH-")):
		return "an SSH greeting"
	}
	return ""
}
