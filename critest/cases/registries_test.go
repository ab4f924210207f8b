package cases

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/critest/images"
	"berth/critest/node"
	"berth/critest/registry"
)

// besides starts a registry beside the shared one, with an image.
func besides(t *testing.T, repository string, layers ...images.Layer) (*registry.Registry, images.Published) {
	t.Helper()
	r, err := registry.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	if len(layers) == 0 {
		layers = []images.Layer{layer(t, images.File("f", 0o644, repository))}
	}
	done, err := images.Image{Layers: layers, Stamp: repository}.Publish(r, repository, "1")
	if err != nil {
		t.Fatal(err)
	}
	return r, done
}

// registriesConf replaces the node's registries.conf.
func (e *env) registriesConf(text string) {
	e.Helper()
	e.write("registries.conf", text)
}

// write writes a file of the node's directory.
func (e *env) write(name, text string) string {
	e.Helper()
	path := filepath.Join(e.Dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		e.Fatal(err)
	}
	return path
}

// mirrors sends docker.io to these, all insecure but those that begin with "tls:".
func mirrors(hosts ...string) string {
	text := "[[registry]]\nprefix = \"docker.io\"\nlocation = \"127.0.0.1:2\"\n"
	for _, h := range hosts {
		host, tls := strings.CutPrefix(h, "tls:")
		text += fmt.Sprintf("[[registry.mirror]]\nlocation = %q\ninsecure = %v\n", host, !tls)
	}
	return text
}

// pullWith pulls with credentials and gives the error.
func (e *env) pullWith(reference string, auth *cri.AuthConfig) error {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.ctx, time.Minute)
	defer cancel()
	_, err := e.im.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: reference}, Auth: auth})
	return err
}

// B01: a mirror that does not help is passed over, at the manifest and at a
// blob; without any that helps the error names each and how the kubelet is to
// take it.
func TestB01TheNextMirrorIsAsked(t *testing.T) {
	a, _ := besides(t, "x/y")
	b, _ := besides(t, "x/y")
	e := start(t, node.Options{})
	for name, c := range map[string]struct {
		host  string
		fault registry.Fault
		says  string
	}{
		"503":               {a.Addr(), registry.Fault{Status: 503}, "answered 503 Service Unavailable"},
		"404":               {a.Addr(), registry.Fault{Status: 404}, "answered 404 Not Found"},
		"429":               {a.Addr(), registry.Fault{Status: 429}, "answered 429 Too Many Requests"},
		"closed port":       {"127.0.0.1:1", registry.Fault{}, "connection refused"},
		"TLS on plain port": {"tls:" + a.Addr(), registry.Fault{}, "HTTP response to HTTPS client"},
		"hangs up":          {a.Addr(), registry.Fault{Hangup: true}, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			e := *e
			e.T = t
			remove := a.Script(c.fault)
			defer remove()
			e.registriesConf(mirrors(c.host, b.Addr()))
			if out, err := e.Crictl(e.ctx, "pull", "docker.io/x/y:1"); err != nil {
				t.Fatalf("crictl pull: %v\n%s", err, out)
			}
			e.remove("docker.io/x/y:1")
			e.registriesConf(mirrors(c.host))
			err := e.pullWith("docker.io/x/y:1", nil)
			said := status.Convert(err)
			if said.Code() != codes.Unknown || !strings.HasPrefix(said.Message(), "RegistryUnavailable") {
				t.Errorf("code %s: %v", said.Code(), err)
			}
			for _, part := range []string{strings.TrimPrefix(c.host, "tls:") + "/x/y: ", c.says, "127.0.0.1:2/x/y: ", "docker.io/x/y:1"} {
				if !strings.Contains(said.Message(), part) {
					t.Errorf("%q does not say %q", said.Message(), part)
				}
			}
		})
	}
	for status, want := range map[int]codes.Code{404: codes.NotFound, 401: codes.Unauthenticated, 403: codes.Unauthenticated} {
		remove := b.Script(registry.Fault{Status: status})
		e.registriesConf(strings.Replace(mirrors("127.0.0.1:1"), `"127.0.0.1:2"`, fmt.Sprintf("%q\ninsecure = true", b.Addr()), 1))
		e.refusedAs(e.pullWith("docker.io/x/y:1", nil), want)
		remove()
	}
}

