package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/direct/fetcherplugin"
	"github.com/varve-io/varve/direct/objectstore"
)

// bucketReads is a transport with what it reads through.
type bucketReads struct {
	*direct.Transport
	plugin *fetcherplugin.Fetcher // nil without --fetcher
}

// Close ends the transport, then the plug-in.
func (r *bucketReads) Close() {
	r.Transport.Close()
	if r.plugin != nil {
		r.plugin.Close()
	}
}

// transport makes the transport of direct reads. cfg is what else it shall have.
func (s *storeFlags) transport(cfg direct.Config) (*bucketReads, error) {
	cfg.Enabled = true
	r := &bucketReads{}
	var err error
	if s.fetcher != "" {
		properties := map[string]string{"remote.storage.fetcher.class.path": s.fetcher, "varve.remote.bucket.url": s.url}
		if r.plugin, err = fetcherplugin.New(fetcherplugin.Options{Path: s.fetcher, Properties: properties, Logger: cfg.Logger}); err != nil {
			return nil, fmt.Errorf("--fetcher: %w", err)
		}
		cfg.Fetcher = r.plugin
	} else if cfg.Fetcher, err = s.objects(); err != nil {
		return nil, err
	}
	if r.Transport, err = direct.New(cfg); err != nil && r.plugin != nil {
		r.plugin.Close()
	}
	return r, err
}

// objects reads the bucket itself.
func (s *storeFlags) objects() (*objectstore.Fetcher, error) {
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
	return f, nil
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
