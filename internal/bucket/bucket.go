// Package bucket opens an object store by its URL and puts the wrappers around it. It is the one place that knows
// all drivers.
package bucket

import (
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/s3"
)

// Options are what a URL does not say. Zero values are fine.
type Options struct {
	// AccessKey, SecretKey and SessionToken are static S3 credentials; without them see s3.Options.
	AccessKey, SecretKey, SessionToken string
	// Retry bounds retries; NoRetry turns them off.
	Retry   objstore.RetryPolicy
	NoRetry bool
	// ReadOnly wants a directory to be there already and creates nothing in it. Other stores are told by their credentials.
	ReadOnly bool
	// Metrics counts every attempt, where set.
	Metrics *objstore.Metrics
	Logger  *slog.Logger
}

// Open returns the bucket at
//
//	file:///path, /path or ./path   a directory, created if missing
//	mem:                            memory, a new bucket at each call
//	s3://bucket/prefix?param=value  S3
//
// with metrics and retries around it. The prefix of an S3 URL gets a '/' at its end. Parameters of S3: endpoint,
// region, path-style, insecure (no check of certificates), ca-file, profile, credentials-file, part-size (bytes), concurrency,
// content-md5, unsigned-payload, create-only (false: do not rely on If-None-Match). Region and endpoint fall
// back to AWS_REGION, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL.
func Open(rawURL string, o Options) (objstore.Bucket, error) {
	b, err := driver(rawURL, o)
	if err != nil {
		return nil, err
	}
	if o.Metrics != nil {
		b = objstore.WithMetrics(b, o.Metrics)
	}
	if !o.NoRetry {
		b = objstore.WithRetries(b, o.Retry)
	}
	return b, nil
}

func driver(rawURL string, o Options) (objstore.Bucket, error) {
	if rawURL == "mem:" {
		return objstore.NewMemory(), nil
	}
	if !strings.Contains(rawURL, ":") || strings.HasPrefix(rawURL, "/") || strings.HasPrefix(rawURL, ".") {
		if rawURL == "" {
			return nil, fmt.Errorf("bucket URL: empty")
		}
		return directory(rawURL, o)
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("bucket URL: not a URL") // url.Error would repeat it, secrets included
	}
	switch u.Scheme {
	case "file":
		if u.Host != "" && u.Host != "localhost" || u.Path == "" {
			return nil, fmt.Errorf("bucket URL %q: want file:///path", u.Redacted())
		}
		return directory(u.Path, o)
	case "s3":
		return openS3(u, o)
	}
	return nil, fmt.Errorf("bucket URL %q: scheme %q is not file, mem or s3", u.Redacted(), u.Scheme)
}

func directory(path string, o Options) (objstore.Bucket, error) {
	if o.ReadOnly {
		return objstore.OpenDir(path)
	}
	return objstore.NewDir(path)
}

func openS3(u *url.URL, o Options) (objstore.Bucket, error) {
	if u.User != nil {
		return nil, fmt.Errorf("bucket URL %q: credentials do not belong into the URL", u.Redacted())
	}
	so := s3.Options{Bucket: u.Host, AccessKey: o.AccessKey, SecretKey: o.SecretKey, SessionToken: o.SessionToken,
		Region: firstEnv("AWS_REGION", "AWS_DEFAULT_REGION"), Endpoint: firstEnv("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
		Logger: o.Logger}
	createOnly := true
	text := map[string]*string{"endpoint": &so.Endpoint, "region": &so.Region, "ca-file": &so.CAFile, "profile": &so.Profile,
		"credentials-file": &so.CredentialsFile}
	flags := map[string]*bool{"path-style": &so.PathStyle, "insecure": &so.InsecureTLS, "content-md5": &so.ContentMD5,
		"unsigned-payload": &so.UnsignedPayload, "create-only": &createOnly}
	query := u.Query()
	names := make([]string, 0, len(query))
	for name := range query {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		value := query.Get(name)
		var err error
		if p, ok := text[name]; ok {
			*p = value
		} else if p, ok := flags[name]; ok {
			*p, err = strconv.ParseBool(value)
		} else if name == "part-size" {
			so.PartSize, err = strconv.ParseInt(value, 10, 64)
		} else if name == "concurrency" {
			so.Concurrency, err = strconv.Atoi(value)
		} else {
			return nil, fmt.Errorf("bucket URL: unknown parameter %q", name)
		}
		if err != nil {
			return nil, fmt.Errorf("bucket URL: parameter %s: %w", name, err)
		}
	}
	so.NoCreateOnly = !createOnly
	b, err := s3.New(so)
	if err != nil {
		return nil, err
	}
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		prefix += "/"
	}
	return objstore.WithPrefix(b, prefix), nil
}

func firstEnv(names ...string) string {
	for _, name := range names {
		if v := os.Getenv(name); v != "" {
			return v
		}
	}
	return ""
}
