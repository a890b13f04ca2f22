package direct_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/direct"
	"github.com/varve-io/varve/internal/directfetch"
)

// repeater fails as http.Client does, with the URL in its error.
type repeater struct{ direct.Fetcher }

func (repeater) Formats() []string { return []string{"ApacheKafkaV1"} }

func (repeater) FetchLogSegment(_ context.Context, s direct.Segment, _, _ int64) (io.ReadCloser, error) {
	return nil, fmt.Errorf("%w: %w", direct.ErrAuth, &url.Error{Op: "Get", URL: string(s.LogGrant), Err: io.ErrNoProgress})
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// A granted URL is as good as the records, and stays out of the log whatever a fetcher says.
func TestGrantsStayOutOfTheLog(t *testing.T) {
	log := &lockedBuffer{}
	r := newRig(t, direct.Config{Fetcher: repeater{}, Logger: slog.New(slog.NewTextHandler(log, nil))}, one(30, 29))
	r.broker.spoil = func(resp *kmsg.FetchResponse) {
		p := &resp.Topics[0].Partitions[0]
		if all, err := directfetch.Locations(p); err == nil && len(all) > 0 {
			all[0].LogGrant = "https://store/bucket/log?X-Amz-Signature=secret&x=1"
			directfetch.SetLocations(p, all)
		}
	}
	check(r, r.broker.parts, []int64{0}, patient, r.client.fetch(patient, []position{{0, 0}}))
	log.mu.Lock()
	defer log.mu.Unlock()
	if text := log.b.String(); strings.Contains(text, "secret") || !strings.Contains(text, "auth") {
		t.Error(text)
	}
}
