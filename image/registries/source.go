package registries

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/manifest"
)

// Source fetches the parts of one name, a tag or a digest, during one pull. Its
// methods may be called at the same time.
type Source struct {
	config    Config
	named     reference.Named
	caller    *Caller
	endpoints []*endpoint
	hidden    secrets
	// ByHosts: the endpoints are those of a hosts.toml, which nobody but this
	// package knows.
	ByHosts bool

	mu     sync.Mutex
	served *endpoint                    // gave the first manifest; guarded by mu
	spent  map[digest.Digest]*blobTries // guarded by mu
}

// Open reads the configuration and finds the endpoints of a name. It contacts
// nobody but credential helpers, for which it blocks. caller may be nil. The
// Source must be closed. ErrConfig when the configuration is broken,
// contradicts itself or blocks the name.
func Open(ctx context.Context, c Config, named reference.Named, caller *Caller) (*Source, error) {
	s := &Source{config: c.withDefaults(), named: named, caller: caller, spent: map[digest.Digest]*blobTries{}}
	if caller != nil {
		s.hidden.add(caller.Password, caller.IdentityToken, caller.RegistryToken)
	}
	places, byHosts, err := s.config.places(named)
	s.ByHosts = byHosts
	if err != nil {
		return nil, s.clean(err)
	}
	for _, p := range places {
		e, err := s.connect(ctx, p)
		if err != nil {
			s.Close()
			return nil, s.clean(err)
		}
		s.endpoints = append(s.endpoints, e)
	}
	return s, nil
}

// clean keeps of an error its kind and what may be read by everybody.
func (s *Source) clean(err error) error {
	return &Error{kindOf(err), s.hidden.redact(err.Error())}
}

// Close ends idle connections. Blobs that are open go on. Idempotent.
func (s *Source) Close() error {
	for _, e := range s.endpoints {
		e.client.CloseIdleConnections()
	}
	return nil
}

// maxManifest bounds what is read of a manifest; what is too big for an image
// is decided elsewhere.
const maxManifest = 8 << 20

// Manifest reads a manifest or index and its media type from the first endpoint
// that has it: the one with the digest, or with an empty digest the one that
// the Source's name says. Bytes that do not have the digest they were asked by
// count as a failure of the endpoint. It bounds its waits itself.
//
// The error is an *Error with the reason of each endpoint, or ctx's.
func (s *Source) Manifest(ctx context.Context, d digest.Digest) ([]byte, string, error) {
	wanted, byTag := d.String(), false
	if d == "" {
		switch n := s.named.(type) {
		case reference.Canonical:
			d, wanted = n.Digest(), n.Digest().String()
		case reference.Tagged:
			wanted, byTag = n.Tag(), true
		default:
			return nil, "", &Error{ErrInvalid, fmt.Sprintf("%s has neither tag nor digest", s.named)}
		}
	}
	list := s.preferred(s.candidates(func(e *endpoint) bool { return e.mayAnswer(byTag) }))
	data, kind, e, err := s.manifest(ctx, list, wanted, d)
	if err == nil {
		s.mu.Lock()
		s.served = e
		s.mu.Unlock()
	}
	return data, kind, err
}

// Tagged reads another manifest of the same repository, by its tag, from the
// endpoint that gave the first one, also when that is otherwise asked for digests
// only: what belongs to an image is beside it. The error is that of Manifest.
func (s *Source) Tagged(ctx context.Context, tag string) ([]byte, error) {
	data, _, _, err := s.manifest(ctx, []*endpoint{s.main()}, tag, "")
	return data, err
}

// main is the endpoint that gave the first manifest, before that the upstream.
func (s *Source) main() *endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.served != nil {
		return s.served
	}
	return s.endpoints[len(s.endpoints)-1]
}

// Place is the host and the repository that the first manifest came from.
func (s *Source) Place() (host, repository string) {
	e := s.main()
	return e.host, e.repository
}

// Aside reads a small document of a server beside the registry, over http or
// https: with the proxies, the authorities and the patience of the endpoint that
// gave the first manifest, but without its login. It asks once. The error is an
// *Error, ErrNotFound among them, or ctx's.
func (s *Source) Aside(ctx context.Context, url string, most int64) ([]byte, error) {
	e := s.main()
	r, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return nil, s.clean(fmt.Errorf("%w: %v", ErrConfig, err))
	}
	res, err := e.exchange(ctx, r)
	if err == nil && res.StatusCode != http.StatusOK {
		err = e.refusal(res)
	}
	var data []byte
	if err == nil {
		data, err = e.readDocument(res, most)
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, s.clean(asFailure(err))
	}
	return data, nil
}

// manifest asks endpoints in turn for a manifest by tag or digest; one with d.
func (s *Source) manifest(ctx context.Context, list []*endpoint, wanted string, d digest.Digest) ([]byte, string, *endpoint, error) {
	var attempts []attempt
	for i, e := range list {
		data, kind, err := e.manifest(ctx, wanted, d, i == len(list)-1)
		if err == nil {
			return data, kind, e, nil
		}
		if ctx.Err() != nil {
			return nil, "", nil, context.Cause(ctx)
		}
		attempts = append(attempts, attempt{e, err})
	}
	return nil, "", nil, s.failed(attempts)
}

// mayAnswer says whether the endpoint is there for tags, or for digests.
func (e *endpoint) mayAnswer(tags bool) bool {
	if tags {
		return !e.noTags
	}
	return !e.noBlobs
}

// preferred puts the endpoint that gave the first manifest to the front: what
// belongs together is likely to be there too.
func (s *Source) preferred(list []*endpoint) []*endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first, rest []*endpoint
	for _, e := range list {
		if e == s.served && e.readyAt().IsZero() {
			first = append(first, e)
		} else {
			rest = append(rest, e)
		}
	}
	return append(first, rest...)
}

func (e *endpoint) manifest(ctx context.Context, wanted string, d digest.Digest, alone bool) ([]byte, string, error) {
	accept := http.Header{"Accept": {strings.Join(manifest.DefaultRequestedManifestMIMETypes, ", ")}}
	res, err := e.get(ctx, "/"+e.repository+"/manifests/"+wanted, accept, alone)
	if err != nil {
		return nil, "", err
	}
	data, err := e.readDocument(res, maxManifest)
	if err != nil {
		return nil, "", fmt.Errorf("read manifest: %w", err)
	}
	if d != "" && d.Algorithm().FromBytes(data) != d {
		return nil, "", fmt.Errorf("%w: the manifest does not have the digest %s", ErrInvalid, d)
	}
	return data, res.Header.Get("Content-Type"), nil
}
