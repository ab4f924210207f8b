package cases

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
)

// policed is a node under a signature policy.
type policed struct {
	*env
	dir       string
	key, next images.Key
	config    *cri.PodSandboxConfig
	pod       string
}

// write puts a file beside the policy.
func (p policed) write(name string, data []byte) string {
	p.Helper()
	path := filepath.Join(p.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		p.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		p.Fatal(err)
	}
	return path
}

// want makes the policy: docker.io/cases is to be signed by a key, the images of
// registry.k8s.io may be used, nothing else but archives.
func (p policed) want(file string, public []byte) {
	p.Helper()
	anything := []any{map[string]any{"type": "insecureAcceptAnything"}}
	data, err := json.Marshal(map[string]any{
		"default": []any{map[string]any{"type": "reject"}},
		"transports": map[string]any{
			"docker": map[string]any{
				"docker.io/cases": []any{map[string]any{"type": "sigstoreSigned", "keyData": public}},
				"registry.k8s.io": anything,
			},
			"oci-archive": map[string]any{"": anything},
		},
	})
	if err != nil {
		p.Fatal(err)
	}
	p.write(file, data)
}

// startPoliced starts a node, through a command where one is given.
func startPoliced(t *testing.T, through ...string) policed {
	p := policed{env: &env{T: t}, dir: t.TempDir()}
	for _, k := range []*images.Key{&p.key, &p.next} {
		var err error
		if *k, err = images.NewKey(); err != nil {
			t.Fatal(err)
		}
	}
	p.want("policy.json", p.key.Public)
	p.write("namespaces/closed.json", []byte(`{"default": [{"type": "reject"}]}`))
	p.write("registries.d/mirror.yaml", []byte("docker:\n  "+reg.Addr()+":\n    use-sigstore-attachments: true\n"))
	p.env = start(t, node.Options{Wrap: through, Settings: map[string]string{"image": fmt.Sprintf("policy = %q\npolicy_dir = %q\nregistries_dir = %q",
		p.dir+"/policy.json", p.dir+"/namespaces", p.dir+"/registries.d")}})
	p.write("namespaces/broken.json", []byte("{")) // a start would be refused
	p.config = p.sandbox()
	p.pod = p.run(p.config)
	return p
}

// publish serves an image docker.io/cases/NAME:1 and signs it unless key is none.
func (p policed) publish(name string, key *images.Key) string {
	p.Helper()
	m := images.Image{Layers: []images.Layer{parts.Base}, Config: ispec.ImageConfig{Env: []string{"PATH=/bin"}}, Stamp: name}
	done, err := m.Publish(reg, "cases/"+name, "1")
	if err != nil {
		p.Fatal(err)
	}
	ref := "docker.io/cases/" + name + ":1"
	if key != nil {
		if err := key.Sign(reg, "cases/"+name, done.Manifest, ref); err != nil {
			p.Fatal(err)
		}
	}
	return ref
}

func (p policed) tryPull(ref, namespace string) error {
	req := &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}}
	if namespace != "" {
		req.SandboxConfig = p.sandbox()
		req.SandboxConfig.Metadata.Namespace = namespace
	}
	_, err := p.im.PullImage(p.ctx, req)
	return err
}

func (p policed) tryCreate(name, ref string, mounts ...*cri.Mount) (string, error) {
	c := command(name, "echo runs; sleep 1000")
	c.Image, c.Mounts = &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref}, mounts
	if img := p.image(ref); img != nil {
		c.Image.Image = img.GetId() // as the kubelet does
	}
	res, err := p.rt.CreateContainer(p.ctx, &cri.CreateContainerRequest{PodSandboxId: p.pod, Config: c, SandboxConfig: p.config})
	return res.GetContainerId(), err
}

// fails wants the word that the kubelet looks for at the very beginning.
func (p policed) fails(what string, err error, words ...string) {
	p.Helper()
	p.refused(what, err, codes.Unknown, words...)
	if err != nil && !strings.HasPrefix(err.Error(), "rpc error: code = Unknown desc = SignatureValidationFailed") {
		p.Errorf("%s: %v does not begin with SignatureValidationFailed", what, err)
	}
}

