package registry

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

// start returns a registry with one blob of 100 KiB and one manifest.
func start(t *testing.T) (*Registry, digest.Digest, []byte) {
	t.Helper()
	r, err := Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	data := bytes.Repeat([]byte("0123456789abcdef"), 6400)
	d := r.PutBlob(data)
	r.PutManifest("a/b", "1", "application/test", []byte(`{"x":1}`))
	return r, d, data
}

func get(t *testing.T, r *Registry, path string, header http.Header) (*http.Response, []byte, error) {
	t.Helper()
	q, err := http.NewRequest(http.MethodGet, "http://"+r.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range header {
		q.Header[name] = values
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	res, err := client.Do(q)
	if err != nil {
		return nil, nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return res, body, err
}

func TestServesBlobsManifestsAndTags(t *testing.T) {
	r, d, data := start(t)
	res, body, err := get(t, r, "/v2/any/repo/blobs/"+d.String(), nil)
	if err != nil || res.StatusCode != 200 || !bytes.Equal(body, data) {
		t.Fatalf("blob: %v, status %v, %d bytes", err, res, len(body))
	}
	res, body, err = get(t, r, "/v2/any/blobs/"+d.String(), http.Header{"Range": {"bytes=16-31"}})
	if err != nil || res.StatusCode != 206 || string(body) != "0123456789abcdef" {
		t.Fatalf("range: %v, %v, %q", err, res, body)
	}
	byTag, body, err := get(t, r, "/v2/a/b/manifests/1", nil)
	if err != nil || byTag.Header.Get("Content-Type") != "application/test" || string(body) != `{"x":1}` {
		t.Fatalf("manifest: %v, %v, %q", err, byTag, body)
	}
	byDigest, _, err := get(t, r, "/v2/a/b/manifests/"+byTag.Header.Get("Docker-Content-Digest"), nil)
	if err != nil || byDigest.StatusCode != 200 {
		t.Fatalf("manifest by digest: %v, %v", err, byDigest)
	}
	if _, body, err = get(t, r, "/v2/a/b/tags/list", nil); err != nil || string(body) != `{"name":"a/b","tags":["1"]}` {
		t.Fatalf("tags: %v, %q", err, body)
	}
	for _, path := range []string{"/v2/a/b/manifests/2", "/v2/a/b/blobs/sha256:00", "/v2/nothing"} {
		if res, _, err := get(t, r, path, nil); err != nil || res.StatusCode != 404 {
			t.Errorf("%s: %v, %v; want 404", path, err, res)
		}
	}
}

func TestFaultsOfTheBody(t *testing.T) {
	r, d, data := start(t)
	path := "/v2/a/b/blobs/" + d.String()

	remove := r.Script(Fault{Path: "/blobs/", CutAfter: 1000})
	if _, body, err := get(t, r, path, nil); err == nil || len(body) != 1000 {
		t.Errorf("cut: %d bytes, error %v; want 1000 and an error", len(body), err)
	}
	remove()
	remove()

	remove = r.Script(Fault{Path: "/blobs/", NoLength: true})
	res, body, err := get(t, r, path, nil)
	if err != nil || res.ContentLength != -1 || !bytes.Equal(body, data) {
		t.Errorf("no length: %v, length %d", err, res.ContentLength)
	}
	remove()

	remove = r.Script(Fault{Path: "/blobs/", Rate: 400_000})
	begin := time.Now()
	if _, body, err := get(t, r, path, nil); err != nil || !bytes.Equal(body, data) {
		t.Errorf("drip: %v", err)
	}
	if took := time.Since(begin); took < 200*time.Millisecond {
		t.Errorf("drip took %v, want at least 200ms for 100 KiB at 400 kB/s", took)
	}
	remove()

	remove = r.Script(Fault{Path: "/blobs/", Garbage: 4})
	if _, body, err := get(t, r, path, nil); err != nil || !bytes.Equal(body[:5], []byte("\x00\x00\x00\x004")) || len(body) != len(data) {
		t.Errorf("garbage: %v, %q", err, body[:5])
	}
	remove()

	defer r.Script(Fault{Path: "/blobs/", IgnoreRange: true})()
	if res, body, err := get(t, r, path, http.Header{"Range": {"bytes=1-2"}}); err != nil || res.StatusCode != 200 || len(body) != len(data) {
		t.Errorf("ignored range: %v, %v", err, res)
	}
}

func TestStallLastsUntilTheClientLeaves(t *testing.T) {
	r, d, _ := start(t)
	defer r.Script(Fault{Path: "/blobs/", StallAfter: 500})()
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr()+"/v2/a/blobs/"+d.String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil || len(body) != 500 {
		t.Fatalf("%d bytes, error %v; want 500 and the deadline", len(body), err)
	}
	deadline := time.Now().Add(2 * time.Second)
	for len(r.Requests()) == 0 && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	if log := r.Requests(); len(log) != 1 || !log[0].Broken || log[0].Sent != 500 {
		t.Errorf("log %+v; want one broken request with 500 bytes", log)
	}
}

func TestScriptedStatusesByCount(t *testing.T) {
	r, _, _ := start(t)
	r.Script(Fault{Method: http.MethodGet, Path: "/manifests/", Skip: 1, Times: 2, Status: 503, Body: "later"})
	var got []int
	for range 4 {
		res, _, err := get(t, r, "/v2/a/b/manifests/1", nil)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, res.StatusCode)
	}
	want := []int{200, 503, 503, 200}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("statuses %v, want %v", got, want)
		}
	}
	if n := r.Count(http.MethodGet, "/manifests/"); n != 4 {
		t.Errorf("log counts %d requests, want 4", n)
	}
	if r.Requests()[0].Fault || !r.Requests()[1].Fault {
		t.Errorf("log marks faults wrongly: %+v", r.Requests())
	}
	r.ResetLog()
	if len(r.Requests()) != 0 {
		t.Error("the log survived its reset")
	}
}

