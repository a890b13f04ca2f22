package remoteformat

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rsa"
	"crypto/sha3"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Sizes of the encryption: AES-256-GCM with the IV in front and the tag behind.
const (
	dataKeySize     = 32
	aadSize         = 32
	ivSize          = 12
	encryptOverhead = ivSize + 16
)

// Keyring holds RSA key pairs by id. Old pairs stay in it as long as segments name them. It must not be changed
// once it is in use.
type Keyring struct {
	pairs map[string]keyPair
}

type keyPair struct {
	private *rsa.PrivateKey
	public  *rsa.PublicKey
}

// Add puts a pair into the ring: PEM of a private key (PKCS #8 or #1), of a public key (PKIX), or both. Without
// the private key segments can be written only.
func (k *Keyring) Add(id string, privatePEM, publicPEM []byte) error {
	if id == "" || strings.Contains(id, ":") {
		return fmt.Errorf("encryption key id %q: must not be empty or hold ':'", id)
	}
	var p keyPair
	if len(privatePEM) > 0 {
		key, err := parsePrivate(privatePEM)
		if err != nil {
			return fmt.Errorf("encryption key %s: private key: %w", id, err)
		}
		p.private, p.public = key, &key.PublicKey
	}
	if len(publicPEM) > 0 {
		key, err := parsePublic(publicPEM)
		if err != nil {
			return fmt.Errorf("encryption key %s: public key: %w", id, err)
		}
		if p.public != nil && !p.public.Equal(key) {
			return fmt.Errorf("encryption key %s: the public key is not that of the private key", id)
		}
		p.public = key
	}
	if p.public == nil {
		return fmt.Errorf("encryption key %s: neither private nor public key", id)
	}
	if k.pairs == nil {
		k.pairs = map[string]keyPair{}
	}
	k.pairs[id] = p
	return nil
}

func parsePrivate(b []byte) (*rsa.PrivateKey, error) {
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, errors.New("no PEM block")
	}
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		return key, nil
	}
	any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := any.(*rsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%T is not RSA", any)
	}
	return key, nil
}

func parsePublic(b []byte) (*rsa.PublicKey, error) {
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, errors.New("no PEM block")
	}
	any, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := any.(*rsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("%T is not RSA", any)
	}
	return key, nil
}

// Wrap encrypts a data key to the pair id: "id:base64" of RSA-OAEP with SHA3-512 for both hash and mask.
func (k *Keyring) Wrap(id string, rand io.Reader, dataKey []byte) (string, error) {
	if k == nil || k.pairs[id].public == nil {
		return "", fmt.Errorf("%w: %q", ErrNoKey, id)
	}
	ct, err := rsa.EncryptOAEP(sha3.New512(), rand, k.pairs[id].public, dataKey, nil)
	if err != nil {
		return "", fmt.Errorf("wrap data key with %s: %w", id, err)
	}
	return id + ":" + base64.StdEncoding.EncodeToString(ct), nil
}

// Unwrap opens what Wrap made.
func (k *Keyring) Unwrap(wrapped string) ([]byte, error) {
	id, text, ok := strings.Cut(wrapped, ":")
	if !ok {
		return nil, fmt.Errorf("%w: data key without key id", ErrManifest)
	}
	ct, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("%w: data key: %w", ErrManifest, err)
	}
	if k == nil || k.pairs[id].private == nil {
		return nil, fmt.Errorf("%w: %q", ErrNoKey, id)
	}
	key, err := rsa.DecryptOAEP(sha3.New512(), nil, k.pairs[id].private, ct, nil)
	if err != nil {
		return nil, fmt.Errorf("unwrap data key with %s: %w", id, err)
	}
	if len(key) != dataKeySize {
		return nil, fmt.Errorf("%w: data key of %d bytes", ErrManifest, len(key))
	}
	return key, nil
}

func newGCM(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// seal returns IV, ciphertext and tag.
func seal(aead cipher.AEAD, rand io.Reader, plain, aad []byte) ([]byte, error) {
	out := make([]byte, ivSize, len(plain)+encryptOverhead)
	if _, err := io.ReadFull(rand, out); err != nil {
		return nil, fmt.Errorf("draw IV: %w", err)
	}
	return aead.Seal(out, out[:ivSize], plain, aad), nil
}

func unseal(aead cipher.AEAD, stored, aad []byte) ([]byte, error) {
	if len(stored) < encryptOverhead {
		return nil, fmt.Errorf("%w: %d bytes are no encrypted chunk", ErrChunk, len(stored))
	}
	plain, err := aead.Open(nil, stored[:ivSize], stored[ivSize:], aad)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrChunk, err)
	}
	return plain, nil
}
