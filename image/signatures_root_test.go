package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/sandbox/leakcheck"
)

// signing is a store under a policy, and a registry with one image to sign.
type signing struct {
	*testing.T
	reg       *registry
	store     *Store
	dir       string // of policies, registries.d and the lookaside
	manifest  digest.Digest
	id        string
	key       *signer
	other     *signer
	repo, ref string // in full
}

func newSigning(t *testing.T) *signing {
	e := &signing{T: t, reg: newRegistry(t), dir: t.TempDir(), key: newSigner(t), other: newSigner(t)}
	e.repo = e.reg.ref("app")
	e.ref = e.repo + ":1"
	desc, id := e.reg.push("app", "1", gzipLayer(tarOf(t, file{name: "hello", body: "hello"})))
	e.manifest, e.id = desc.Digest, id
	for _, sub := range []string{"registries.d", "namespaces", "sigs"} {
		if err := os.Mkdir(filepath.Join(e.dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(t, e.at("registries.d/here.yaml"), fmt.Sprintf(
		"docker:\n  %s:\n    use-sigstore-attachments: true\n    lookaside: file://%s\n", e.reg.host, e.at("sigs")))
	e.store = open(t, t.TempDir(), func(o *Options) {
		o.PolicyPath, o.PolicyDir, o.RegistriesDir = e.at("policy.json"), e.at("namespaces"), e.at("registries.d")
	}, e.reg)
	return e
}

func (e *signing) at(name string) string { return filepath.Join(e.dir, name) }

// rule makes what the policy says of the registry's images; all else is refused.
func (e *signing) rule(requirements []any) {
	write(e, e.at("policy.json"), policyText(e, rejected, rules{e.reg.host: requirements}))
}

func (e *signing) pull(ref, namespace string) error {
	_, err := e.store.Pull(context.Background(), PullRequest{Reference: ref, Namespace: namespace})
	return err
}

// use is what a container of the namespace does with an image that is here.
func (e *signing) use(ref, name, namespace string) error {
	e.Helper()
	r, err := e.store.Resolve(ref)
	if err != nil {
		e.Fatal(err)
	}
	return e.store.Admit(context.Background(), Use{Image: r, Name: name, Namespace: namespace})
}

// wants fails unless err is a refusal with the text, or none for an empty one.
func (e *signing) wants(what string, err error, text string) {
	e.Helper()
	switch {
	case text == "" && err != nil:
		e.Errorf("%s: %v", what, err)
	case text != "" && (!errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), text)):
		e.Errorf("%s: %v, want a refusal with %q", what, err, text)
	}
}

// sign attaches signatures of the image under names.
func (e *signing) sign(s *signer, names ...string) {
	var all []cosigned
	for _, n := range names {
		all = append(all, s.sign(n, e.manifest))
	}
	e.reg.attach("app", e.manifest, all...)
}

var (
	matchExact      = rules{"type": "matchExact"}
	matchRepository = rules{"type": "matchRepository"}
)

func TestSigstoreSignatures(t *testing.T) {
	for name, tc := range map[string]struct {
		prepare func(e *signing)
		want    string
	}{
		"signed": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			e.sign(e.key, e.ref)
		}, ""},
		"unsigned": {func(e *signing) { e.rule(sigstoreRule(e.key, nil)) }, "no signature exists"},
		"another key": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			e.sign(e.other, e.ref)
		}, "cryptographic signature verification failed"},
		"one of several is right": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			e.reg.attach("app", e.manifest, e.other.sign(e.ref, e.manifest), e.key.sign(e.ref, e.manifest))
		}, ""},
		"key in the policy": {func(e *signing) {
			e.rule(need(rules{"type": "sigstoreSigned", "keyData": publicPEM(e, &e.key.key.PublicKey)}))
			e.sign(e.key, e.ref)
		}, ""},
		"any of several keys": {func(e *signing) {
			e.rule(need(rules{"type": "sigstoreSigned", "keyPaths": []string{e.other.file, e.key.file}}))
			e.sign(e.key, e.ref)
		}, ""},
		"key that is missing": {func(e *signing) {
			e.rule(need(rules{"type": "sigstoreSigned", "keyPath": "/nowhere.pub"}))
			e.sign(e.key, e.ref)
		}, "/nowhere.pub"},
		"of another tag": {func(e *signing) {
			e.rule(sigstoreRule(e.key, matchExact))
			e.sign(e.key, e.repo+":2")
		}, "is not accepted"},
		"of another tag, any of the repository will do": {func(e *signing) {
			e.rule(sigstoreRule(e.key, matchRepository))
			e.sign(e.key, e.repo+":2")
		}, ""},
		"of another repository": {func(e *signing) {
			e.rule(sigstoreRule(e.key, matchRepository))
			e.sign(e.key, e.reg.ref("other:1"))
		}, "is not accepted"},
		"renamed by the policy": {func(e *signing) {
			e.rule(sigstoreRule(e.key, rules{"type": "remapIdentity", "prefix": e.reg.host, "signedPrefix": "vendor.example"}))
			e.sign(e.key, "vendor.example/app:1")
		}, ""},
		"of another digest": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			e.reg.attach("app", e.manifest, e.key.sign(e.ref, digest.FromString("else")))
		}, "does not match"},
		"payload that was changed": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			s := e.key.sign(e.repo+":2", e.manifest)
			s.payload = statement("cosign container image signature", e.ref, e.manifest)
			e.reg.attach("app", e.manifest, s)
		}, "cryptographic signature verification failed"},
		"refused whatever it is": {func(e *signing) {
			e.rule(rejected)
			e.sign(e.key, e.ref)
		}, "rejected by policy"},
		"of a registry without a rule": {func(e *signing) {
			write(e, e.at("policy.json"), policyText(e, rejected, rules{"docker.io": anything}))
			e.sign(e.key, e.ref)
		}, "rejected by policy"},
		"two rules, one not kept": {func(e *signing) {
			e.rule(append(sigstoreRule(e.key, nil), sigstoreRule(e.other, nil)...))
			e.sign(e.key, e.ref)
		}, "cryptographic signature verification failed"},
		"too many": {func(e *signing) {
			e.rule(sigstoreRule(e.key, nil))
			e.sign(e.key, strings.Split(strings.Repeat(e.ref+" ", 65), " ")[:65]...)
		}, ""}, // see below: not a refusal of the policy
	} {
		t.Run(name, func(t *testing.T) {
			e := newSigning(t)
			tc.prepare(e)
			err := e.pull(e.ref, "")
			if name == "too many" {
				if err == nil || !strings.Contains(err.Error(), "at most 64") {
					t.Errorf("got %v", err)
				}
				empty(t, e.store)
				return
			}
			e.wants("pull", err, tc.want)
			if tc.want != "" {
				empty(t, e.store)
				return
			}
			// What the pull admitted is admitted without the registry.
			e.reg.setHook(func(w http.ResponseWriter, r *http.Request) bool {
				t.Errorf("asked for %s", r.URL)
				return false
			})
			e.wants("use", e.use(e.id, e.ref, ""), "")
		})
	}
}

