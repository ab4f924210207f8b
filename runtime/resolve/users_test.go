package resolve

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/spec"
)

const passwd = `root:x:0:0:root:/root:/bin/sh
# a comment: with: some: colons: in: it:
broken line
+::::::
app:x:1000:1000::/home/app:/bin/sh
app:x:0:0:the later line of a name does not count:/:/bin/sh
www-data:x:33:33::/var/www:/bin/false
99999999999:x:0:0::/:/bin/sh
2147483648:x:0:0::/:/bin/sh
4294967296:x:0:0::/:/bin/sh
-1:x:0:0::/:/bin/sh
0x0:x:0:0::/:/bin/sh
wrap:x:4294967296:0::/:/bin/sh
wrapgroup:x:1500:4294967296::/:/bin/sh
minus:x:-1:0::/:/bin/sh
` + "crlf:x:1600:1600::/home/crlf:/bin/sh\r\n" + "last:x:1700:1700::/home/last:/bin/sh"

const group = `root:x:0:
app:x:1000:
x:x:500:
predefined:x:50000:app,other
docker:x:998:other
more:x:60:x,app
4294967297:x:0:
wrapped:x:4294967296:victim
nogid:x::app-not
short
`

// rootfs makes a tree with passwd and group files.
func rootfs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "etc/passwd"), passwd)
	write(t, filepath.Join(dir, "etc/group"), group)
	return dir
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func userRequest(root, imageUser string, sc *cri.LinuxContainerSecurityContext) Request {
	return Request{
		Rootfs: root, Image: &ispec.Image{Config: ispec.ImageConfig{User: imageUser}}, Sandbox: &cri.PodSandboxConfig{},
		Config: &cri.ContainerConfig{Linux: &cri.LinuxContainerConfig{SecurityContext: sc}},
	}
}

// TestB43ImageUsers: every USER of an image gives a user or a refusal, and
// never one that a passwd line for a number-like name smuggled in.
func TestB43ImageUsers(t *testing.T) {
	root := rootfs(t)
	for user, want := range map[string]string{
		"": "0:0 [0] root", "0": "0:0 [0] root", "root": "0:0 [0] root",
		"1000": "1000:1000 [60 1000 50000] app", "app": "1000:1000 [60 1000 50000] app", "01000": "1000:1000 [60 1000 50000] app",
		"www-data": "33:33 [33] www-data", "www-data:x": "33:500 [500] www-data", "1003:x": "1003:500 [500] ", "4711": "4711:0 [0] ",
		"app:0": "1000:0 [0 60 50000] app", ":500": "0:500 [500] root", "app:": "1000:1000 [60 1000 50000] app",
		"2147483647": "2147483647:0 [0] ", "5:2147483647": "5:2147483647 [2147483647] ", "crlf": "1600:1600 [1600] crlf", "last": "1700:1700 [1700] last",
	} {
		got, err := resolveUser(userRequest(root, user, nil))
		text := fmt.Sprintf("%d:%d %v %s", got.UID, got.GID, got.AdditionalGIDs, got.Username)
		if err != nil || text != want {
			t.Errorf("USER %q: %s, %v; want %s", user, text, err, want)
		}
	}
	for user, begins := range map[string]string{
		"2147483648": `image User "2147483648": must be between`, "4294967295": "image User", "4294967296": "image User",
		"99999999999": "image User", "2147483648:5": "image User", "-1": `image User "-1": looks like a number`, "0x0": `image User "0x0": looks`,
		"1000:4294967296": `image User "4294967296": must be between`, "1000:4294967297": "image User", "app:-1": "image User", "1:2:3": "image User",
		"ghost": `image User "ghost": no such user`, "app:ghost": `image User "ghost": no such group`, "app:wrapped": `image User "wrapped": the image's group file`,
		"wrap": `image User "wrap": the image's passwd`, "minus": `image User "minus": the image's passwd`, "wrapgroup": `image User "wrapgroup": the image's passwd`,
		"app:nogid": `image User "nogid": the image's group file`, "../x": "image User",
	} {
		got, err := resolveUser(userRequest(root, user, nil))
		if !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), begins) {
			t.Errorf("USER %q: %+v, %v; want an error that begins with %s", user, got, err, begins)
		}
	}
}

