package image

import (
	"fmt"
	"syscall"

	"berth/image/layer"
)

// checkRoom refuses an image whose missing layers are larger, compressed, than
// what the disk has free: it would fill the disk and fail. The error is ENOSPC.
func (r *run) checkRoom() error {
	var wanted, count int64
	for blob, diffID := range r.diffOf {
		if r.store.layers.stored(diffID) {
			continue
		}
		if wanted += r.sizeOf[blob]; wanted < 0 {
			return fmt.Errorf("%w: the sizes of the layers are out of range", ErrInvalidImage)
		}
		count++
	}
	free, err := layer.Free(r.store.root)
	if err != nil {
		return err
	}
	if uint64(wanted) > free {
		return fmt.Errorf("%d layers to fetch have %d bytes, %d are free: %w", count, wanted, free, syscall.ENOSPC)
	}
	return nil
}