func TestSimpleSignatures(t *testing.T) {
	mine, sign := gpg(t)
	others, _ := gpg(t)
	for name, tc := range map[string]struct {
		key, signed string
		other       digest.Digest
		want        string
	}{
		"signed":                {mine, "app:1", "", ""},
		"another key":           {others, "app:1", "", "Key not found"},
		"of another tag":        {mine, "app:2", "", "is not accepted"},
		"of another digest":     {mine, "app:1", digest.FromString("else"), "does not match"},
		"no signature there":    {mine, "", "", "no signature exists"},
		"key file is not there": {"/nowhere.gpg", "app:1", "", "/nowhere.gpg"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newSigning(t)
			e.rule(need(rules{"type": "signedBy", "keyType": "GPGKeys", "keyPath": tc.key}))
			if tc.signed != "" {
				of := e.manifest
				if tc.other != "" {
					of = tc.other
				}
				lookaside(t, e.at("sigs"), "app", e.manifest, "1", sign(statement("atomic container signature", e.reg.ref(tc.signed), of)))
			}
			e.wants("pull", e.pull(e.ref, ""), tc.want)
			if tc.want != "" {
				empty(t, e.store)
				return
			}
			if err := os.RemoveAll(e.at("sigs")); err != nil {
				t.Fatal(err)
			}
			e.wants("use", e.use(e.id, e.ref, ""), "")
		})
	}
}

