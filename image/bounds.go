package image

import (
	"fmt"
	"syscall"
)

// checkRoom refuses an image whose missing layers are larger, compressed, than
// what the disk has free: it would fill the disk and fail. The error is ENOSPC, or
// ErrInvalidImage for a layer that is larger than the filesystem.
func (r *run) checkRoom() error {
	disk, err := freeOf(r.store.root)
	if err != nil {
		return err
	}
	var wanted, count int64
	for blob, diffID := range r.diffOf {
		if r.store.layers.stored(diffID) {
			continue
		}
		if size := r.sizeOf[blob]; uint64(size) > disk.allBytes {
			return fmt.Errorf("%w: layer %s of %d bytes, the whole filesystem of images has %d", ErrInvalidImage, blob, size, disk.allBytes)
		}
		if wanted += r.sizeOf[blob]; wanted < 0 {
			return fmt.Errorf("%w: the sizes of the layers are out of range", ErrInvalidImage)
		}
		count++
	}
	if uint64(wanted) > disk.bytes {
		return fmt.Errorf("%d layers to fetch have %d bytes, %d are free: %w", count, wanted, disk.bytes, syscall.ENOSPC)
	}
	return nil
}