// refusedAs wants a code, and none of the words by which a kubelet takes an
// error for one of the registry's.
func (e *env) refusedAs(err error, want codes.Code) {
	e.Helper()
	if said := status.Convert(err); said.Code() != want || strings.HasPrefix(said.Message(), "RegistryUnavailable") {
		e.Errorf("code %s, want %s: %v", said.Code(), want, err)
	}
}

// B01: a blob that a mirror has not, or cannot give now, comes from the next one;
// the rest of the pull is not done anew.
func TestB01ABlobComesFromTheNextMirror(t *testing.T) {
	one, two := layer(t, images.File("one", 0o644, strings.Repeat("1", 3<<20))), layer(t, images.File("two", 0o644, "2"))
	a, _ := besides(t, "x/blob", one, two)
	b, _ := besides(t, "x/blob", one, two)
	e := start(t, node.Options{})
	e.registriesConf(mirrors(a.Addr(), b.Addr()))
	blob := a.PutBlob(one.Blob).String()
	for name, f := range map[string]registry.Fault{
		"missing": {Status: 404}, "503": {Status: 503}, "cut": {CutAfter: 1000}, "hangs up": {Hangup: true},
	} {
		f.Path = blob
		remove := a.Script(f)
		a.ResetLog()
		b.ResetLog()
		e.pull("docker.io/x/blob:1")
		if n := b.Count("GET", blob); n != 1 {
			t.Errorf("%s: the next mirror was asked %d times for the blob", name, n)
		}
		if n, m := a.Count("GET", "/manifests/"), b.Count("GET", "/manifests/"); n != 1 || m != 0 {
			t.Errorf("%s: %d and %d manifests were asked for", name, n, m)
		}
		remove()
		e.remove("docker.io/x/blob:1")
	}
}

// secretsOf looks for words that nobody may print, in the error and in the
// daemon's log, which is at its most talkative.
func (e *env) secretsOf(err error, words ...string) {
	e.Helper()
	log, lerr := os.ReadFile(filepath.Join(e.Dir, "berth.log"))
	if lerr != nil {
		e.Fatal(lerr)
	}
	for _, word := range words {
		if strings.Contains(fmt.Sprint(err), word) {
			e.Errorf("the error tells %s: %v", word, err)
		}
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, word) {
				e.Errorf("the log tells %s: %s", word, line)
			}
		}
	}
}