// What was admitted when it came is asked about again whenever it is used.
func TestAPolicyThatChanges(t *testing.T) {
	e := newSigning(t)
	e.rule(anything)
	e.sign(e.key, e.ref)
	e.wants("pull", e.pull(e.ref, ""), "")
	e.wants("use", e.use(e.id, e.ref, ""), "")
	e.rule(sigstoreRule(e.other, nil))
	e.wants("use under another key", e.use(e.id, e.ref, ""), "cryptographic signature verification failed")
	e.rule(sigstoreRule(e.key, nil)) // its signature was kept though nobody wanted it
	e.wants("use under its key", e.use(e.id, e.ref, ""), "")

	data, err := os.ReadFile(e.other.file)
	if err != nil {
		t.Fatal(err)
	}
	write(t, e.key.file, string(data)) // the policy stays, its key does not
	e.wants("use after a change of keys", e.use(e.id, e.ref, ""), "cryptographic signature verification failed")
	e.rule(rejected)
	e.wants("use", e.use(e.id, e.ref, ""), "rejected by policy")
	write(t, e.at("policy.json"), "{")
	e.wants("use under a broken policy", e.use(e.id, e.ref, ""), e.at("policy.json"))
	e.wants("pull under a broken policy", e.pull(e.ref, ""), e.at("policy.json"))
	if err := os.Remove(e.at("policy.json")); err != nil {
		t.Fatal(err)
	}
	e.wants("use without the policy", e.use(e.id, e.ref, ""), e.at("policy.json"))
	e.rule(anything)
	e.wants("use", e.use(e.id, e.ref, ""), "")
}

func TestPoliciesOfNamespaces(t *testing.T) {
	e := newSigning(t)
	e.rule(anything)
	strict := e.at("namespaces/strict.json")
	write(t, strict, policyText(t, rejected, rules{e.reg.host: sigstoreRule(e.key, nil)}))
	write(t, e.at("namespaces/broken.json"), `{"default": "yes"}`)

	e.wants("pull", e.pull(e.ref, "strict"), "no signature exists")
	e.wants("pull", e.pull(e.ref, "free"), "")
	e.wants("use", e.use(e.id, e.ref, "free"), "")
	e.wants("use", e.use(e.id, e.ref, ""), "")
	e.wants("use of what another namespace pulled", e.use(e.id, e.ref, "strict"), "no signature exists")
	e.wants("pull", e.pull(e.ref, "broken"), "broken.json")
	e.wants("use", e.use(e.id, e.ref, "broken"), "broken.json")
	for _, ns := range []string{"../policy", "a/b", "..", "."} {
		e.wants("use in namespace "+ns, e.use(e.id, e.ref, ns), "is not a name")
	}
	e.sign(e.key, e.ref) // later; a pull brings the signature
	e.wants("pull", e.pull(e.ref, "strict"), "")
	e.wants("use", e.use(e.id, e.ref, "strict"), "")

	if err := os.Rename(e.at("namespaces"), e.at("away")); err != nil {
		t.Fatal(err)
	}
	e.wants("use when the policies have gone", e.use(e.id, e.ref, "free"), "namespaces")
	e.wants("pull when the policies have gone", e.pull(e.ref, "free"), "namespaces")
	e.wants("use in no namespace", e.use(e.id, e.ref, ""), "")
}

