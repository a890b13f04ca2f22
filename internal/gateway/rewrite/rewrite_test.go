package rewrite

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/varve-io/varve/internal/wire"
)

// shift moves every broker to a host and port of its own.
func shift(node int32, host string, port int32) (string, int32, bool) {
	return fmt.Sprintf("gateway-of-%s", host), port + 1000 + node%100, true
}

// fill gives a message random values, with unknown tagged fields where there may be some.
func fill(r *rand.Rand, v reflect.Value, flexible bool) {
	switch v.Kind() {
	case reflect.Struct:
		if tags, ok := v.Addr().Interface().(*kmsg.Tags); ok {
			if flexible && r.IntN(2) == 0 {
				tags.Set(uint32(100+r.IntN(5)), []byte("later"))
			}
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).Name != "Version" {
				fill(r, v.Field(i), flexible)
			}
		}
	case reflect.Pointer:
		if r.IntN(3) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem(), flexible)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes([]byte(fmt.Sprint("bytes", r.IntN(1000))))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), r.IntN(3), 3))
		for i := range v.Len() {
			fill(r, v.Index(i), flexible)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(r, v.Index(i), flexible)
		}
	case reflect.String:
		v.SetString(fmt.Sprint("text", r.IntN(1000)))
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(r.Int64N(100))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		v.SetUint(r.Uint64N(100))
	}
}

// move changes every address of a message as shift does, and knows of messages only what addresses are called.
func move(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		host, port, node := v.FieldByName("Host"), v.FieldByName("Port"), v.FieldByName("NodeID")
		if host.IsValid() && port.IsValid() && node.IsValid() && host.String() != "" {
			if code := v.FieldByName("ErrorCode"); !code.IsValid() || code.Int() == 0 {
				h, p, _ := shift(int32(node.Int()), host.String(), int32(port.Int()))
				host.SetString(h)
				port.SetInt(int64(p))
			}
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				move(v.Field(i))
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			move(v.Index(i))
		}
	}
}

// decode reads what encoding kept: not every version has every field.
func decode(t *testing.T, key, version int16, frame []byte) kmsg.Response {
	t.Helper()
	resp := kmsg.ResponseForKey(key)
	resp.SetVersion(version)
	head := 8
	if resp.IsFlexible() && key != ApiVersions {
		head++
	}
	if err := resp.ReadFrom(frame[head:]); err != nil {
		t.Fatal(err)
	}
	return resp
}

func TestAnswersKeepAllButAddresses(t *testing.T) {
	for key := range first {
		if key == ApiVersions {
			continue
		}
		most := kmsg.ResponseForKey(key).MaxVersion()
		for version := int16(0); version <= most; version++ {
			t.Run(fmt.Sprintf("%s v%d", kmsg.NameForKey(key), version), func(t *testing.T) {
				for seed := range uint64(50) {
					r := rand.New(rand.NewPCG(seed, uint64(version)))
					resp := kmsg.ResponseForKey(key)
					resp.SetVersion(version)
					fill(r, reflect.ValueOf(resp).Elem(), resp.IsFlexible())
					frame := wire.AppendResponse(nil, 77, resp)
					want := decode(t, key, version, frame)
					if d, ok := want.(*kmsg.DescribeClusterResponse); !ok || d.EndpointType != controllers {
						move(reflect.ValueOf(want).Elem())
					}
					if !Wanted(key, version) {
						if again := wire.AppendResponse(nil, 77, want); !bytes.Equal(again, frame) {
							t.Fatal("an answer that is not wanted has addresses")
						}
						continue
					}
					got, err := Answer(key, version, bytes.Clone(frame), shift)
					if err != nil {
						t.Fatal(err)
					}
					if want := wire.AppendResponse(nil, 77, want); !bytes.Equal(got, want) {
						t.Fatalf("seed %d:\n got %x\nwant %x", seed, got, want)
					}
				}
			})
		}
	}
}

func TestBrokersWithoutAddressAreLeftOut(t *testing.T) {
	only2 := func(node int32, host string, port int32) (string, int32, bool) { return "gw", 9202, node == 2 }
	m := kmsg.NewPtrMetadataResponse()
	m.Version = 9
	for id := range int32(4) {
		b := kmsg.NewMetadataResponseBroker()
		b.NodeID, b.Host, b.Port = id, "b", 9092
		m.Brokers = append(m.Brokers, b)
	}
	out, err := Answer(Metadata, 9, wire.AppendResponse(nil, 1, m), only2)
	if err != nil {
		t.Fatal(err)
	}
	if got := decode(t, Metadata, 9, out).(*kmsg.MetadataResponse).Brokers; len(got) != 1 || got[0].NodeID != 2 || got[0].Host != "gw" || got[0].Port != 9202 {
		t.Errorf("%+v", got)
	}
	for version := range int16(7) {
		f := kmsg.NewPtrFindCoordinatorResponse()
		f.Version, f.NodeID, f.Host, f.Port = version, 3, "b", 9092
		c := kmsg.NewFindCoordinatorResponseCoordinator()
		c.Key, c.NodeID, c.Host, c.Port = "g", 3, "b", 9092
		if f.Coordinators = append(f.Coordinators, c); version >= 4 {
			f.Host = ""
		}
		out, err := Answer(FindCoordinator, version, wire.AppendResponse(nil, 1, f), only2)
		if err != nil {
			t.Fatal(err)
		}
		got := decode(t, FindCoordinator, version, out).(*kmsg.FindCoordinatorResponse)
		code, host := got.ErrorCode, got.Host
		if version >= 4 {
			code, host = got.Coordinators[0].ErrorCode, got.Coordinators[0].Host
		}
		if code != errCoordinatorNotAvailable || host != "" {
			t.Errorf("v%d: %+v", version, got)
		}
	}
}