// B09: signed URLs, passwords, tokens, headers and a proxy's login are told
// nowhere; host and path are.
func TestB09NoSecretIsTold(t *testing.T) {
	r, done := besides(t, "x/secret")
	hosts := t.TempDir()
	write := func(name, text string) {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(hosts, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(hosts, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("auth.json", `{"auths":{"file.test":{"auth":"dTpTRUNSRVQ2"}}}`) // u:SECRET6
	write("file.test/hosts.toml", fmt.Sprintf("server = 'http://%s'\n[host.'http://%s']\n[host.'http://%s'.header]\nX-Key = 'SECRET4'\n", r.Addr(), r.Addr(), r.Addr()))
	e := start(t, node.Options{
		LogLevel: "trace",
		Wrap:     []string{"env", "HTTP_PROXY=http://u:SECRET5@127.0.0.1:1", "HTTPS_PROXY=u:SECRET5@127.0.0.1:1"},
		Settings: map[string]string{"image": fmt.Sprintf("hosts_dir = %q\nauth_file = %q", hosts, filepath.Join(hosts, "auth.json"))},
	})
	e.registriesConf(mirrors(r.Addr()))
	all := []string{"SECRET1", "SECRET2", "SECRET3", "SECRET4", "SECRET5", "SECRET6", "dTpTRUNSRVQ"}

	remove := r.Script(registry.Redirect("/blobs/", "http://127.0.0.1:1/b?sig=SECRET1"))
	err := e.pullWith("docker.io/x/secret:1", nil)
	if !strings.Contains(fmt.Sprint(err), "http://127.0.0.1:1/b: ") {
		t.Errorf("host and path are not told: %v", err)
	}
	e.secretsOf(err, all...)
	remove()

	r.RequireBasic("u", "other")
	err = e.pullWith(r.Addr()+"/x/secret:1", &cri.AuthConfig{Username: "u", Password: "SECRET2"})
	e.secretsOf(err, all...)
	err = e.pullWith("docker.io/x/secret:1", &cri.AuthConfig{RegistryToken: "SECRET3", ServerAddress: r.Addr()})
	if status.Code(err) != codes.Unknown { // the upstream, which nobody can reach, decides
		t.Error(err)
	}
	e.secretsOf(err, all...)
	err = e.pullWith("file.test/x/secret:1", nil)
	e.refusedAs(err, codes.Unauthenticated)
	e.secretsOf(err, all...)
	err = e.pullWith("proxied.test/x/secret:1", nil)
	if err == nil {
		t.Error("a registry behind a proxy that is none")
	}
	e.secretsOf(err, all...)
	r.RequireTokens("u", "p", time.Minute)
	if err := e.pullWith("docker.io/x/secret:1", &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "http://" + r.Addr()}); err != nil {
		t.Error(err)
	}
	e.secretsOf(nil, append(all, r.Tokens()...)...)
	if img := e.image("docker.io/x/secret:1"); img.GetId() != done.Config.String() {
		t.Errorf("got %v", img)
	}
}

// B11: a token that ends in mid-pull is replaced and the pull goes on; 429 is
// obeyed; credentials are asked for again in each pull.
func TestB11TokensAndLimitsInMidPull(t *testing.T) {
	slow, next := layer(t, images.File("slow", 0o644, strings.Repeat("s", 1<<20))), layer(t, images.File("next", 0o644, "n"))
	r, _ := besides(t, "x/tokens", slow, next)
	e := start(t, node.Options{Mirror: r.Addr(), Settings: map[string]string{"image": "max_concurrent_downloads = 1"}})
	reference := r.Addr() + "/x/tokens:1"
	good := &cri.AuthConfig{Username: "u", Password: "p"}
	r.RequireTokens("u", "p", 2*time.Second)
	for _, l := range []images.Layer{slow, next} {
		defer r.Script(registry.Fault{Path: r.PutBlob(l.Blob).String(), Delay: 2500 * time.Millisecond, Times: 1})()
	}
	if err := e.pullWith(reference, good); err != nil {
		t.Fatal(err)
	}
	if n := r.Count("GET", "/token"); n < 2 {
		t.Errorf("%d tokens for a pull that outlived them", n)
	}
	if n := r.Count("GET", "/manifests/1"); n != 2 { // the challenge, the manifest
		t.Errorf("the manifest was asked for %d times", n)
	}
	// Who comes without, or with other credentials, gets nothing from that.
	e.remove(reference)
	e.refusedAs(e.pullWith(reference, nil), codes.Unauthenticated)
	e.refusedAs(e.pullWith(reference, &cri.AuthConfig{Username: "u", Password: "wrong"}), codes.Unauthenticated)
	r.RequireTokens("", "", 0)

	r.ResetLog()
	blob := r.PutBlob(slow.Blob).String()
	remove := r.Script(registry.Fault{Path: blob, Times: 2, Status: 429, Header: http.Header{"Retry-After": {"1"}}})
	begin := time.Now()
	if err := e.pullWith(reference, nil); err != nil {
		t.Error(err)
	}
	if took, n := time.Since(begin), r.Count("GET", blob); took < 2*time.Second || n != 3 {
		t.Errorf("%d requests for the blob in %v", n, took)
	}
	remove()
	e.remove(reference)
	defer r.Script(registry.Fault{Status: 429, Header: http.Header{"Retry-After": {"7200"}}})()
	begin = time.Now()
	if said := status.Convert(e.pullWith(reference, nil)).Message(); !strings.HasPrefix(said, "RegistryUnavailable") || time.Since(begin) > 30*time.Second {
		t.Errorf("after %v: %s", time.Since(begin), said)
	}
}

// All six fields of an AuthConfig do what they say, and one that is for another
// registry does nothing.
func TestAuthConfigs(t *testing.T) {
	r, _ := besides(t, "x/auth")
	e := start(t, node.Options{Mirror: r.Addr()})
	reference := r.Addr() + "/x/auth:1"
	r.RequireTokens("u", "p:w", time.Minute)
	if err := e.pullWith(reference, &cri.AuthConfig{Username: "u", Password: "p:w"}); err != nil {
		t.Fatal(err)
	}
	token := r.Tokens()[0]
	for name, c := range map[string]struct {
		auth *cri.AuthConfig
		want codes.Code
	}{
		"auth":                      {&cri.AuthConfig{Auth: "dTpwOnc="}, codes.OK},
		"auth, wrong":               {&cri.AuthConfig{Auth: "dTpw"}, codes.Unauthenticated},
		"auth, not base64":          {&cri.AuthConfig{Auth: "%"}, codes.InvalidArgument},
		"identity_token":            {&cri.AuthConfig{IdentityToken: "p:w"}, codes.OK},
		"identity_token, wrong":     {&cri.AuthConfig{IdentityToken: "x"}, codes.Unauthenticated},
		"registry_token":            {&cri.AuthConfig{RegistryToken: token}, codes.OK},
		"registry_token, wrong":     {&cri.AuthConfig{RegistryToken: "x"}, codes.Unauthenticated},
		"server_address":            {&cri.AuthConfig{Username: "u", Password: "p:w", ServerAddress: "http://" + r.Addr() + "/v1/"}, codes.OK},
		"server_address of another": {&cri.AuthConfig{Username: "u", Password: "p:w", ServerAddress: "docker.io"}, codes.Unauthenticated},
		"registry_token of another": {&cri.AuthConfig{RegistryToken: token, ServerAddress: "docker.io"}, codes.Unauthenticated},
		"nothing":                   {&cri.AuthConfig{}, codes.Unauthenticated},
	} {
		if err := e.pullWith(reference, c.auth); status.Code(err) != c.want {
			t.Errorf("%s: %v, want code %s", name, err, c.want)
		}
	}
}

// Files of registries count from the next pull on. A broken one fails the pulls
// that it is about, and says where it is broken.
func TestRegistryFilesWhileRunning(t *testing.T) {
	a, _ := besides(t, "x/a")
	b, _ := besides(t, "x/b")
	hosts := t.TempDir()
	e := start(t, node.Options{Settings: map[string]string{"image": fmt.Sprintf("hosts_dir = %q", hosts)}})
	if said := status.Convert(e.pullWith("hosts.test/x/a:1", nil)).Message(); !strings.HasPrefix(said, "RegistryUnavailable") {
		t.Errorf("a registry that nobody knows: %s", said)
	}
	file := filepath.Join(hosts, "hosts.test", "hosts.toml")
	put := func(text string) {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(fmt.Sprintf("server = 'http://%s'\n", a.Addr()))
	if err := e.pullWith("hosts.test/x/a:1", nil); err != nil {
		t.Error(err)
	}
	put("server = 'http://x'\nmagic = true\n")
	err := e.pullWith("hosts.test/x/a:1", nil)
	e.refusedAs(err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), file+": line 2: the key \"magic\"") {
		t.Error(err)
	}
	e.write("registries.conf.d/10-b.conf", fmt.Sprintf("[[registry]]\nprefix = 'conf.test'\nlocation = %q\ninsecure = true\n", b.Addr()))
	if err := e.pullWith("conf.test/x/b:1", nil); err != nil {
		t.Errorf("another registry beside a broken file: %v", err)
	}
	e.write("registries.conf.d/20-b.conf", "[[registry]]\nprefix = 'hosts.test'\nlocation = 'else.test'\n")
	put("server = 'http://x'\n")
	if err = e.pullWith("hosts.test/x/a:1", nil); !strings.Contains(fmt.Sprint(err), "configured twice") {
		t.Errorf("in both files: %v", err)
	}
	path := e.write("registries.conf.d/20-b.conf", "\n\nblocked = = true\n")
	err = e.pullWith("conf.test/x/b:1", nil)
	e.refusedAs(err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), path) || !strings.Contains(fmt.Sprint(err), "line 3") {
		t.Error(err)
	}
	e.write("registries.conf.d/20-b.conf", "[[registry]]\nlocation = 'conf.test/x/b'\nblocked = true\n")
	err = e.pullWith("conf.test/x/b:1", nil)
	e.refusedAs(err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), "blocked") {
		t.Error(err)
	}
	if img := e.image("conf.test/x/b:1"); img == nil { // what is here can be looked at all the same
		t.Error("the image is gone")
	}
}

