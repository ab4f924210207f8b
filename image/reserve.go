package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// reserveFile holds the blocks and the inode that a removal needs for its
// records, so that it works on a disk where nothing is free: overwriting takes
// no block, and a rename onto refs.json none either.
const reserveFile = "refs.reserve"

// reserveUnit is what the reserve is larger than the records, at least: a
// removed image that is held takes a few bytes more than before.
const reserveUnit = 16 << 10

// full says whether a filesystem or a quota has no room.
func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// keepReserve makes the reserve large enough for the records on the disk. A disk
// without room has none until the next change of the records.
func (d *disk) keepReserve(root string) {
	records, err := os.Stat(filepath.Join(root, refsFile))
	if err != nil {
		return
	}
	path := filepath.Join(root, reserveFile)
	size := (records.Size()/reserveUnit + 2) * reserveUnit
	if info, err := os.Stat(path); err != nil || info.Size() < size {
		_ = d.write(path, make([]byte, size))
	}
}

// saveShorter replaces refs.json as saveImages does, for records that take less
// room than those on the disk or hardly more; on a full disk out of the reserve.
func (d *disk) saveShorter(root string, m images) error {
	err := d.saveImages(root, m)
	if !full(err) {
		return err
	}
	if rerr := d.useReserve(root, m); rerr != nil {
		return fmt.Errorf("%w; nor in the reserve: %w", err, rerr)
	}
	return nil
}

func (d *disk) useReserve(root string, m images) error {
	data, err := encodeImages(m)
	if err != nil {
		return err
	}
	path := filepath.Join(root, reserveFile)
	if err := d.may("write", path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Truncate(int64(len(data)))
	}
	if err == nil {
		err = f.Sync() // see outlive
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = d.rename(path, filepath.Join(root, refsFile))
	}
	if err == nil {
		d.outlive(root)
		d.keepReserve(root) // out of what the old refs.json took
	}
	return err
}

// outlive makes refs.json, whose content is on the disk, the durable version at
// once. Else the old one would stay, as that, until the next round of the
// durability, and the next removal may come before: it would find no room and no
// reserve. An error leaves it to that round.
func (d *disk) outlive(root string) {
	next := filepath.Join(root, syncedFile)
	_ = d.removeAll(next) // of a round that runs: it holds the old one too
	if d.link(filepath.Join(root, refsFile), next) != nil {
		return
	}
	_ = d.rename(next, filepath.Join(root, durableFile))
	if dir, err := os.Open(root); err == nil {
		_ = dir.Sync() // some filesystems give blocks free only then
		_ = dir.Close()
	}
}
