package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/types"

	"berth/image/fetch"
	"berth/image/policy"
)

// Use is an image about to be used: mounted as a root filesystem or a volume.
type Use struct {
	Image     *Record
	Name      string // the name it was asked for by; empty or another image's: any of its own
	Namespace string // of the pod
}

// Admit asks the signature policy of the pod's namespace about an image that is
// here, under the name it is used by. ErrSignature when the policy does not
// admit it, also one that it admitted when the image was pulled. It needs no
// network, and without a policy or after a first time (for some minutes, while
// no file of the policy changes) nothing but a look at those files.
//
// What came in an archive is asked about as that, and under its name as far as
// a scope of the policy is about such names.
func (s *Store) Admit(ctx context.Context, u Use) error {
	file, err := s.policies().Path(u.Namespace)
	if err != nil {
		return fmt.Errorf("use image %s: %w", u.Image.ID, err)
	}
	p, err := policy.Read(file)
	if p == nil {
		return err
	}
	var refusal error
	for _, n := range s.namesOf(u) {
		err := s.admit(ctx, p, u.Image, n)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrSignature) {
			return err
		}
		if refusal == nil {
			refusal = fmt.Errorf("use image %s as %q: %w", u.Image.ID, n, err)
		}
	}
	return refusal
}

// policies are where the signature policies are.
func (s *Store) policies() policy.Files {
	o := s.options()
	return policy.Files{Default: o.PolicyPath, Dir: o.PolicyDir}
}

// namesOf are what the policy may be asked about: the name that was asked for,
// where it is the image's, else each the image has. An image without any has
// the empty one.
func (s *Store) namesOf(u Use) []string {
	all := slices.Concat(u.Image.RepoTags, u.Image.RepoDigests)
	if names, err := s.readings(u.Name); err == nil {
		for _, n := range names {
			if slices.Contains(all, n.String()) {
				return []string{n.String()}
			}
		}
	}
	if len(all) == 0 {
		return []string{""}
	}
	return all
}

// admit asks about one name of an image.
func (s *Store) admit(ctx context.Context, p *policy.Policy, r *Record, name string) error {
	origin := r.saved.Imported[name]
	key := policy.Key{Image: r.ID, Name: origin + "\x00" + name, Signatures: r.saved.proof()}
	if s.verdicts.Known(p, key) {
		return nil
	}
	manifests, err := s.manifestsOf(r.saved)
	if err != nil {
		return fmt.Errorf("read signatures: %w", err)
	}
	subject := policy.Subject{Manifests: manifests, Scratch: s.staging()}
	if origin != "" {
		subject.Reference = parseOrigin(origin, name)
		if err := p.Admit(ctx, subject); err != nil {
			return err
		}
	}
	switch named, err := reference.ParseNormalizedNamed(name); {
	case name == "" && origin == "":
		return fmt.Errorf("%w: the image has no name", ErrSignature)
	case name == "":
	case err != nil:
		return err
	default:
		if subject.Reference, err = docker.NewReference(named); err != nil {
			return err
		}
		ask := p.Admit
		if origin != "" {
			ask = p.AdmitName
		}
		if err := ask(ctx, subject); err != nil {
			return err
		}
	}
	s.verdicts.Admitted(p, key)
	return nil
}

// manifestsOf reads an image's manifests and signatures from the store.
func (s *Store) manifestsOf(img *saved) ([]policy.Manifest, error) {
	var list []policy.Manifest
	for _, d := range slices.Backward(img.Blobs) { // as a pull does: the image's own before its index
		data, err := s.blobs.Get(d)
		if err != nil {
			return nil, err
		}
		m := policy.Manifest{Digest: d, Data: data}
		for _, d := range img.Signatures[d] {
			blob, err := s.blobs.Get(d)
			if err != nil {
				return nil, err
			}
			m.Signatures = append(m.Signatures, blob)
		}
		list = append(list, m)
	}
	return list, nil
}

// proof lists the signatures, in an order that depends on nothing else.
func (s *saved) proof() []digest.Digest {
	var all []digest.Digest
	for _, d := range slices.Sorted(maps.Keys(s.Signatures)) {
		all = append(all, s.Signatures[d]...)
	}
	return all
}