func TestRedirectChallengeHangupAndBasic(t *testing.T) {
	r, _, _ := start(t)
	remove := r.Script(Redirect("/manifests/", "http://127.0.0.1:1/elsewhere"))
	if res, _, err := get(t, r, "/v2/a/b/manifests/1", nil); err != nil || res.StatusCode != 307 || res.Header.Get("Location") != "http://127.0.0.1:1/elsewhere" {
		t.Errorf("redirect: %v, %v", err, res)
	}
	remove()
	remove = r.Script(Challenge("/manifests/", `Bearer realm="http://x"`))
	if res, _, err := get(t, r, "/v2/a/b/manifests/1", nil); err != nil || res.StatusCode != 401 || !strings.HasPrefix(res.Header.Get("WWW-Authenticate"), "Bearer") {
		t.Errorf("challenge: %v, %v", err, res)
	}
	remove()
	remove = r.Script(Fault{Hangup: true})
	if _, _, err := get(t, r, "/v2/", nil); err == nil {
		t.Error("hangup: an answer came")
	}
	remove()
	r.RequireBasic("u", "p")
	if res, _, err := get(t, r, "/v2/", nil); err != nil || res.StatusCode != 401 {
		t.Errorf("no credentials: %v, %v; want 401", err, res)
	}
	if res, _, err := get(t, r, "/v2/", http.Header{"Authorization": {"Basic dTpw"}}); err != nil || res.StatusCode != 200 {
		t.Errorf("credentials: %v, %v; want 200", err, res)
	}
}

func TestTokens(t *testing.T) {
	r, d, _ := start(t)
	r.RequireTokens("u", "p", time.Hour)
	path := "/v2/a/blobs/" + d.String()
	res, _, err := get(t, r, path, nil)
	if err != nil || res.StatusCode != 401 || !strings.Contains(res.Header.Get("WWW-Authenticate"), "http://"+r.Addr()+"/token") {
		t.Fatalf("without a token: %v %v", res, err)
	}
	if res, _, err = get(t, r, "/token", nil); err != nil || res.StatusCode != 401 {
		t.Errorf("a token for nobody: %v %v", res, err)
	}
	basic := http.Header{"Authorization": {"Basic dTpw"}}
	if res, _, err = get(t, r, "/token", basic); err != nil || res.StatusCode != 200 || len(r.Tokens()) != 1 {
		t.Fatalf("a token: %v %v", res, err)
	}
	bearer := http.Header{"Authorization": {"Bearer " + r.Tokens()[0]}}
	if res, _, err = get(t, r, path, bearer); err != nil || res.StatusCode != 200 {
		t.Errorf("with the token: %v %v", res, err)
	}
	r.RequireTokens("", "", 0)
	if res, _, err = get(t, r, path, nil); err != nil || res.StatusCode != 200 {
		t.Errorf("open again: %v %v", res, err)
	}
}
