package main

import (
	"errors"
	"testing"
	"time"
)

func TestBenchResult(t *testing.T) {
	var latencies []time.Duration
	for i := range 1000 {
		latencies = append(latencies, time.Duration(1000-i)*time.Millisecond) // 1 to 1000 ms, not in order
	}
	r := newBenchResult("t", 1000, 5_000_000, 2*time.Second, latencies)
	if r.Rate != 500 || r.MB != 2.5 || r.P50 != 500 || r.P99 != 990 || r.P999 != 999 {
		t.Errorf("%+v", r)
	}
	if one := newBenchResult("t", 1, 1, time.Second, []time.Duration{7 * time.Millisecond}); one.P50 != 7 || one.P999 != 7 {
		t.Errorf("%+v", one)
	}
	if none := newBenchResult("t", 0, 0, 0, nil); none.P50 != 0 || none.Rate != 0 {
		t.Errorf("%+v", none)
	}
}

func TestBenchUsage(t *testing.T) {
	for _, args := range [][]string{{"bench", "produce"}, {"bench", "produce", "t", "-n", "0"}, {"bench", "produce", "t", "--acks", "2"}, {"bench", "produce", "t", "--compression", "rar"}, {"bench", "consume"}} {
		_, err := called(t, args...)
		var usage usageError
		if !errors.As(err, &usage) {
			t.Errorf("%v: %v", args, err)
		}
	}
}
