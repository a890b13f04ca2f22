package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// process is a broker or store under measurement.
type process struct {
	name    string
	address string
	pid     int
	end     func() error
	kill    func() error // at once
}

// prepare builds Varve and looks for the peers.
func (b *bench) prepare() error {
	b.binary = b.path("varve")
	if out, err := exec.Command("go", "build", "-o", b.binary, "./cmd/varve").CombinedOutput(); err != nil {
		return fmt.Errorf("build varve: %w\n%s", err, out)
	}
	shared := os.Getenv("VARVE_SHARED")
	if shared == "" {
		shared = filepath.Join("..", "shared")
	}
	script := filepath.Join(shared, "peers", "apache-kafka", "kafka")
	if _, err := os.Stat(script); err != nil {
		b.note("Apache Kafka was not measured: %s is missing", script)
	} else if out, err := exec.Command(script, "fetch").CombinedOutput(); err != nil {
		b.note("Apache Kafka was not measured: %v: %.200s", err, out)
	} else {
		b.kafka = script
	}
	for _, candidate := range []string{os.Getenv("VARVE_VERSITYGW"), "versitygw"} {
		if path, err := exec.LookPath(candidate); candidate != "" && err == nil {
			b.versitygw = path
			return nil
		}
	}
	b.note("S3 was not measured: no versitygw (go -C tools build -o DIR tool, VARVE_VERSITYGW)")
	return nil
}

func (b *bench) close() {
	for i := len(b.running) - 1; i >= 0; i-- {
		b.running[i].end()
	}
}

func freePort() (int, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port, nil
}

// freePair finds two neighbouring ports below the range from which the system takes its own: Kafka's broker and controller.
func freePair() (int, error) {
	for port := 21000; port < 30000; port += 2 {
		a, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		b, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+1))
		a.Close()
		if err == nil {
			b.Close()
			return port, nil
		}
	}
	return 0, errors.New("no two neighbouring ports are free")
}

// command starts a program that ends with SIGTERM.
func (b *bench) command(name string, env []string, args ...string) (*process, error) {
	log, err := os.Create(b.path(name + ".log"))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	p := &process{name: name, pid: cmd.Process.Pid}
	done := false
	p.end = func() error {
		if done {
			return nil
		}
		done = true
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-ended:
			return errors.Join(err, log.Close())
		case <-time.After(30 * time.Second):
			cmd.Process.Kill()
			return errors.Join(errors.New(name+" had to be killed"), <-ended, log.Close())
		}
	}
	p.kill = func() error {
		done = true
		cmd.Process.Kill()
		<-ended
		return log.Close()
	}
	b.running = append(b.running, p)
	return p, nil
}

// startVarve starts Varve on the folder and returns when it answers, and how long that took.
func (b *bench) startVarve(folder string, sets ...string) (*process, time.Duration, error) {
	port, err := freePort()
	if err != nil {
		return nil, 0, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	args := []string{b.binary, "server", "--dir", b.path(folder), "--listen", address}
	for _, s := range sets {
		args = append(args, "--set", s)
	}
	began := time.Now()
	p, err := b.command(folder, nil, args...)
	if err != nil {
		return nil, 0, err
	}
	p.address = address
	err = answers(b.ctx, address, began)
	return p, time.Since(began), err
}

// startKafka starts Kafka on the folder, again if it was there before.
func (b *bench) startKafka(folder string, args ...string) (*process, error) {
	dir := b.path(folder)
	all := []string{"start", "--dir", dir}
	if _, err := os.Stat(filepath.Join(dir, "cluster")); err != nil {
		port, err := freePair()
		if err != nil {
			return nil, err
		}
		all = append(append(all, "--port", strconv.Itoa(port)), args...)
	}
	out, err := exec.Command(b.kafka, all...).CombinedOutput()
	if err != nil && bytes.Contains(out, []byte("argument --cluster-id")) {
		// The script draws a cluster id, and now and then one that looks like a flag.
		if err := os.RemoveAll(dir); err != nil {
			return nil, err
		}
		out, err = exec.Command(b.kafka, all...).CombinedOutput()
	}
	if err != nil {
		return nil, fmt.Errorf("start kafka: %w: %s", err, out)
	}
	address, err := exec.Command(b.kafka, "bootstrap", "--dir", dir).Output()
	if err != nil {
		return nil, err
	}
	pid, err := os.ReadFile(filepath.Join(dir, "node1", "pid"))
	if err != nil {
		return nil, err
	}
	p := &process{name: folder, address: strings.TrimSpace(string(address))}
	if p.pid, err = strconv.Atoi(strings.TrimSpace(string(pid))); err != nil {
		return nil, err
	}
	done := false
	p.end = func() error {
		if done {
			return nil
		}
		done = true
		return exec.Command(b.kafka, "stop", "--dir", dir).Run()
	}
	b.running = append(b.running, p)
	return p, nil
}

// answers waits until the broker answers Metadata.
func answers(ctx context.Context, address string, began time.Time) error {
	for {
		cl, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.RetryTimeout(200*time.Millisecond), kgo.DialTimeout(100*time.Millisecond))
		if err != nil {
			return err
		}
		try, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
		resp, err := kmsg.NewPtrMetadataRequest().RequestWith(try, cl)
		cancel()
		cl.Close()
		if err == nil && len(resp.Brokers) > 0 {
			return nil
		}
		if time.Since(began) > 60*time.Second {
			return fmt.Errorf("%s does not answer after a minute: %w", address, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// cpu is the processor time of a process so far, in seconds, its threads included.
func cpu(pid int) float64 {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	user, _ := strconv.ParseFloat(string(f[11]), 64)
	system, _ := strconv.ParseFloat(string(f[12]), 64)
	return (user + system) / 100
}

// resident is the memory of a process, in MB.
func resident(pid int) float64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(status), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kb / 1000
		}
	}
	return 0
}