// A name without a registry is looked for where registries.conf says, and found
// again by the same name.
func TestShortNames(t *testing.T) {
	a, _ := besides(t, "x/a")
	b, done := besides(t, "x/short")
	e := start(t, node.Options{})
	conf := "unqualified-search-registries = ['a.test', 'b.test']\n"
	for name, r := range map[string]*registry.Registry{"a.test": a, "b.test": b} {
		conf += fmt.Sprintf("[[registry]]\nprefix = %q\nlocation = %q\ninsecure = true\n", name, r.Addr())
	}
	e.registriesConf(conf)
	if err := e.pullWith("x/short:1", nil); err != nil {
		t.Fatal(err)
	}
	img := e.image("x/short:1")
	if img.GetId() != done.Config.String() || strings.Join(img.GetRepoTags(), " ") != "b.test/x/short:1" {
		t.Errorf("by its short name: %v", img)
	}
	// A registry that is out of reach may have it: the name does not go to the next.
	remove := a.Script(registry.Fault{Status: 503})
	if said := status.Convert(e.pullWith("x/short:1", nil)).Message(); !strings.HasPrefix(said, "RegistryUnavailable") || !strings.Contains(said, "a.test/x/short:1") {
		t.Error(said)
	}
	remove()
	err := e.pullWith("x/nowhere:1", nil)
	e.refusedAs(err, codes.NotFound)
	for _, part := range []string{"a.test/x/nowhere:1", "b.test/x/nowhere:1"} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("%v does not name %s", err, part)
		}
	}
	// A kubelet takes such a name for Docker Hub's: its credentials are not for these.
	a.RequireBasic("u", "p")
	_ = e.pullWith("x/short:1", &cri.AuthConfig{Username: "u", Password: "p"})
	for _, q := range a.Requests() {
		if q.User != "" {
			t.Errorf("the credentials went to another registry: %+v", q)
		}
	}
	e.registriesConf("short-name-mode = 'enforcing'\n" + conf)
	err = e.pullWith("x/short:1", nil)
	e.refusedAs(err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), "a.test/x/short:1 or b.test/x/short:1") {
		t.Error(err)
	}
	e.registriesConf("short-name-mode = 'enforcing'\n" + conf + "[aliases]\n'x/short' = 'b.test/x/short'\n")
	if err := e.pullWith("x/short:1", nil); err != nil {
		t.Error(err)
	}
}
