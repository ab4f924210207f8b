package regular

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// Program looks where PATH says, in its order, and at nothing that it has not asked about.
func TestProgram(t *testing.T) {
	dir := t.TempDir()
	one, two, three := filepath.Join(dir, "one"), filepath.Join(dir, "two"), filepath.Join(dir, "three")
	for path, mode := range map[string]os.FileMode{one: 0o600, two: 0o700, three: 0o700} {
		if err := errors.Join(os.Mkdir(path, 0o755), os.WriteFile(filepath.Join(path, "p"), nil, mode)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", "relative:"+one+":"+two+":"+three)
	var asked []string
	yes := func(path string) error { asked = append(asked, path); return nil }
	if path, err := Program("p", yes); path != two+"/p" || err != nil || !slices.Equal(asked, []string{one + "/p", two + "/p"}) {
		t.Errorf("found %q (%v), asked about %v", path, err, asked)
	}
	for _, name := range []string{"q", "../two/p", ""} {
		if path, err := Program(name, yes); !errors.Is(err, exec.ErrNotFound) {
			t.Errorf("%q: found %q, %v", name, path, err)
		}
	}
	hangs := errors.New("does not answer")
	if path, err := Program("p", func(string) error { return hangs }); path != "" || err != hangs {
		t.Errorf("where nothing answers: %q, %v", path, err)
	}
}
