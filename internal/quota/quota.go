// Package quota bounds the byte rates of clients (KIP-13, KIP-55, KIP-219). It finds the quota of a client and keeps an account for it: bytes
// come in at the quota's rate, up to what a window holds, and whoever overdraws waits until the account is level again. Kafka measures a rate over
// the window instead, which lets a client that used the window up at once stand still for as long.
package quota

import (
	"maps"
	"math"
	"sync"
	"time"

	"github.com/varve-io/varve/internal/metadata"
)

// Window is how many seconds of its rate a client may use at once, and the longest wait that it is told at once.
const Window = 10 * time.Second

// Anonymous is the user of connections without authentication.
const Anonymous = "ANONYMOUS"

// Account names what is charged: a quota for many, of a default entity, has one for each of them.
type Account struct{ Key, User, Client string }

// Find returns the quota of a client for a key (metadata.ProducerByteRate and so on), in bytes per second, and the account that it is charged to.
// The most special of the entities that fit counts (KIP-55).
func Find(quotas map[metadata.QuotaEntity]map[string]float64, key, user, client string) (rate float64, account Account, ok bool) {
	if len(quotas) == 0 {
		return 0, account, false
	}
	none, anyone := metadata.QuotaName{}, metadata.QuotaName{Default: true}
	u, c := metadata.QuotaName{Named: true, Name: user}, metadata.QuotaName{Named: true, Name: client}
	for _, e := range []metadata.QuotaEntity{{User: u, ClientID: c}, {User: u, ClientID: anyone}, {User: u, ClientID: none}, {User: anyone, ClientID: c}, {User: anyone, ClientID: anyone},
		{User: anyone, ClientID: none}, {User: none, ClientID: c}, {User: none, ClientID: anyone}} {
		if rate, ok := quotas[e][key]; ok {
			account = Account{Key: key}
			if e.User != none {
				account.User = user
			}
			if e.ClientID != none {
				account.Client = client
			}
			return rate, account, true
		}
	}
	return 0, account, false
}

// balance is what an account held at a time, in bytes; below 0 if it is overdrawn.
type balance struct {
	bytes float64
	at    time.Time
}

// Accounts are those of one broker. The zero value is ready, and safe for concurrent use.
type Accounts struct {
	mu       sync.Mutex
	balances map[Account]balance
}

// accountsMax is from how many accounts on those that are full, which are as good as new, are forgotten.
const accountsMax = 10_000

func full(rate float64) float64 { return rate * Window.Seconds() }

func (b balance) next(rate float64, now time.Time) balance {
	return balance{min(b.bytes+rate*max(now.Sub(b.at).Seconds(), 0), full(rate)), now}
}

func (a *Accounts) of(id Account, rate float64, now time.Time) balance {
	b, known := a.balances[id]
	if !known {
		return balance{full(rate), now}
	}
	return b.next(rate, now)
}

// Left returns how many bytes an account holds, and if that is none, how long until it holds some.
func (a *Accounts) Left(id Account, rate float64, now time.Time) (bytes int64, wait time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.of(id, rate, now)
	if b.bytes >= 1 {
		return int64(min(b.bytes, 1<<62)), 0
	}
	return 0, delay(1-b.bytes, rate)
}

// Take charges bytes to an account and returns how long whoever they are of must wait.
func (a *Accounts) Take(id Account, rate float64, bytes int64, now time.Time) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.of(id, rate, now)
	b.bytes -= float64(bytes)
	if a.balances == nil {
		a.balances = map[Account]balance{}
	}
	if _, known := a.balances[id]; !known && len(a.balances) >= accountsMax {
		// The rates of others are not known here: a window without use fills any account.
		maps.DeleteFunc(a.balances, func(_ Account, b balance) bool { return b.bytes >= 0 && now.Sub(b.at) > Window })
	}
	a.balances[id] = b
	if b.bytes >= 0 {
		return 0
	}
	return delay(-b.bytes, rate)
}

func delay(bytes, rate float64) time.Duration {
	if seconds := bytes / rate; seconds < Window.Seconds() {
		return time.Duration(math.Ceil(seconds*1000)) * time.Millisecond // as clients are told
	}
	return Window
}
