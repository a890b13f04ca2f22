package s3

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Options say where a bucket is and how to talk to it. Only Bucket is needed for AWS itself.
type Options struct {
	Bucket string
	// Endpoint is a URL or host:port (https then); "" is AWS. Region defaults to us-east-1, so that the
	// right to ask for the bucket's location is not needed.
	Endpoint, Region string
	// PathStyle puts the bucket into the path instead of the host name. Most S3 clones need it.
	PathStyle bool

	// AccessKey and SecretKey (and SessionToken) are static credentials. Without them the environment
	// (AWS_*), the shared credentials file and the instance's or pod's role are asked in that order.
	AccessKey, SecretKey, SessionToken string
	CredentialsFile, Profile           string

	// CAFile holds extra root certificates (PEM). InsecureTLS turns off the check of certificates.
	CAFile      string
	InsecureTLS bool

	// PartSize is the size of multipart parts and the largest single put, in bytes; default 16 MiB, at
	// least 5 MiB. Each put in flight holds up to Concurrency (default 2) parts in memory.
	PartSize    int64
	Concurrency int

	// Requests carry a signed SHA-256 of the body and no other checksum, which every S3 clone accepts.
	// ContentMD5 adds Content-MD5; UnsignedPayload leaves out the SHA-256 (TLS only).
	ContentMD5, UnsignedPayload bool
	// NoCreateOnly replaces the condition of create-only puts by a look before the put, for stores that
	// refuse If-None-Match.
	NoCreateOnly bool

	// DialTimeout (5 s), IdleTimeout (60 s without a byte in either direction) and HeaderTimeout (60 s from
	// the end of the request to the answer) find dead connections.
	DialTimeout, IdleTimeout, HeaderTimeout time.Duration
	// RefreshInterval is the least time between two refreshes of credentials that the store refused; 10 s.
	RefreshInterval time.Duration
	// Logger hears of refused credentials; default none.
	Logger *slog.Logger
}

const minPartSize = 5 << 20

func (o Options) filled() (Options, error) {
	if o.Bucket == "" {
		return o, errors.New("s3: no bucket name")
	}
	if o.Region == "" {
		o.Region = "us-east-1"
	}
	if o.PartSize == 0 {
		o.PartSize = 16 << 20
	}
	if o.PartSize < minPartSize || o.PartSize > 5<<30 {
		return o, fmt.Errorf("s3: part size %d is not between 5 MiB and 5 GiB", o.PartSize)
	}
	if o.Concurrency <= 0 {
		o.Concurrency = 2
	}
	for d, v := range map[*time.Duration]time.Duration{&o.DialTimeout: 5 * time.Second, &o.IdleTimeout: time.Minute,
		&o.HeaderTimeout: time.Minute, &o.RefreshInterval: 10 * time.Second} {
		if *d <= 0 {
			*d = v
		}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// endpoint splits the endpoint into host and whether TLS is used.
func (o Options) endpoint() (host string, secure bool, err error) {
	e := o.Endpoint
	if e == "" {
		return "s3.amazonaws.com", true, nil
	}
	if !strings.Contains(e, "://") {
		e = "https://" + e
	}
	u, err := url.Parse(e)
	if err != nil {
		return "", false, fmt.Errorf("s3: endpoint: %w", err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
		return "", false, fmt.Errorf("s3: endpoint %q: want http(s)://host[:port]", u.Redacted())
	}
	return u.Host, u.Scheme == "https", nil
}

func (o Options) credentials(client *http.Client) *credentials.Credentials {
	if o.AccessKey != "" {
		return credentials.NewStaticV4(o.AccessKey, o.SecretKey, o.SessionToken)
	}
	return credentials.NewChainCredentials([]credentials.Provider{
		&credentials.EnvAWS{},
		&credentials.FileAWSCredentials{Filename: o.CredentialsFile, Profile: o.Profile},
		&credentials.IAM{Client: client, Region: o.Region},
	})
}

func (o Options) tls() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: o.InsecureTLS}
	if o.CAFile != "" {
		pem, err := os.ReadFile(o.CAFile)
		if err != nil {
			return nil, fmt.Errorf("s3: root certificates: %w", err)
		}
		if c.RootCAs, err = x509.SystemCertPool(); err != nil {
			c.RootCAs = x509.NewCertPool()
		}
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("s3: root certificates %q: no certificate in it", o.CAFile)
		}
	}
	return c, nil
}
