package stats

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrUnmeasured: a directory could not be read to its end yet.
var ErrUnmeasured = errors.New("its size is not known")

// Directory is a directory whose size is asked for again and again. It may be
// used by many goroutines.
type Directory struct {
	path  string
	sizes *behind[Layer]
}

// NewDirectory makes a Directory. measure is called in the background, as that
// of NewCollector.
func NewDirectory(path string, measure func(dir string) (bytes, inodes uint64, err error)) *Directory {
	return &Directory{path: path, sizes: newSizes(measure)}
}

// Path is the directory's.
func (d *Directory) Path() string { return d.path }

// Size is what the directory takes, as of the time it tells: some seconds ago
// at most, unless measuring takes long. The first call waits for a measurement.
// ErrUnmeasured when that failed.
func (d *Directory) Size(ctx context.Context) (*Layer, error) {
	if wait := d.sizes.refresh(d.path, d.path, time.Now()); wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, fmt.Errorf("measure %s: %w", d.path, ctx.Err())
		}
	}
	if size := d.sizes.last(d.path); size != nil {
		return size, nil
	}
	return nil, fmt.Errorf("measure %s: %w", d.path, ErrUnmeasured)
}

// newSizes measures sizes of directories behind.
func newSizes(measure func(dir string) (bytes, inodes uint64, err error)) *behind[Layer] {
	return newBehind(func(dir string) (Layer, error) {
		bytes, inodes, err := measure(dir)
		return Layer{At: time.Now(), Bytes: bytes, Inodes: inodes}, err
	})
}
