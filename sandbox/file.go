package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"berth/sandbox/regular"
)

// recordVersion is raised when an older berth could misread a record.
const recordVersion = 1

// errTorn: a record file is empty, cut or altered, or of another version.
var errTorn = errors.New("unreadable record")

// disk is what the store needs of a filesystem; tests let it fail.
type disk interface {
	WriteFile(name string, data []byte, sync bool) error
	Rename(from, to string) error
	Mkdir(name string) error
	SyncDir(name string) error
}

// envelope is the outer form of a record file.
type envelope struct {
	Version int             `json:"version"`
	SHA256  string          `json:"sha256"`
	Record  json.RawMessage `json:"record"`
}

func seal(record any) ([]byte, error) {
	raw, err := json.Marshal(record)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	return json.Marshal(envelope{Version: recordVersion, SHA256: hex.EncodeToString(sum[:]), Record: raw})
}

func unseal(b []byte, record any) error {
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return fmt.Errorf("%w: %w", errTorn, err)
	}
	if e.Version != recordVersion {
		return fmt.Errorf("%w: version %d, this berth reads version %d", errTorn, e.Version, recordVersion)
	}
	if sum := sha256.Sum256(e.Record); hex.EncodeToString(sum[:]) != e.SHA256 {
		return fmt.Errorf("%w: checksum does not fit", errTorn)
	}
	if err := json.Unmarshal(e.Record, record); err != nil {
		return fmt.Errorf("%w: %w", errTorn, err)
	}
	return nil
}

// replace writes a file through a temporary name, so that a reader or a crash
// of the process sees the old or the new content whole. With sync it also
// survives a power cut: file and directory are flushed.
func replace(d disk, path string, data []byte, sync bool) error {
	tmp := path + ".tmp"
	if err := d.WriteFile(tmp, data, sync); err != nil {
		return err
	}
	if err := d.Rename(tmp, path); err != nil {
		return err
	}
	if sync {
		return d.SyncDir(filepath.Dir(path))
	}
	return nil
}

// osDisk is the real filesystem.
type osDisk struct{}

func (osDisk) WriteFile(name string, data []byte, sync bool) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && sync {
		err = syscall.Fdatasync(int(f.Fd()))
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

func (osDisk) Rename(from, to string) error { return os.Rename(from, to) }

func (osDisk) Mkdir(name string) error {
	if err := os.Mkdir(name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (osDisk) SyncDir(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// maxRecord bounds what is read of one record file. It is above what a record
// can be: a request has at most 32 MiB, of which JSON makes six times as much at
// worst.
const maxRecord = 256 << 20

func readRecord(path string, record any) error {
	b, err := regular.Read(path, maxRecord)
	if err != nil {
		return err
	}
	return unseal(b, record)
}
