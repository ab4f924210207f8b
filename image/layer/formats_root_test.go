package layer_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/sandbox/leakcheck"
)

// TestFormatsOfGNUTar unpacks what GNU tar writes in each of its formats:
// sparse files, long names and link targets, hard links, devices, attributes.
func TestFormatsOfGNUTar(t *testing.T) {
	leakcheck.Start(t)
	from := t.TempDir()
	long := strings.Repeat("long/", 30) + strings.Repeat("n", 200)
	if err := os.MkdirAll(filepath.Join(from, filepath.Dir(long)), 0o755); err != nil {
		t.Fatal(err)
	}
	sparseFile(t, from+"/sparse")
	for name, body := range map[string]string{long: "long", "plain": "plain", "empty": "", "odd \n\xff": "odd"} {
		if err := os.WriteFile(filepath.Join(from, name), []byte(body), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.Symlink(long, from+"/symlink"),
		os.Link(from+"/plain", from+"/zlink"),
		os.Lchown(from+"/plain", 12345, 65534),
		unix.Mknod(from+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		unix.Mknod(from+"/block", unix.S_IFBLK|0o600, int(unix.Mkdev(259, 1000))),
		unix.Mkfifo(from+"/fifo", 0o600),
		unix.Setxattr(from+"/plain", "user.x", []byte("a\x00b"), 0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := describe(t, from, true)
	for _, args := range [][]string{
		{"--format=gnu", "--sparse"}, {"--format=gnu"},
		{"--format=posix", "--xattrs", "--sparse", "--sparse-version=0.0"}, {"--format=posix", "--xattrs", "--sparse", "--sparse-version=0.1"},
		{"--format=posix", "--xattrs", "--sparse", "--sparse-version=1.0"}, {"--format=posix", "--xattrs"},
	} {
		cmd := exec.Command("tar", append([]string{"--create", "--numeric-owner", "--directory", from}, append(args, ".")...)...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		data, err := cmd.Output()
		if err != nil {
			t.Fatalf("tar %v: %v %s", args, err, stderr.String())
		}
		root := t.TempDir()
		if _, err := layer.Unpack(t.Context(), root, bytes.NewReader(data), layer.Limits{}); err != nil {
			t.Errorf("%v: %v", args, err)
			continue
		}
		expect := want
		if args[0] == "--format=gnu" { // has neither attributes nor parts of a second
			expect = describe(t, gnuCopy(t, data), true)
		}
		same(t, describe(t, root, true), expect)
		if slices.Contains(args, "--sparse") {
			if st := lstat(t, root+"/sparse"); st.Blocks*512 > 1<<20 {
				t.Errorf("%v: the sparse file takes %d bytes of %d", args, st.Blocks*512, st.Size)
			}
		}
		if t.Failed() {
			t.Fatalf("with %v", args)
		}
	}
}

// sparseFile is 8 MiB long and has two short pieces of data.
func sparseFile(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int64{1 << 20, 6<<20 + 123} {
		if _, err := f.WriteAt(bytes.Repeat([]byte("data"), 1000), at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(8 << 20); err != nil {
		t.Fatal(err)
	}
}

// gnuCopy is what GNU tar makes of a tar.
func gnuCopy(t *testing.T, data []byte) string {
	t.Helper()
	root := t.TempDir()
	cmd := exec.Command("tar", "--extract", "--preserve-permissions", "--numeric-owner", "--same-owner", "--directory", root)
	cmd.Stdin = bytes.NewReader(data)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	return root
}
