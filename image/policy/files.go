package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.podman.io/image/v5/signature"

	"berth/sandbox/regular"
)

// ErrRefused means that the policy does not admit an image, or that there is no
// usable policy to ask.
var ErrRefused = errors.New("not admitted by the signature policy")

// Files are where policies are. The zero value admits every image.
type Files struct {
	Default string // for all that no other is for; none admits every image
	Dir     string // of NAMESPACE.json; none: every namespace has the default
}

// Set says whether there is anything to ask.
func (f Files) Set() bool { return f.Default != "" || f.Dir != "" }

// Path is the policy file of a namespace, "" where every image is admitted. No
// namespace means the default. ErrRefused when the directory cannot be read:
// the file of this namespace may be in it.
func (f Files) Path(namespace string) (string, error) {
	if f.Dir == "" || namespace == "" {
		return f.Default, nil
	}
	if filepath.Base(namespace) != namespace || !filepath.IsLocal(namespace) || namespace == "." {
		return "", fmt.Errorf("%w: namespace %q is not a name", ErrRefused, namespace)
	}
	if info, err := os.Stat(f.Dir); err != nil || !info.IsDir() {
		return "", fmt.Errorf("%w: policy directory %s: %w", ErrRefused, f.Dir, cmp.Or(err, error(syscall.ENOTDIR)))
	}
	path := filepath.Join(f.Dir, namespace+".json")
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return f.Default, nil
	}
	return path, nil // also when it cannot be read: reading it says why
}

// Namespaces are those that have a policy of their own, in the order of their names;
// none when the directory cannot be read.
func (f Files) Namespaces() (names []string) {
	if f.Dir == "" {
		return nil
	}
	list, _ := os.ReadDir(f.Dir)
	for _, item := range list {
		if name, ok := strings.CutSuffix(item.Name(), ".json"); ok {
			names = append(names, name)
		}
	}
	return names
}

// Policy is a policy file as it was read. Nil admits every image.
type Policy struct {
	file  string
	files []string          // keys and certificates it names
	sum   [sha256.Size]byte // of the file and of those
	rules *signature.Policy
}

// Read reads and checks a policy file. "" gives nil. ErrRefused, with the
// file's name, when it is not there or not right.
func Read(file string) (*Policy, error) {
	if file == "" {
		return nil, nil
	}
	data, err := regular.Read(file, regular.Most)
	if err != nil {
		return nil, fmt.Errorf("%w: read policy: %w", ErrRefused, err)
	}
	rules, err := signature.NewPolicyFromBytes(data)
	if err != nil {
		return nil, fmt.Errorf("%w: policy %s: %w", ErrRefused, file, err)
	}
	p := &Policy{file: file, rules: rules, files: namedIn(data)}
	p.sum = sumOf(data, p.files)
	return p, nil
}

// Named are the key and certificate files that the policies name, by policy file,
// for those who ask whether they answer before Read reads them. What cannot be read
// names none: Read says why.
func (f Files) Named() map[string][]string {
	named := map[string][]string{}
	files := []string{f.Default}
	for _, name := range f.Namespaces() {
		files = append(files, filepath.Join(f.Dir, name+".json"))
	}
	for _, file := range files {
		if data, err := regular.Read(file, regular.Most); file != "" && err == nil {
			named[file] = namedIn(data)
		}
	}
	return named
}

func namedIn(data []byte) []string {
	var fields any
	_ = json.Unmarshal(data, &fields) // the library has said what is wrong, or will
	return pathsIn(fields, nil)
}

// sumOf covers a policy and the files it names: a verdict lasts only as long as
// all of them.
func sumOf(data []byte, files []string) (sum [sha256.Size]byte) {
	h := sha256.New()
	h.Write(data)
	for _, path := range files {
		content, err := regular.Read(path, regular.Most)
		fmt.Fprintf(h, "\x00%s\x00%d\x00%v\x00", path, len(content), err)
		h.Write(content)
	}
	h.Sum(sum[:0])
	return sum
}

// pathsIn collects the files that a policy names: they are the values of fields
// whose names end in Path or Paths.
func pathsIn(v any, paths []string) []string {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			paths = pathsIn(item, paths)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if strings.HasSuffix(key, "Path") || strings.HasSuffix(key, "Paths") {
				paths = append(paths, stringsIn(v[key])...)
			} else {
				paths = pathsIn(v[key], paths)
			}
		}
	}
	return paths
}

func stringsIn(v any) (list []string) {
	switch v := v.(type) {
	case string:
		list = append(list, v)
	case []any:
		for _, item := range v {
			list = append(list, stringsIn(item)...)
		}
	}
	return list
}

// Check reads a policy file as a check of the configuration does: also the key
// and certificate files that it names have to be there.
func Check(file string) error {
	p, err := Read(file)
	if p == nil {
		return err
	}
	for _, path := range p.files {
		if _, err := regular.Read(path, regular.Most); err != nil {
			return fmt.Errorf("%w: policy %s: %w", ErrRefused, file, err)
		}
	}
	return nil
}

// CheckDir reads every policy of a directory as Check does.
func CheckDir(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var all []error
	for _, item := range list {
		if name := item.Name(); filepath.Ext(name) == ".json" {
			all = append(all, Check(filepath.Join(dir, name)))
		}
	}
	return errors.Join(all...)
}
