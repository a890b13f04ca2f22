// Package s3test starts a real S3 server for tests: versitygw over a temporary directory.
package s3test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/objstore"
	"github.com/varve-io/varve/internal/objstore/s3"
)

// Server is a running S3 server with one bucket. It ends with the test.
type Server struct {
	// Endpoint is http://127.0.0.1:PORT.
	Endpoint, AccessKey, SecretKey, Bucket string
	// Dir is the server's folder; Dir/Bucket/KEY is an object.
	Dir string
	cmd *exec.Cmd
}

// Program finds versitygw by VARVE_VERSITYGW, on PATH or in the Go bin folder; it skips the test where it is missing.
func Program(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("VARVE_VERSITYGW"); p != "" {
		return p
	}
	if p, err := exec.LookPath("versitygw"); err == nil {
		return p
	}
	gopath := os.Getenv("GOPATH")
	if gopath == "" {
		if home, err := os.UserHomeDir(); err == nil {
			gopath = filepath.Join(home, "go")
		}
	}
	p := filepath.Join(gopath, "bin", "versitygw")
	if _, err := os.Stat(p); err != nil {
		t.Skip("SKIPPED: no S3 server; go install github.com/versity/versitygw/cmd/versitygw@v1.8.0 or set VARVE_VERSITYGW")
	}
	return p
}

// Start runs a server on a free loopback port and waits until it answers.
func Start(t testing.TB) *Server {
	t.Helper()
	program := Program(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	s := &Server{Endpoint: "http://" + addr, AccessKey: "varvetest", SecretKey: "varvetestsecret", Bucket: "varve-test", Dir: t.TempDir()}
	if err := os.Mkdir(filepath.Join(s.Dir, s.Bucket), 0o755); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	s.cmd = exec.Command(program, "--quiet", "--keep-alive", "--port", addr, "posix", s.Dir)
	s.cmd.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+s.AccessKey, "ROOT_SECRET_KEY="+s.SecretKey)
	s.cmd.Stdout, s.cmd.Stderr = &log, &log
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- s.cmd.Wait() }()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-exited
	})
	if err := s.ready(exited); err != nil {
		t.Fatalf("versitygw: %v\n%s", err, log.String())
	}
	return s
}

func (s *Server) ready(exited chan error) error {
	b, err := s3.New(s.Options())
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := b.Stat(ctx, "nothing")
		if errors.Is(err, objstore.ErrNotFound) {
			return nil
		}
		select {
		case werr := <-exited:
			exited <- werr
			return fmt.Errorf("ended at once: %v", werr)
		case <-ctx.Done():
			return fmt.Errorf("no answer: %w", err)
		case <-tick.C:
		}
	}
}

// Options reach the server's bucket.
func (s *Server) Options() s3.Options {
	return s3.Options{Bucket: s.Bucket, Endpoint: s.Endpoint, PathStyle: true, AccessKey: s.AccessKey, SecretKey: s.SecretKey}
}

// URL is the bucket as bucket.Open takes it, without credentials.
func (s *Server) URL() string { return "s3://" + s.Bucket + "?path-style=true&endpoint=" + s.Endpoint }