func TestRequestedUsers(t *testing.T) {
	root := rootfs(t)
	id := func(v int64) *cri.Int64Value { return &cri.Int64Value{Value: v} }
	strict := cri.SupplementalGroupsPolicy_Strict
	type S = cri.LinuxContainerSecurityContext
	for name, c := range map[string]struct {
		sc   *S
		want string
	}{
		"uid in passwd":              {&S{RunAsUser: id(1000)}, "1000:1000 [60 1000 50000]"},
		"uid in no passwd":           {&S{RunAsUser: id(77)}, "77:0 [0]"},
		"uid and gid":                {&S{RunAsUser: id(1000), RunAsGroup: id(9)}, "1000:9 [9 60 50000]"},
		"name":                       {&S{RunAsUsername: "app"}, "1000:1000 [60 1000 50000]"},
		"name and gid":               {&S{RunAsUsername: "www-data", RunAsGroup: id(9)}, "33:9 [9]"},
		"merge":                      {&S{RunAsUser: id(1000), SupplementalGroups: []int64{1234, 60}}, "1000:1000 [60 1000 1234 50000]"},
		"strict":                     {&S{RunAsUser: id(1000), SupplementalGroups: []int64{1234}, SupplementalGroupsPolicy: strict}, "1000:1000 [1000 1234]"},
		"strict alone":               {&S{RunAsUsername: "app", SupplementalGroupsPolicy: strict}, "1000:1000 [1000]"},
		"groups beside image's user": {&S{SupplementalGroups: []int64{7}}, "33:500 [7 500]"},
		"the image's group is gone":  {&S{RunAsUser: id(33)}, "33:33 [33]"},
	} {
		got, err := resolveUser(userRequest(root, "www-data:x", c.sc))
		if text := fmt.Sprintf("%d:%d %v", got.UID, got.GID, got.AdditionalGIDs); err != nil || text != c.want {
			t.Errorf("%s: %s, %v; want %s", name, text, err, c.want)
		}
	}
	for name, c := range map[string]struct {
		sc     *S
		begins string
	}{
		"ghost":            {&S{RunAsUsername: "ghost"}, `linux.security_context.run_as_username "ghost": no such user`},
		"a number as name": {&S{RunAsUsername: "99999999999"}, `linux.security_context.run_as_username "99999999999"`},
		"a broken user":    {&S{RunAsUsername: "wrap"}, `linux.security_context.run_as_username "wrap": the image's passwd`},
	} {
		if got, err := resolveUser(userRequest(root, "", c.sc)); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), c.begins) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

func TestGroupOutOfRangeIsRefused(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "etc/passwd"), "victim:x:5:5::/:\n")
	write(t, filepath.Join(root, "etc/group"), "wrapped:x:4294967296:victim\n")
	_, err := resolveUser(userRequest(root, "victim", nil))
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "wrapped") {
		t.Errorf("a group that wraps to 0: %v", err)
	}
}

// A passwd that is no file is the image's fault; one that leads nowhere is none.
func TestOddUserFiles(t *testing.T) {
	for name, c := range map[string]struct {
		make func(path string) error
		want string // of the refusal; empty: taken as missing
	}{
		"dangling link": {func(p string) error { return os.Symlink("/no/such", p) }, ""},
		"loop":          {func(p string) error { return os.Symlink("passwd", p) }, "too many levels of symbolic links"},
		"directory":     {func(p string) error { return os.Mkdir(p, 0o755) }, "is no regular file"},
		"FIFO":          {func(p string) error { return syscall.Mkfifo(p, 0o644) }, "is no regular file"},
		"huge":          {func(p string) error { return os.WriteFile(p, make([]byte, userFileMax+1), 0o644) }, "is longer than"},
	} {
		root := t.TempDir()
		if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := c.make(filepath.Join(root, "etc/passwd")); err != nil {
			t.Fatal(err)
		}
		got, err := resolveUser(userRequest(root, "1000", nil))
		if c.want == "" && (err != nil || got.UID != 1000) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %+v, %v; want %q", name, got, err, c.want)
		}
		if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, syscall.ELOOP) {
			t.Errorf("%s: %v has no code", name, err)
		}
	}
}

