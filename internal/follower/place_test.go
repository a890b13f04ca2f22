package follower

import (
	"testing"

	"github.com/varve-io/varve/internal/partition"
)

// The table of the follower protocol (KIP-405 cases 1 to 2.2, KIP-1023 with its test matrix, hazards H1, H2 and H25).
// pending -1 is a leader that does not know, or is asked by nobody.
func TestPlace(t *testing.T) {
	on, off := Config{Tiered: true, FromTier: true}, Config{Tiered: true}
	compacted := Config{Tiered: true, FromTier: true, Compacted: true}
	untiered := Config{FromTier: true}
	empty := partition.Following{Empty: true}
	has := func(start, end int64) partition.Following { return partition.Following{LogStart: start, End: end} }
	const none = -1
	for name, c := range map[string]struct {
		f                          partition.Following
		start, local, end, pending int64
		config                     Config
		want                       placement
	}{
		"empty leader":                             {empty, 0, 0, 0, 0, on, placement{kind: stay}},
		"nothing uploaded, all local":              {empty, 0, 0, 200, 0, on, placement{kind: stay}},
		"unknown, all local: copy from 0":          {empty, 0, 0, 200, none, on, placement{kind: stay}},
		"gap and unknown: later":                   {empty, 0, 10, 200, none, on, placement{kind: retry}},
		"slow upload":                              {empty, 0, 10, 200, 10, on, placement{fromTier, 10}},
		"fast upload":                              {empty, 0, 10, 200, 150, on, placement{fromTier, 150}},
		"fast upload, option off":                  {empty, 0, 10, 200, 150, off, placement{fromTier, 10}},
		"all uploaded, idle leader (H2)":           {empty, 0, 10, 200, 200, on, placement{fromTier, 200}},
		"all uploaded, nothing local":              {empty, 0, 200, 200, 200, on, placement{fromTier, 200}},
		"offset 0 still local (their hole)":        {empty, 0, 0, 200, 150, on, placement{fromTier, 150}},
		"offset 0 still local, option off":         {empty, 0, 0, 200, 150, off, placement{kind: stay}},
		"trimmed, empty, nothing uploaded (H1)":    {empty, 10, 10, 10, 10, on, placement{plain, 10}},
		"trimmed, nothing uploaded (H1)":           {empty, 10, 10, 200, none, on, placement{plain, 10}},
		"trimmed, stale upload below the start":    {empty, 10, 10, 200, 5, on, placement{plain, 10}},
		"trimmed, uploaded":                        {empty, 10, 10, 200, 150, on, placement{fromTier, 150}},
		"pending below the local start (H25)":      {empty, 10, 100, 200, 50, on, placement{fromTier, 100}},
		"stale upload, local start above (H25)":    {empty, 10, 100, 200, 5, on, placement{fromTier, 100}},
		"compacted: the option does not hold":      {empty, 0, 10, 200, 150, compacted, placement{fromTier, 10}},
		"not tiered, below the log start (2.1)":    {has(0, 5), 10, 10, 200, none, untiered, placement{plain, 10}},
		"not tiered, empty":                        {empty, 10, 10, 200, none, untiered, placement{plain, 10}},
		"not tiered, in range":                     {has(0, 50), 10, 10, 200, none, untiered, placement{kind: stay}},
		"not tiered, leader has less":              {has(0, 250), 0, 0, 200, none, untiered, placement{cut, 200}},
		"not tiered, leader begins above it all":   {has(0, 50), 100, 100, 200, none, untiered, placement{plain, 100}},
		"leader has less (unclean)":                {has(0, 250), 0, 100, 200, 150, on, placement{cut, 200}},
		"leader begins anew below it":              {has(100, 250), 0, 0, 0, 0, on, placement{cut, 0}},
		"behind the local start (2.2), option off": {has(0, 50), 0, 100, 200, 150, off, placement{fromTier, 100}},
		"behind the local start (2.2), option on":  {has(0, 50), 0, 100, 200, 150, on, placement{fromTier, 150}},
		"behind the local start and unknown":       {has(0, 50), 0, 100, 200, none, on, placement{kind: retry}},
		"below the log start, tiered (2.1)":        {has(0, 5), 20, 100, 200, 150, on, placement{fromTier, 150}},
		"in the local log (1)":                     {has(0, 120), 0, 100, 200, 150, on, placement{kind: stay}},
		"in the local log, and unknown":            {has(0, 120), 0, 100, 200, none, on, placement{kind: stay}},
		"its end vouches for what it has":          {partition.Following{Empty: true, LogStart: 200, End: 200}, 0, 100, 200, 150, on, placement{kind: stay}},
		"records came back: the state before them": {partition.Following{Empty: true, LogStart: 200, End: 200}, 0, 100, 200, 200, on, placement{fromTier, 200}},
		"started from the tier before, and idle":   {partition.Following{Empty: true, LogStart: 0, End: 200}, 0, 100, 200, 200, on, placement{kind: stay}},
		"started from the tier, more is uploaded":  {partition.Following{Empty: true, LogStart: 0, End: 150}, 0, 100, 400, 300, on, placement{fromTier, 300}},
		"started from the tier, leader has less":   {partition.Following{Empty: true, LogStart: 0, End: 150}, 0, 50, 120, 100, on, placement{fromTier, 100}},
	} {
		if got := place(c.f, Offsets{c.start, c.local, c.end, c.pending}, c.config); got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}