// admit asks the policy about what inspect has read so far, with its signatures.
// Those are read whenever there is a policy at all, needed or not: that of
// another namespace, or of tomorrow, may want them.
func (r *run) admit(ctx context.Context, unparsed []*image.UnparsedImage) error {
	if r.job.again || !r.store.policies().Set() {
		return nil
	}
	var err error
	if r.sources, err = policy.ReadSources(r.store.options().RegistriesDir); err != nil {
		return err
	}
	subject := policy.Subject{Reference: r.job.identity(), Scratch: r.store.staging()}
	var unread error
	for i, doc := range slices.Backward(r.docs) {
		m := policy.Manifest{Digest: doc.digest, Data: doc.data}
		g := fetch.NewGuard(ctx, r.store.patience())
		blobs, err := r.readSignatures(g.Ctx, unparsed[i], doc.digest)
		if err = g.Explain(err); err != nil {
			unread = fmt.Errorf("read signatures of %s: %w", doc.digest, err)
		} else {
			m.Signatures = blobs
			r.signatures[doc.digest] = blobs
		}
		g.Stop()
		subject.Manifests = append(subject.Manifests, m)
	}
	err = r.job.policy.Admit(ctx, subject)
	if errors.Is(err, ErrSignature) && unread != nil {
		return unread // a signature that could not be read is no missing one
	}
	return err
}

// identity is what the policy knows the job's image by.
func (j job) identity() types.ImageReference {
	if j.origin == "" {
		return j.ref
	}
	n := ""
	if len(j.tags) > 0 {
		n = j.tags[0]
	}
	return parseOrigin(j.origin, n)
}

// storeSignatures writes what was read of signatures. Of a manifest that was
// read again they replace the older ones: one that the registry has no longer
// may have been withdrawn.
func (r *run) storeSignatures(img *saved) error {
	if len(r.signatures) == 0 {
		return nil
	}
	all := maps.Clone(img.Signatures)
	if all == nil {
		all = map[digest.Digest][]digest.Digest{}
	}
	for manifest, blobs := range r.signatures {
		delete(all, manifest)
		for _, blob := range blobs {
			d := digest.FromBytes(blob)
			if err := r.putBlob(d, blob); err != nil {
				return err
			}
			all[manifest] = appendNew(all[manifest], d)
		}
	}
	if len(all) == 0 {
		all = nil
	}
	img.Signatures = all
	return nil
}

// setOrigin notes by which of its names an image came in an archive. A name that
// it got by a pull stays one of a pull.
func (j job) setOrigin(img *saved, before *saved) {
	names := slices.Concat(img.Tags, img.Digests)
	if len(names) == 0 {
		names = []string{""}
	}
	imported := map[string]string{}
	for _, n := range names {
		had := before != nil && (slices.Contains(before.Tags, n) || slices.Contains(before.Digests, n) || n == "")
		switch mine := j.names(n); {
		case had && before.Imported[n] == "":
		case mine && j.origin != "":
			imported[n] = j.origin
		case !mine && had:
			imported[n] = before.Imported[n]
		}
	}
	if len(imported) == 0 {
		imported = nil
	}
	img.Imported = imported
}

// archived is the name of an image in an archive, for policies only: the archive
// may be gone.
type archived struct {
	types.ImageReference // nil: nothing is read by it
	transport, path      string
	named                reference.Named
}

// parseOrigin makes a name of what originOf gave.
func parseOrigin(origin, name string) types.ImageReference {
	transport, path, _ := strings.Cut(origin, ":")
	a := archived{transport: transport, path: path}
	if named, err := reference.ParseNormalizedNamed(name); err == nil {
		a.named = named
	}
	return a
}

// Transport of the archive.
func (a archived) Transport() types.ImageTransport { return archiveTransport{name: a.transport} }

// StringWithinTransport is for messages.
func (a archived) StringWithinTransport() string { return a.path }

// DockerReference is the name that the archive gives.
func (a archived) DockerReference() reference.Named { return a.named }

// PolicyConfigurationIdentity is the file, for OCI archives; policies do not
// tell docker's archives apart.
func (a archived) PolicyConfigurationIdentity() string {
	if a.transport == viaDocker {
		return ""
	}
	return a.path
}

// PolicyConfigurationNamespaces are the folders above the file.
func (a archived) PolicyConfigurationNamespaces() (list []string) {
	if a.transport == viaDocker {
		return nil
	}
	for dir := filepath.Dir(a.path); dir != "/"; dir = filepath.Dir(dir) {
		list = append(list, dir)
	}
	return list
}

// What policies call archives.
const (
	viaDocker = "docker-archive"
	viaOCI    = "oci-archive"
)

// archiveTransport has nothing but a name.
type archiveTransport struct {
	types.ImageTransport
	name string
}

// Name as policies have it.
func (t archiveTransport) Name() string { return t.name }