// A repair fetches what any policy admits, and nothing that none does.
func TestRepairAsksEachPolicy(t *testing.T) {
	e := newSigning(t)
	e.rule(rejected)
	own := e.at("namespaces/own.json")
	write(t, e.at("namespaces/a.json"), `{"default": [{"type": "reject"}]}`)
	write(t, own, policyText(t, rejected, rules{e.reg.host: anything}))
	e.wants("pull", e.pull(e.ref, "own"), "")
	spoil := func() {
		t.Helper()
		r, err := e.store.Resolve(e.id)
		if err == nil {
			err = os.Chmod(r.Layers[0], 0o777)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	spoil()
	if _, r := findings(t, e.store, true); !r.Repairs[e.id].Done {
		t.Errorf("where one namespace admits the image: %+v", r.Repairs)
	}
	sound(t, e.store)
	e.wants("use in that namespace", e.use(e.id, e.ref, "own"), "")
	e.wants("use in another", e.use(e.id, e.ref, "a"), "rejected by policy")
	write(t, own, `{"default": [{"type": "reject"}]}`)
	spoil()
	if _, r := findings(t, e.store, true); r.Repairs[e.id].Done || !strings.Contains(r.Repairs[e.id].Message, "rejected by policy") {
		t.Errorf("where nobody admits it: %+v", r.Repairs)
	}
}

// Signatures are of the image: kept, counted and removed with it.
func TestSignaturesAreKeptWithTheImage(t *testing.T) {
	e := newSigning(t)
	e.rule(sigstoreRule(e.key, nil))
	e.sign(e.key, e.ref, e.repo+":other")
	e.wants("pull", e.pull(e.ref, ""), "")
	blobs := func() int {
		calm(t, e.store)
		list, err := os.ReadDir(filepath.Join(e.store.root, "blobs/sha256"))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	if n := blobs(); n != 4 {
		t.Errorf("%d blobs, want config, manifest and two signatures", n)
	}
	if d, err := e.store.Inspect(e.ref); err != nil || len(d.Manifest.Signatures) != 2 {
		t.Errorf("inspect shows %+v, %v", d, err)
	}
	e.store = reopen(t, e.store)
	e.wants("use after a restart", e.use(e.id, e.ref, ""), "")

	// A signature that the registry has no longer was withdrawn.
	e.sign(e.other, e.ref)
	e.wants("pull", e.pull(e.ref, ""), "cryptographic signature verification failed")
	e.wants("use after a pull that failed", e.use(e.id, e.ref, ""), "")
	e.rule(sigstoreRule(e.other, nil))
	e.wants("pull", e.pull(e.ref, ""), "")
	e.rule(sigstoreRule(e.key, nil))
	e.wants("use", e.use(e.id, e.ref, ""), "cryptographic signature verification failed")
	if n := blobs(); n != 3 {
		t.Errorf("%d blobs, want config, manifest and one signature", n)
	}
	if err := e.store.Remove(context.Background(), e.id); err != nil {
		t.Fatal(err)
	}
	empty(t, e.store)
}

// A signature of the index or of the image's own manifest will do.
func TestSignaturesOfIndexes(t *testing.T) {
	e := newSigning(t)
	e.rule(sigstoreRule(e.key, nil))
	index := e.reg.doc("app", ispec.MediaTypeImageIndex, ispec.Index{MediaType: ispec.MediaTypeImageIndex, Manifests: []ispec.Descriptor{{
		MediaType: ispec.MediaTypeImageManifest, Digest: e.manifest, Size: int64(len(e.reg.docs["app "+e.manifest.String()].data)),
		Platform: &ispec.Platform{OS: "linux", Architecture: "amd64"},
	}}}, "multi")
	ref := e.repo + ":multi"
	e.wants("pull", e.pull(ref, ""), "no signature exists")
	e.reg.attach("app", index.Digest, e.key.sign(ref, index.Digest))
	e.wants("pull by a signed index", e.pull(ref, ""), "")
	e.wants("use", e.use(e.id, ref, ""), "")
	e.wants("use by digest", e.use(e.id, e.repo+"@"+index.Digest.String(), ""), "")
	e.wants("pull of the image alone", e.pull(e.repo+"@"+e.manifest.String(), ""), "no signature exists")

	e.reg.attach("app", index.Digest)
	e.reg.attach("app", e.manifest, e.key.sign(ref, e.manifest))
	e.wants("pull by a signed image", e.pull(ref, ""), "")
	e.wants("use", e.use(e.id, ref, ""), "")
}

// Which name is asked about.
func TestTheNameAnImageIsUsedBy(t *testing.T) {
	e := newSigning(t)
	e.rule(sigstoreRule(e.key, matchExact))
	e.reg.push("app", "2", gzipLayer(tarOf(t, file{name: "hello", body: "hello"})))
	e.sign(e.key, e.ref, e.repo+":2")
	e.wants("pull", e.pull(e.ref, ""), "")
	e.wants("pull", e.pull(e.repo+":2", ""), "")
	e.sign(e.key, e.ref)
	e.wants("pull", e.pull(e.ref, ""), "")

	e.wants("use by a signed name", e.use(e.id, e.ref, ""), "")
	e.wants("use by an unsigned name", e.use(e.id, e.repo+":2", ""), "is not accepted")
	conf := e.store.options().RegistriesConf
	data, err := os.ReadFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	write(t, conf, fmt.Sprintf("unqualified-search-registries = [%q]\n%s", e.reg.host, data))
	e.wants("pull by a short name", e.pull("app:1", ""), "")
	e.wants("use by a short signed name", e.use(e.id, "app:1", ""), "")
	e.wants("use by a short unsigned name", e.use(e.id, "app:2", ""), "is not accepted")
	e.wants("use by id: any of its names", e.use(e.id, e.id, ""), "")
	e.wants("use by no name: any of its names", e.use(e.id, "", ""), "")
	e.wants("use by a name that is not its own: any of its own", e.use(e.id, "docker.io/library/app:1", ""), "")
	e.rule(rejected)
	write(t, e.at("policy.json"), policyText(t, rejected, rules{"docker.io": anything}))
	e.wants("use by a name that is not its own", e.use(e.id, "docker.io/library/app:1", ""), "rejected by policy")
}

// A mirror is not what the image is called, though it has the signatures.
func TestSignaturesOfMirroredImages(t *testing.T) {
	e := newSigning(t)
	conf := fmt.Sprintf("[[registry]]\nlocation = \"vendor.example\"\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n", e.reg.host)
	write(t, e.store.options().RegistriesConf, conf)
	write(t, e.at("policy.json"), policyText(t, rejected, rules{"vendor.example": sigstoreRule(e.key, nil), e.reg.host: anything}))
	const ref = "vendor.example/app:1"
	e.wants("pull", e.pull(ref, ""), "no signature exists")
	e.sign(e.key, e.ref) // what the mirror calls it does not count
	e.wants("pull", e.pull(ref, ""), "is not accepted")
	e.sign(e.key, ref)
	e.wants("pull", e.pull(ref, ""), "")
	e.wants("use", e.use(e.id, ref, ""), "")
}

// A signature that cannot be read is no missing one: the pull may be tried again.
func TestSignaturesThatCannotBeRead(t *testing.T) {
	e := newSigning(t)
	e.rule(sigstoreRule(e.key, nil))
	e.sign(e.key, e.ref)
	broken := func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, ".sig") {
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		}
		return false
	}
	e.reg.setHook(broken)
	if err := e.pull(e.ref, ""); !errors.Is(err, ErrRegistryUnavailable) {
		t.Errorf("pull: %v", err)
	}
	empty(t, e.store)
	e.rule(anything)
	e.wants("pull that needs none", e.pull(e.ref, ""), "")
	e.reg.setHook(nil)
	e.wants("pull", e.pull(e.ref, ""), "")
	e.reg.setHook(broken)
	e.wants("pull", e.pull(e.ref, ""), "")
	e.rule(sigstoreRule(e.key, nil))
	e.wants("use by the signature from before", e.use(e.id, e.ref, ""), "")
}

func TestWithoutAPolicyNoSignatureIsRead(t *testing.T) {
	e := newSigning(t)
	e.sign(e.key, e.ref)
	s := open(t, t.TempDir(), func(o *Options) { o.RegistriesDir = e.at("registries.d") }, e.reg)
	id := mustPull(t, s, e.ref)
	r, err := s.Resolve(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Admit(context.Background(), Use{Image: r, Name: e.ref, Namespace: "strict"}); err != nil {
		t.Error(err)
	}
	if n := e.reg.got(".sig"); n != 0 {
		t.Errorf("%d requests for signatures", n)
	}
}

// What an archive brings is asked about as coming from it, and under its name
// as far as the policy has a scope for such names.
func TestSignaturePolicyOfArchives(t *testing.T) {
	const name = "vendor.example/app:1"
	oci, _ := ociArchive(t, plainLayer, name)
	docker, _ := dockerArchive(t, plainLayer, name)
	folder := filepath.Dir(oci)
	for what, tc := range map[string]struct {
		file          string
		policy        string
		importing, by string
	}{
		"refused by default":             {docker, policyText(t, rejected, rules{"vendor.example": anything}), "rejected by policy", ""},
		"archives of docker":             {docker, policyText(t, rejected, rules{}, rules{viaDocker: rules{"": anything}}), "", ""},
		"archives of docker, not OCI's":  {oci, policyText(t, rejected, rules{}, rules{viaDocker: rules{"": anything}}), "rejected by policy", ""},
		"one file":                       {oci, policyText(t, rejected, rules{}, rules{viaOCI: rules{oci: anything}}), "", ""},
		"a folder":                       {oci, policyText(t, rejected, rules{}, rules{viaOCI: rules{folder: anything}}), "", ""},
		"another folder":                 {oci, policyText(t, rejected, rules{}, rules{viaOCI: rules{"/elsewhere": anything}}), "rejected by policy", ""},
		"a name that has to be signed":   {oci, policyText(t, anything, rules{"vendor.example": rejected}), "", "rejected by policy"},
		"a name that is admitted anyway": {oci, policyText(t, rejected, rules{"vendor.example": anything}, rules{viaOCI: rules{"": anything}}), "", ""},
	} {
		t.Run(what, func(t *testing.T) {
			e := newSigning(t)
			write(t, e.at("policy.json"), tc.policy)
			_, err := e.store.Import(context.Background(), ImportRequest{File: tc.file})
			e.wants("import", err, tc.importing)
			if tc.importing != "" {
				empty(t, e.store)
				return
			}
			e.wants("use", e.use(name, name, ""), tc.by)
			e.store = reopen(t, e.store)
			e.wants("use after a restart", e.use(name, name, ""), tc.by)
			write(t, e.at("policy.json"), policyText(t, rejected, rules{}))
			e.wants("use when archives are admitted no longer", e.use(name, name, ""), "rejected by policy")
		})
	}
}

// An import does not take its admission from what was pulled, nor give it any.
func TestPulledAndImported(t *testing.T) {
	e := newSigning(t)
	archive, _ := ociArchive(t, plainLayer, "vendor.example/app:1")
	layer := gzipLayer(tarOf(t, file{name: "name", body: "I am vendor.example/app:1"}))
	write(t, e.at("policy.json"), policyText(t, rejected, rules{e.reg.host: sigstoreRule(e.key, nil)}, rules{viaOCI: rules{"": anything}}))
	if _, err := e.store.Import(context.Background(), ImportRequest{File: archive}); err != nil {
		t.Fatal(err)
	}
	r, err := e.store.Resolve("vendor.example/app:1")
	if err != nil {
		t.Fatal(err)
	}
	data, err := e.store.RawConfig(r.ID)
	if err != nil {
		t.Fatal(err)
	}
	config := ispec.Descriptor{MediaType: ispec.MediaTypeImageConfig, Digest: e.reg.blob(data), Size: int64(len(data))}
	m := ispec.Manifest{MediaType: ispec.MediaTypeImageManifest, Config: config, Layers: []ispec.Descriptor{
		{MediaType: layer.mediaType, Digest: e.reg.blob(layer.data), Size: int64(len(layer.data))}}}
	m.SchemaVersion = 2
	desc := e.reg.doc("same", ispec.MediaTypeImageManifest, m, "1")
	ref := e.reg.ref("same:1")
	e.wants("pull of what is here", e.pull(ref, ""), "no signature exists")
	e.reg.attach("same", desc.Digest, e.key.sign(ref, desc.Digest))
	e.wants("pull", e.pull(ref, ""), "")
	e.wants("use by the pulled name", e.use(r.ID, ref, ""), "")
	e.wants("use by the imported name", e.use(r.ID, "vendor.example/app:1", ""), "")
	write(t, e.at("policy.json"), policyText(t, rejected, rules{e.reg.host: sigstoreRule(e.key, nil)}))
	e.wants("use by the pulled name", e.use(r.ID, ref, ""), "")
	e.wants("use by the imported name", e.use(r.ID, "vendor.example/app:1", ""), "rejected by policy")
}

// Of a registry in a hosts.toml the attached signatures are read from its hosts.
func TestSignaturesByHosts(t *testing.T) {
	leakcheck.Start(t)
	e := newSigning(t)
	hosts := t.TempDir()
	if err := os.Mkdir(filepath.Join(hosts, "vendor.example"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(hosts, "vendor.example", "hosts.toml"), fmt.Sprintf(
		"[host.'http://%s']\n[host.'http://%s'.header]\nX-Key = 'k'\n", e.reg.host, e.reg.host))
	o := *e.store.options()
	o.HostsDir = hosts
	if err := e.store.Reconfigure(o); err != nil {
		t.Fatal(err)
	}
	write(t, e.at("policy.json"), policyText(t, rejected, rules{"vendor.example": sigstoreRule(e.key, nil)}))
	const ref = "vendor.example/app:1"
	e.sign(e.other, ref)
	e.wants("another key", e.pull(ref, ""), "verification failed")
	e.sign(e.key, ref)
	e.wants("pull", e.pull(ref, ""), "")
	e.wants("use", e.use(e.id, ref, ""), "")
}

// A lookaside may be a server; what it must not do is to answer without an end.
func TestSignaturesOfALookasideServer(t *testing.T) {
	leakcheck.Start(t)
	key, sign := gpg(t)
	e := newSigning(t)
	answers := map[string][]byte{}
	always := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("the lookaside was sent a login")
		}
		data, ok := answers[r.URL.Path]
		if !ok && !always {
			http.NotFound(w, r)
			return
		}
		w.Write(data)
	}))
	defer server.Close()
	write(t, e.at("registries.d/here.yaml"), fmt.Sprintf("docker:\n  %s:\n    lookaside: %s/sigs\n", e.reg.host, server.URL))
	e.rule(need(rules{"type": "signedBy", "keyType": "GPGKeys", "keyPath": key}))
	e.wants("pull", e.pull(e.ref, ""), "no signature exists")
	at := "/sigs/app@" + strings.Replace(e.manifest.String(), ":", "=", 1) + "/signature-"
	answers[at+"1"] = sign(statement("atomic container signature", e.reg.ref("app:2"), e.manifest))
	answers[at+"2"] = sign(statement("atomic container signature", e.ref, e.manifest))
	e.wants("pull", e.pull(e.ref, ""), "")

	for what, tc := range map[string]struct {
		first []byte
		want  string
	}{
		"a page for everything":   {[]byte("<html>"), "no signature"},
		"signatures without end":  {answers[at+"2"], "more than 64"},
		"a signature without end": {bytes.Repeat([]byte{0xA0}, 2<<20), "more than"},
	} {
		always = true
		for n := range 100 {
			answers[at+fmt.Sprint(n+1)] = tc.first
		}
		err := e.pull(e.ref, "")
		if err == nil || errors.Is(err, ErrSignature) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", what, err, tc.want)
		}
	}
}