// The policy is asked at the pull and again at every use; what runs, runs on.
func TestSignaturePolicy(t *testing.T) {
	p := startPoliced(t)
	signed, unsigned, foreign := p.publish("signed", &p.key), p.publish("unsigned", nil), p.publish("foreign", &p.next)
	p.fails("pull without a signature", p.tryPull(unsigned, ""), unsigned, "no signature exists", p.dir+"/policy.json")
	p.fails("pull by another key", p.tryPull(foreign, ""), foreign, "verification failed")
	if img := p.image(unsigned); img != nil {
		t.Errorf("a refused pull left %v", img)
	}
	p.pull(signed)
	p.pull(images.Busybox)
	id, err := p.tryCreate("a", signed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.rt.StartContainer(p.ctx, &cri.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	p.said(id, "runs\n")

	p.want("policy.json", p.next.Public)
	_, err = p.tryCreate("b", signed)
	p.fails("container of a cached image under another key", err, "config.image", signed, "verification failed")
	_, err = p.tryCreate("c", images.Busybox, imageMount("/v", signed, ""))
	p.fails("volume of a cached image under another key", err, "mounts[0].image", "verification failed")
	p.write("policy.json", []byte("{"))
	_, err = p.tryCreate("d", images.Busybox)
	p.fails("container under a broken policy", err, p.dir+"/policy.json")
	p.fails("pull under a broken policy", p.tryPull(images.Busybox, ""), p.dir+"/policy.json")
	p.fails("pull in a namespace without a policy under a broken one", p.tryPull(images.Busybox, "free"), p.dir+"/policy.json")
	if out := p.exec(id, "echo on"); out != "on\n" {
		t.Errorf("what ran before says %q", out)
	}

	p.want("policy.json", p.key.Public)
	if _, err = p.tryCreate("e", signed, imageMount("/v", signed, "")); err != nil {
		t.Errorf("under the first policy again: %v", err)
	}
}

// Each namespace may have a policy of its own, also for images that are here.
func TestSignaturePolicyOfNamespaces(t *testing.T) {
	p := startPoliced(t)
	p.pull(images.Busybox)
	p.fails("pull", p.tryPull(images.Busybox, "closed"), "rejected by policy", p.dir+"/namespaces/closed.json")
	p.fails("pull", p.tryPull(images.Busybox, "broken"), p.dir+"/namespaces/broken.json")
	for namespace, words := range map[string]string{"closed": "rejected by policy", "broken": "broken.json", "free": ""} {
		q := p
		q.config = p.sandbox()
		q.config.Metadata.Namespace = namespace
		q.pod = p.run(q.config)
		_, err := q.tryCreate("c", images.Busybox)
		if words != "" {
			p.fails("container in namespace "+namespace, err, words)
		} else if err != nil {
			t.Errorf("container in namespace %s: %v", namespace, err)
		}
	}
}

// An archive brings no name past the rule for that name.
func TestSignaturePolicyOfImports(t *testing.T) {
	p := startPoliced(t)
	for name, words := range map[string]string{"docker.io/cases/smuggled:1": "no signature exists", "vendor.example/brought:1": ""} {
		m := images.Image{Layers: []images.Layer{parts.Base}, Config: ispec.ImageConfig{Env: []string{"PATH=/bin"}}, Stamp: name}
		data, _, err := m.OCIArchive(name)
		if err != nil {
			t.Fatal(err)
		}
		if out, code := p.berth("image", "--socket", p.Socket, "import", p.write("archive.tar", data)); code != 0 {
			t.Fatalf("import %s: %s", name, out)
		}
		_, err = p.tryCreate("c-"+strings.NewReplacer(".", "", "/", "", ":", "").Replace(name), name)
		if words != "" {
			p.fails("container of "+name, err, words)
		} else if err != nil {
			t.Errorf("container of %s: %v", name, err)
		}
	}
	p.write("policy.json", []byte(`{"default": [{"type": "reject"}]}`))
	_, err := p.tryCreate("d", "vendor.example/brought:1")
	p.fails("container of an archive that is admitted no longer", err, "rejected by policy")
}

// A restore asks the policy as a creation does, about volumes too, and leaves no pod of
// what is refused.
func TestSignaturePolicyOfRestores(t *testing.T) {
	tools := t.TempDir()
	// What CRIU would say of itself where it works; it is not needed before the refusal.
	if err := os.WriteFile(filepath.Join(tools, "criu"), []byte("#!/bin/sh\nexit 0\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := startPoliced(t, "env", "PATH="+tools+":"+os.Getenv("PATH"))
	signed := p.publish("restored", &p.key)
	id := p.pull(signed)
	p.pull(images.Busybox)
	p.removePod(p.pod)
	restore := func(name, image, namespace string, mounts ...*cri.Mount) error {
		dir := t.TempDir()
		text := fmt.Sprintf(`{"version":1,"engineVersion":"x","handler":"runc","namespaces":"network=POD ipc=POD pid=CONTAINER","checkpointedAt":"2026-01-01T00:00:00Z",
			"containers":[{"name":%q,"imageID":%q,"process":{"args":[],"env":[],"cwd":"/","uid":0,"gid":0}}]}`, name, image)
		if err := os.WriteFile(filepath.Join(dir, "pod.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c := command(name, "sleep 1000")
		c.Image, c.Mounts = &cri.ImageSpec{Image: image}, mounts
		r := &cri.RestorePodRequest{CheckpointPath: dir, Config: p.sandbox(), ContainerConfigs: []*cri.ContainerConfig{c}}
		if namespace != "" {
			r.Config.Metadata.Namespace = namespace
		}
		_, err := p.rt.RestorePod(p.ctx, r)
		p.empty("restore of " + name)
		return err
	}
	admitted := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "files of the checkpoint") {
			t.Errorf("%s: %v, want no worse than the checkpoint, which has no files", what, err)
		}
	}
	admitted("a signed image", restore("a", id, ""))
	p.fails("an image in a namespace that admits none", restore("b", id, "closed"), "rejected by policy")
	p.want("policy.json", p.next.Public)
	p.fails("an image that is admitted no longer", restore("c", id, ""), "config.image", "verification failed")
	busybox := p.image(images.Busybox).GetId()
	p.fails("a volume that is admitted no longer", restore("d", busybox, "", imageMount("/v", signed, "")), "mounts[0].image", "verification failed")
	p.write("policy.json", []byte("{"))
	p.fails("a broken policy", restore("e", id, ""), p.dir+"/policy.json")
	p.want("policy.json", p.key.Public)
	admitted("under the first policy again", restore("f", id, ""))
}
