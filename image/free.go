package image

import (
	"fmt"
	"syscall"

	"github.com/docker/go-units"
)

// free is what a filesystem has left for others than root.
type free struct {
	bytes, allBytes   uint64
	inodes, allInodes uint64 // 0 of 0 where they are not counted
}

func freeOf(dir string) (free, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return free{}, fmt.Errorf("ask for free space of %s: %w", dir, err)
	}
	unit := uint64(st.Bsize)
	return free{st.Bavail * unit, st.Blocks * unit, st.Ffree, st.Files}, nil
}

// isShort: less than a tenth is left.
func (f free) isShort() bool {
	return f.bytes < f.allBytes/10 || f.inodes < f.allInodes/10
}

func (f free) String() string {
	text := units.BytesSize(float64(f.bytes))
	if f.allInodes > 0 {
		text += fmt.Sprintf(" and %d inodes", f.inodes)
	}
	return text
}
