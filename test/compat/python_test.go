package compat

import (
	"path/filepath"
	"testing"
	"time"
)

// script runs a script of this folder on a plain and on a tiered topic: it writes, then reads all with a group, then asks and
// changes things as an admin does. It ends with an error where anything is not as it should be.
func script(t *testing.T, b *broker, name string, interpreter ...string) {
	t.Helper()
	both(t, b, name, 3, func(t *testing.T, topic string, toTier func(t *testing.T)) {
		run := func(step string) {
			command{limit: 90 * time.Second}.run(t, append(interpreter, b.addr, topic, step)...)
		}
		run("write")
		toTier(t)
		run("read")
		run("admin")
	})
}

// debianPython is the interpreter that Debian's packages are installed for.
func debianPython(t *testing.T, module string) string {
	t.Helper()
	const python = "/usr/bin/python3"
	if _, _, err := (command{}).try(t, python, "-c", "import "+module); err != nil {
		t.Skipf("SKIPPED: no Python module %s; run test/compat/setup", module)
	}
	return python
}

func TestKafkaPython(t *testing.T) {
	b := start(t)
	script(t, b, "kafka-python", debianPython(t, "kafka"), filepath.Join("py", "kafka_python.py"))
}

func TestConfluentPython(t *testing.T) {
	b := start(t)
	script(t, b, "confluent-python", debianPython(t, "confluent_kafka"), filepath.Join("py", "confluent.py"))
}

// Read, process, write: librdkafka's transactions with the offsets of what was read, one broker and three.
func TestConfluentPythonTransactions(t *testing.T) {
	asked(t)
	python := []string{debianPython(t, "confluent_kafka"), filepath.Join("py", "confluent.py")}
	check := func(t *testing.T, b *broker) {
		both(t, b, "confluent-transactions", 3, func(t *testing.T, topic string, toTier func(t *testing.T)) {
			b.topic(t, topic+"-in", 3)
			run := func(step string) {
				command{limit: 2 * time.Minute}.run(t, append(python, b.addr, topic, step)...)
			}
			run("transact")
			toTier(t)
			run("committed")
		})
	}
	t.Run("one", func(t *testing.T) { check(t, start(t)) })
	t.Run("three", func(t *testing.T) { check(t, startCluster(t, 3)) })
}

func TestKafkaJS(t *testing.T) {
	b := start(t)
	node := need(t, "node")
	if found, _ := filepath.Glob("js/node_modules/kafkajs"); len(found) == 0 {
		t.Skip("SKIPPED: kafkajs is missing; run test/compat/setup")
	}
	script(t, b, "kafkajs", node, filepath.Join("js", "kafkajs.js"))
}
