package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/objectstore"
)

// transport makes the transport of direct reads. cfg is what else it shall have.
func (s *storeFlags) transport(cfg direct.Config) (*direct.Transport, error) {
	o := objectstore.Options{AccessKey: s.access, SecretKey: s.secret, Keys: map[string][]byte{}, Grants: s.grants}
	for _, pair := range s.pairs {
		id, file, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, usageError{fmt.Errorf("--key-pair %q: want ID=PRIVATE-KEY-PEM-FILE", pair)}
		}
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, usageError{err}
		}
		o.Keys[id] = pem
	}
	f, err := objectstore.Open(s.url, o)
	if err != nil {
		return nil, usageError{fmt.Errorf("--bucket: %w", err)}
	}
	cfg.Enabled, cfg.Fetcher = true, f
	return direct.New(cfg)
}

// tell says where the records came from.
func tell(s direct.Stats) string {
	text := fmt.Sprintf("%s read from the bucket in %d requests, %s sent by the broker", bytesText(s.Bytes), s.Requests, bytesText(s.BrokerBytes))
	for _, cause := range sortedKeys(s.Fallbacks) {
		if s.Fallbacks[cause] == 0 {
			continue
		}
		text += fmt.Sprintf(", %d fallbacks (%s)", s.Fallbacks[cause], cause)
	}
	return text
}
