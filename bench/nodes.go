package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// nodes are the brokers of one cluster under measurement, with ids from 1 on.
type nodes struct {
	*process        // what clients see: the name, and the addresses of all
	b        *bench // the process id is that of node 1
	kafka    bool
	dir      string
	sets     []string
	ports    []int
	running  map[int]*process // of Varve, by id
}

// startNodes starts an empty cluster of each kind. Settings are given to both.
func (b *bench) startNodes(name string, count int, tiered bool, sets ...string) (v, k *nodes, err error) {
	if v, err = b.varveNodes("varve-"+name, count, sets); err != nil || b.kafka == "" {
		return v, nil, err
	}
	args := []string{"--nodes", strconv.Itoa(count)}
	if tiered {
		args = append(args, "--tiered")
	}
	for _, s := range sets {
		args = append(args, "--set", s)
	}
	p, err := b.startKafka("kafka-"+name, args...)
	if err != nil {
		return v, nil, err
	}
	return v, &nodes{process: p, b: b, kafka: true, dir: b.path("kafka-" + name)}, nil
}

func (b *bench) varveNodes(name string, count int, sets []string) (*nodes, error) {
	n := &nodes{b: b, dir: b.path(name), sets: sets, running: map[int]*process{}}
	first, err := freeRun(count + 1)
	if err != nil {
		return nil, err
	}
	var addresses []string
	for i := range count {
		n.ports = append(n.ports, first+i)
		addresses = append(addresses, fmt.Sprintf("127.0.0.1:%d", first+i))
	}
	for id := 1; id <= count; id++ {
		if err := n.launch(id); err != nil {
			return nil, err
		}
	}
	n.process = &process{name: name, address: strings.Join(addresses, ","), pid: n.running[1].pid}
	n.process.end = func() error {
		var err error
		for _, p := range n.running {
			err = errors.Join(err, p.end())
		}
		return err
	}
	return n, n.whole(count)
}

// freeRun finds count neighbouring ports.
func freeRun(count int) (int, error) {
next:
	for port := 21000; port < 30000; port += count {
		for i := range count {
			ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+i))
			if err != nil {
				continue next
			}
			ln.Close()
		}
		return port, nil
	}
	return 0, fmt.Errorf("no %d neighbouring ports are free", count)
}

// launch starts a node of Varve, for the first time or again.
func (n *nodes) launch(id int) error {
	var voters []string
	for i, port := range n.ports {
		voters = append(voters, fmt.Sprintf("%d@127.0.0.1:%d", i+1, port))
	}
	args := []string{n.b.binary, "server", "--id", strconv.Itoa(id), "--dir", n.folder(id), "--listen", fmt.Sprintf("127.0.0.1:%d", n.ports[id-1]),
		"--bucket", filepath.Join(n.dir, "bucket"), "--voters", strings.Join(voters, ","), "--http", fmt.Sprintf("127.0.0.1:%d", n.ports[id-1]+500)}
	for _, s := range n.sets {
		args = append(args, "--set", s)
	}
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return err
	}
	p, err := n.b.command(fmt.Sprintf("%s-node%d", filepath.Base(n.dir), id), nil, args...)
	n.running[id] = p
	return err
}

// folder is where a node keeps its partitions.
func (n *nodes) folder(id int) string {
	if n.kafka {
		return filepath.Join(n.dir, fmt.Sprintf("node%d", id), "data")
	}
	return filepath.Join(n.dir, strconv.Itoa(id))
}

// whole waits until all brokers are known to the cluster.
func (n *nodes) whole(count int) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(n.address, ",")...), kgo.MetadataMinAge(10*time.Millisecond))
	if err != nil {
		return err
	}
	defer cl.Close()
	return n.b.poll("all brokers", func() bool {
		brokers, err := kadm.NewClient(cl).ListBrokers(n.b.ctx)
		return err == nil && len(brokers) == count
	})
}

// kill ends a node at once, or lets it leave; start brings it back.
func (n *nodes) kill(id int, clean bool) error {
	if !n.kafka {
		p := n.running[id]
		if clean {
			return p.end()
		}
		return p.kill()
	}
	args := []string{"stop", "--dir", n.dir, "--node", strconv.Itoa(id)}
	if !clean {
		args = append(args, "--kill")
	}
	if out, err := exec.Command(n.b.kafka, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("stop node %d: %w: %s", id, err, out)
	}
	return nil
}

func (n *nodes) start(id int) error {
	if !n.kafka {
		return n.launch(id)
	}
	if out, err := exec.Command(n.b.kafka, "start", "--dir", n.dir, "--node", strconv.Itoa(id)).CombinedOutput(); err != nil {
		return fmt.Errorf("start node %d: %w: %s", id, err, out)
	}
	return nil
}

// logBytes is the size of the segments that a node has of a topic.
func (n *nodes) logBytes(id int, topic string) (bytes int64) {
	filepath.WalkDir(n.dirOfLogs(id), func(path string, d fs.DirEntry, err error) error {
		folder := filepath.Base(filepath.Dir(path)) // a dot is in those of partitions that wait for their removal
		if err == nil && strings.HasSuffix(path, ".log") && strings.HasPrefix(folder, topic+"-") && !strings.Contains(folder, ".") {
			if info, err := d.Info(); err == nil {
				bytes += info.Size()
			}
		}
		return nil
	})
	return bytes
}

// dirOfLogs is the folder in which a node's partitions are found.
func (n *nodes) dirOfLogs(id int) string {
	if n.kafka {
		return filepath.Join(n.dir, fmt.Sprintf("node%d", id))
	}
	return n.folder(id)
}

// poll waits until cond holds, for two minutes at most.
func (b *bench) poll(what string, cond func() bool) error {
	deadline := time.Now().Add(2 * time.Minute)
	for !cond() {
		if b.ctx.Err() != nil {
			return b.ctx.Err()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("waited two minutes for %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}
