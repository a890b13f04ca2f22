package quota

import (
	"fmt"
	"testing"
	"time"

	"github.com/varve-io/varve/internal/metadata"
)

func TestTheMostSpecialEntityCounts(t *testing.T) {
	name := func(s string) metadata.QuotaName {
		switch s {
		case "":
			return metadata.QuotaName{}
		case "*":
			return metadata.QuotaName{Default: true}
		}
		return metadata.QuotaName{Named: true, Name: s}
	}
	quotas := map[metadata.QuotaEntity]map[string]float64{}
	// From the least special on: each that comes outdoes those before it, for user u and client c.
	for i, e := range []struct {
		user, client string
		account      Account
	}{
		{"", "*", Account{"k", "", "c"}}, {"", "c", Account{"k", "", "c"}}, {"*", "", Account{"k", "u", ""}}, {"*", "*", Account{"k", "u", "c"}},
		{"*", "c", Account{"k", "u", "c"}}, {"u", "", Account{"k", "u", ""}}, {"u", "*", Account{"k", "u", "c"}}, {"u", "c", Account{"k", "u", "c"}},
	} {
		quotas[metadata.QuotaEntity{User: name(e.user), ClientID: name(e.client)}] = map[string]float64{"k": float64(i + 1)}
		if rate, account, ok := Find(quotas, "k", "u", "c"); !ok || rate != float64(i+1) || account != e.account {
			t.Errorf("%v: %v %v %v", e, rate, account, ok)
		}
		if _, _, ok := Find(quotas, "other", "u", "c"); ok {
			t.Error("a quota for another key")
		}
	}
	if _, _, ok := Find(quotas, "k", "v", "d"); !ok {
		t.Error("the defaults hold for others, too")
	}
	if _, _, ok := Find(nil, "k", "u", "c"); ok {
		t.Error("a quota where there is none")
	}
}

func TestAccount(t *testing.T) {
	var a Accounts
	id, now := Account{Key: "k", Client: "c"}, time.Unix(1000, 0)
	const rate = 1000
	if left, wait := a.Left(id, rate, now); left != 10_000 || wait != 0 {
		t.Fatal(left, wait)
	}
	if wait := a.Take(id, rate, 10_000, now); wait != 0 {
		t.Fatal(wait)
	}
	if left, wait := a.Left(id, rate, now); left != 0 || wait != time.Millisecond {
		t.Fatal(left, wait)
	}
	if wait := a.Take(id, rate, 2000, now); wait != 2*time.Second {
		t.Fatal(wait)
	}
	now = now.Add(time.Second)
	if left, wait := a.Left(id, rate, now); left != 0 || wait != 1001*time.Millisecond {
		t.Fatal(left, wait)
	}
	// What is far too much is waited for in parts.
	if wait := a.Take(id, rate, 50_000, now); wait != Window {
		t.Fatal(wait)
	}
	now = now.Add(30 * time.Second)
	if _, wait := a.Left(id, rate, now); wait != Window {
		t.Fatal(wait)
	}
	now = now.Add(time.Hour)
	if left, _ := a.Left(id, rate, now); left != 10_000 {
		t.Fatal(left)
	}
	a.Take(id, rate, 0, now)
	// A lower quota counts at once, and a clock that goes back is no gain.
	if left, _ := a.Left(id, 10, now); left != 100 {
		t.Fatal(left)
	}
	a.Take(id, rate, 10_000, now)
	if left, _ := a.Left(id, rate, now.Add(-time.Hour)); left != 0 {
		t.Fatal(left)
	}
}

// Clients make their ids up: the accounts of those that have gone are forgotten.
func TestAccountsAreBounded(t *testing.T) {
	var a Accounts
	now := time.Unix(1000, 0)
	for i := range 5 * accountsMax {
		now = now.Add(10 * time.Millisecond)
		a.Take(Account{Key: "k", Client: fmt.Sprint(i)}, 1000, 10, now)
	}
	if len(a.balances) > accountsMax+1 {
		t.Fatal(len(a.balances))
	}
}