// A broker newer than us is held to versions whose answers we can read; everything else of its offer stays.
func TestVersionsAreLimited(t *testing.T) {
	for version := int16(0); version <= kmsg.NewPtrApiVersionsResponse().MaxVersion(); version++ {
		r := kmsg.NewPtrApiVersionsResponse()
		r.Version = version
		add := func(key, least, most int16) {
			k := kmsg.NewApiVersionsResponseApiKey()
			k.ApiKey, k.MinVersion, k.MaxVersion = key, least, most
			r.ApiKeys = append(r.ApiKeys, k)
		}
		add(Metadata, 0, 99)
		add(Fetch, 4, 17)
		add(FindCoordinator, 98, 99)
		add(19, 0, 99) // CreateTopics has no addresses
		r.SupportedFeatures = []kmsg.ApiVersionsResponseSupportedFeature{{Name: "feature", MinVersion: 1, MaxVersion: 2}}
		out, err := Answer(ApiVersions, version, wire.AppendResponse(nil, 5, r), nil)
		if err != nil {
			t.Fatal(err)
		}
		got := decode(t, ApiVersions, version, out).(*kmsg.ApiVersionsResponse)
		want := map[int16][2]int16{Metadata: {0, kmsg.NewPtrMetadataResponse().MaxVersion()}, Fetch: {4, 17}, 19: {0, 99}}
		if len(got.ApiKeys) != len(want) {
			t.Errorf("v%d: %+v", version, got.ApiKeys)
		}
		for _, k := range got.ApiKeys {
			if want[k.ApiKey] != [2]int16{k.MinVersion, k.MaxVersion} {
				t.Errorf("v%d: %+v", version, k)
			}
		}
		if version >= 3 && (len(got.SupportedFeatures) != 1 || got.SupportedFeatures[0].Name != "feature") {
			t.Errorf("v%d: %+v", version, got.SupportedFeatures)
		}
	}
	// The answer to a version that the broker does not know is one of version 0.
	r := kmsg.NewPtrApiVersionsResponse()
	r.ErrorCode, r.ApiKeys = errUnsupportedVersion, []kmsg.ApiVersionsResponseApiKey{{ApiKey: ApiVersions, MinVersion: 0, MaxVersion: 4}}
	frame := wire.AppendResponse(nil, 5, r)
	if out, err := Answer(ApiVersions, 99, bytes.Clone(frame), nil); err != nil || !bytes.Equal(out, frame) {
		t.Errorf("%x, %v", out, err)
	}
}

func TestWhatCannotBeReadIsRefused(t *testing.T) {
	m := kmsg.NewPtrMetadataResponse()
	m.Version = 12
	m.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 1, Host: "b", Port: 1}}
	frame := wire.AppendResponse(nil, 1, m)
	for n := range len(frame) - 1 {
		if _, err := Answer(Metadata, 12, frame[:n], shift); !errors.Is(err, ErrAnswer) {
			t.Fatalf("%d bytes of %d: %v", n, len(frame), err)
		}
	}
	if _, err := Answer(Metadata, m.MaxVersion()+1, frame, shift); !errors.Is(err, ErrAnswer) {
		t.Error(err)
	}
}

func FuzzAnswer(f *testing.F) {
	m := kmsg.NewPtrMetadataResponse()
	m.Version = 12
	m.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 1, Host: "b", Port: 1}}
	f.Add(int16(Metadata), int16(12), wire.AppendResponse(nil, 1, m))
	f.Add(int16(Fetch), int16(17), []byte{0, 0, 0, 9, 0, 0, 0, 1, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, key, version int16, frame []byte) {
		if !Wanted(key, version) {
			return
		}
		out, err := Answer(key, version, bytes.Clone(frame), shift)
		if err != nil && !errors.Is(err, ErrAnswer) {
			t.Fatal(err)
		}
		if err == nil && len(out) >= 4 && !bytes.Equal(out, frame) && int(binary.BigEndian.Uint32(out)) != len(out)-4 {
			t.Fatalf("%x has a wrong size", out)
		}
	})
}
