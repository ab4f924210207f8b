package oci

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"

	"berth/sandbox/regular"
)

// Nobody waits for the writer of a FIFO that stands in the place of a bundle's
// specification.
func TestBundleThatIsAFIFO(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, configFile), 0o600); err != nil {
		t.Fatal(err)
	}
	_, raw := ReadRaw(dir)
	_, process := ReadProcess(dir)
	spec, err := ReadSpec(dir)
	for _, err := range []error{raw, process, err} {
		if !errors.Is(err, regular.ErrNot) {
			t.Errorf("got %v", err)
		}
	}
	if spec != nil {
		t.Error("a specification that could not be read is given")
	}
}