func TestMissingUserFiles(t *testing.T) {
	roots := map[string]string{"empty": t.TempDir(), "etc is a file": t.TempDir()}
	write(t, filepath.Join(roots["etc is a file"], "etc"), "x")
	for name, root := range roots {
		got, err := resolveUser(userRequest(root, "1000:50", nil))
		if err != nil || got.UID != 1000 || got.GID != 50 || !slices.Equal(got.AdditionalGIDs, []uint32{50}) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if _, err := resolveUser(userRequest(root, "app", nil)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: a name without passwd: %v", name, err)
		}
	}
	if _, err := resolveUser(userRequest("/no/such/rootfs", "app", nil)); err == nil {
		t.Error("a rootfs that is not there gave a user")
	}
}

// TestHostileUserFiles: no link of the image leads to the host's files, and
// nothing that is not a plain small file is read.
func TestHostileUserFiles(t *testing.T) {
	outside := t.TempDir()
	write(t, filepath.Join(outside, "passwd"), "evil:x:0:0::/:\n")
	for name, c := range map[string]struct {
		make   func(t *testing.T, root string)
		begins string // of the error; empty: the host's user is just not found
	}{
		"absolute link": {func(t *testing.T, root string) {
			link(t, filepath.Join(outside, "passwd"), filepath.Join(root, "etc/passwd"))
		}, `image User "evil": no such user`},
		"relative link": {func(t *testing.T, root string) {
			link(t, strings.Repeat("../", 20)+filepath.Join(outside, "passwd"), filepath.Join(root, "etc/passwd"))
		}, `image User "evil": no such user`},
		"link of etc": {func(t *testing.T, root string) {
			link(t, outside, filepath.Join(root, "etc"))
		}, `image User "evil": no such user`},
		"circle": {func(t *testing.T, root string) {
			link(t, "passwd", filepath.Join(root, "etc/passwd"))
		}, "open /etc/passwd in the container's rootfs"},
		"fifo": {func(t *testing.T, root string) {
			if err := syscall.Mkfifo(filepath.Join(root, "etc/passwd"), 0o644); err != nil {
				t.Fatal(err)
			}
		}, `image file "/etc/passwd": is no regular file`},
		"directory": {func(t *testing.T, root string) {
			if err := os.Mkdir(filepath.Join(root, "etc/passwd"), 0o755); err != nil {
				t.Fatal(err)
			}
		}, `image file "/etc/passwd": is no regular file`},
		"huge": {func(t *testing.T, root string) {
			write(t, filepath.Join(root, "etc/passwd"), "")
			if err := os.Truncate(filepath.Join(root, "etc/passwd"), 1<<40); err != nil {
				t.Fatal(err)
			}
		}, `image file "/etc/passwd": is longer than`},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if name != "link of etc" {
				if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			c.make(t, root)
			done := make(chan error, 1)
			go func() {
				_, err := resolveUser(userRequest(root, "evil", nil))
				done <- err
			}()
			select {
			case err := <-done:
				if err == nil || !strings.HasPrefix(err.Error(), c.begins) {
					t.Errorf("%v; want an error that begins with %s", err, c.begins)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("it blocks")
			}
		})
	}
}

// TestLinksInsideRootfs: an absolute link means the rootfs's root.
func TestLinksInsideRootfs(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "usr/share/passwd"), "inside:x:42:42::/:\n")
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	link(t, "/usr/share/passwd", filepath.Join(root, "etc/passwd"))
	got, err := resolveUser(userRequest(root, "inside", nil))
	if err != nil || got.UID != 42 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestTooManyGroups(t *testing.T) {
	root := t.TempDir()
	var many strings.Builder
	for i := range groupsMax + 10 {
		fmt.Fprintf(&many, "g:x:%d:u\n", i+10)
	}
	write(t, filepath.Join(root, "etc/passwd"), "u:x:5:5::/:\n")
	write(t, filepath.Join(root, "etc/group"), many.String())
	if _, err := resolveUser(userRequest(root, "u", nil)); !errors.Is(err, ErrInvalid) {
		t.Errorf("more groups than the kernel takes: %v", err)
	}
}

func link(t *testing.T, to, at string) {
	t.Helper()
	if err := os.Symlink(to, at); err != nil {
		t.Fatal(err)
	}
}

// TestErrorsAreTheSpecs: one table maps both packages' errors.
func TestErrorsAreTheSpecs(t *testing.T) {
	if !errors.Is(spec.Invalid("f", "v", "r"), ErrInvalid) || !errors.Is(spec.Unsupported("f", "v", "r"), ErrUnsupported) {
		t.Error("the sentinels differ")
	}
}
