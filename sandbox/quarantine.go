package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Problem is something below the root that Open could not take for a record or
// could not delete. Nothing else is held up by it.
type Problem struct {
	Path  string
	Moved string // where it is moved to; empty: it stays where it is
	Err   error  // what is wrong with it
	Move  error  // why it could not be moved; told by a second call of Open's tell
}

var (
	// errNoRecord: a directory has an object's files and no record.
	errNoRecord = errors.New("its record is missing")
	// errForeign: berth makes no such name there.
	errForeign = errors.New("it is nothing of berth's")
)

// quarantine moves the directory of an unreadable record away, so that it is kept
// and looked at by nobody. It tells before it does: what comes after may fail.
// Where it cannot be moved, on a full disk or from another filesystem, it stays, is
// passed over, and tried again at the next start.
func quarantine(root, dir string, why error, tell func(Problem)) {
	p := Problem{Path: dir, Err: why, Moved: free(filepath.Join(root, "quarantine", filepath.Base(filepath.Dir(dir))+"-"+filepath.Base(dir)))}
	tell(p)
	err := os.MkdirAll(filepath.Dir(p.Moved), 0o700)
	if err == nil {
		err = os.Rename(dir, p.Moved)
	}
	if err != nil {
		p.Moved, p.Move = "", fmt.Errorf("move to quarantine: %w", err)
		tell(p)
	}
}

// free is a path that nothing has: what was quarantined before stays.
func free(path string) string {
	for n, try := 1, path; ; n++ {
		if _, err := os.Lstat(try); err != nil {
			return try
		}
		try = fmt.Sprintf("%s.%d", path, n)
	}
}

// Quarantined lists, below a root, what Open has ever moved to quarantine and is
// still there, sorted; the root of a new node has none.
func Quarantined(root string) ([]string, error) {
	dir := filepath.Join(root, "quarantine")
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list quarantine: %w", err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, filepath.Join(dir, e.Name()))
	}
	return list, nil
}

// QuarantinedID is the id of the object whose record was moved to that path.
func QuarantinedID(path string) string {
	_, id, _ := strings.Cut(filepath.Base(path), "-")
	id, _, _ = strings.Cut(id, ".")
	return id
}

// without says what is to be made of an entry of a directory of records that has
// no record: deleted when no effect can have followed, else what is wrong.
func without(dir string) (remove bool, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, syscall.ENOTDIR) {
		return false, errForeign
	}
	if err != nil {
		return false, err
	}
	written := func(e fs.DirEntry) bool { return !strings.HasSuffix(e.Name(), ".tmp") }
	if !slices.ContainsFunc(entries, written) {
		return true, nil // the crash came before the record
	}
	if !IsID(filepath.Base(dir)) {
		return false, errForeign
	}
	return false, errNoRecord
}

// IsID tells names that berth gives to objects.
func IsID(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}
