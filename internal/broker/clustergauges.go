package broker

import (
	"github.com/prometheus/client_golang/prometheus"
)

// clusterGauges are Kafka's metrics of a controller (ControllerMetadataMetrics), made of this node's image: all nodes tell the same, but for
// who is active.
type clusterGauges struct{ b *broker }

var (
	descActive     = prometheus.NewDesc("kafka_controller_kafkacontroller_activecontrollercount", "1 on the node that leads the metadata quorum, else 0.", nil, nil)
	descLeaderless = prometheus.NewDesc("kafka_controller_kafkacontroller_offlinepartitionscount", "Partitions of the cluster without a leader.", nil, nil)
	descImbalance  = prometheus.NewDesc("kafka_controller_kafkacontroller_preferredreplicaimbalancecount", "Partitions of the cluster that another than their first replica leads.", nil, nil)
	descTopics     = prometheus.NewDesc("kafka_controller_kafkacontroller_globaltopiccount", "Topics of the cluster.", nil, nil)
	descAll        = prometheus.NewDesc("kafka_controller_kafkacontroller_globalpartitioncount", "Partitions of the cluster.", nil, nil)
	descBrokers    = prometheus.NewDesc("kafka_controller_kafkacontroller_activebrokercount", "Registered brokers that are not fenced.", nil, nil)
	descFenced     = prometheus.NewDesc("kafka_controller_kafkacontroller_fencedbrokercount", "Registered brokers that are fenced.", nil, nil)
)

// Describe implements prometheus.Collector.
func (g clusterGauges) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descActive, descLeaderless, descImbalance, descTopics, descAll, descBrokers, descFenced} {
		c <- d
	}
}

// Collect implements prometheus.Collector.
func (g clusterGauges) Collect(c chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v))
	}
	active := 0
	if g.b.quorum.Leading() {
		active = 1
	}
	gauge(descActive, active)
	img := g.b.quorum.Image()
	all, leaderless, imbalance, fenced := 0, 0, 0, 0
	for _, t := range img.TopicsByID {
		for _, p := range t.Partitions {
			all++
			if p.Leader < 0 {
				leaderless++
			}
			if p.Leader != p.Replicas[0] {
				imbalance++
			}
		}
	}
	for _, b := range img.Brokers {
		if b.Fenced {
			fenced++
		}
	}
	gauge(descLeaderless, leaderless)
	gauge(descImbalance, imbalance)
	gauge(descTopics, len(img.TopicsByID))
	gauge(descAll, all)
	gauge(descBrokers, len(img.Brokers)-fenced)
	gauge(descFenced, fenced)
}