// Attached signatures are bounded before they are read.
func TestAttachedSignaturesAreBounded(t *testing.T) {
	leakcheck.Start(t)
	e := newSigning(t)
	e.rule(sigstoreRule(e.key, nil))
	large := e.key.sign(e.ref, e.manifest)
	large.payload = append(large.payload, bytes.Repeat([]byte(" "), 2<<20)...)
	e.reg.attach("app", e.manifest, large)
	if err := e.pull(e.ref, ""); err == nil || errors.Is(err, ErrSignature) {
		t.Errorf("a signature of 2 MiB: %v", err)
	}
	small, many := e.key.sign(e.ref, e.manifest), make([]cosigned, 5000)
	for i := range many {
		many[i] = small
	}
	e.reg.attach("app", e.manifest, many...)
	before := e.reg.got("/blobs/")
	if err := e.pull(e.ref, ""); err == nil || errors.Is(err, ErrSignature) {
		t.Errorf("5000 signatures: %v", err)
	}
	if got := e.reg.got("/blobs/"); got != before {
		t.Errorf("%d blobs were read", got-before)
	}
}

// Where signatures are is part of the policy: a file that cannot be read
// refuses, whatever would be found.
func TestABrokenFileOfSources(t *testing.T) {
	leakcheck.Start(t)
	e := newSigning(t)
	e.rule(anything)
	write(t, e.at("registries.d/more.yaml"), "docker: [")
	e.wants("pull", e.pull(e.ref, ""), e.at("registries.d/more.yaml"))
}
