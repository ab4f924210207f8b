package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cespare/xxhash/v2"

	"berth/image/layer"
	"berth/sandbox/regular"
)

// listFile lies beside a layer's diff directory and says what is in it.
const listFile = "files"

// listRef is what layer.json says of the list.
type listRef struct {
	Bytes int64  `json:"bytes"`
	Sum   string `json:"sum"` // xxHash64; empty for layers of before there were lists
}

// list writes the list of a staged layer and counts the layer, both into meta.
// known are the checksums that unpacking gave; without them files are read.
func (d *disk) list(dir string, meta *layerMeta, known layer.Sums) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("list files of layer %s: %w", meta.DiffID, err)
		}
	}()
	path := filepath.Join(dir, listFile)
	if err := d.may("write", path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
	}()
	sum := xxhash.New()
	meta.Usage, err = layer.WriteList(filepath.Join(dir, "diff"), io.MultiWriter(f, sum), known)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	meta.List = listRef{Bytes: info.Size(), Sum: sumText(sum)}
	return nil
}

func sumText(sum *xxhash.Digest) string { return fmt.Sprintf("%016x", sum.Sum64()) }

// verify compares a stored layer with its list and reads every file. What is
// wrong with the record or the list itself is a difference without a path.
func (e *entry) verify(ctx context.Context, found func(layer.Difference)) error {
	odd := func(format string, args ...any) { found(layer.Difference{Problem: fmt.Sprintf(format, args...)}) }
	meta, err := readRecord(e.dir)
	if err != nil {
		odd("the layer's record cannot be read: %v", err)
		return nil
	}
	if key := (layerKey{meta.DiffID, meta.Variant}); key != e.key {
		odd("the layer's record speaks of another layer: %s", key.id())
		return nil
	}
	if meta.List.Sum == "" {
		odd("the layer was stored without a list of its files, by an earlier version; it cannot be checked")
		return nil
	}
	f, err := regular.Open(filepath.Join(e.dir, listFile))
	if err != nil {
		odd("the layer's list of files cannot be read: %v", err)
		return nil
	}
	defer f.Close()
	sum := xxhash.New()
	if n, err := io.Copy(sum, f); err != nil || n != meta.List.Bytes || sumText(sum) != meta.List.Sum {
		odd("the layer's list of files is damaged")
		return nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	err = layer.Verify(ctx, e.diff(), f, found)
	if errors.Is(err, layer.ErrList) {
		odd("%v", err)
		return nil
	}
	return err
}
