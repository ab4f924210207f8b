package image

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"berth/sandbox/regular"
)

// errVersion: the records are of another build. Nothing is wrong with them.
var errVersion = errors.New("is not known")

// loaded is what a start has found of the image records.
type loaded struct {
	images images
	from   string   // the file they were read from, "" when there was none to read
	broken []string // what is wrong with those that cannot be read
}

// loadImages reads the records: refs.json, or when that cannot be read the last
// version that was surely written, which is a file of its own. Records of another
// version are an error: an older copy must not take their place. None at all: no
// images.
func loadImages(root string) (loaded, error) {
	l := loaded{images: images{}}
	for _, file := range []string{refsFile, durableFile, syncedFile} {
		data, err := regular.Read(filepath.Join(root, file), maxRecords)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return l, fmt.Errorf("read image records: %w", err)
		}
		m, err := decodeImages(data)
		if errors.Is(err, errVersion) {
			return l, fmt.Errorf("read image records: %s: %w", filepath.Join(root, file), err)
		}
		if err == nil {
			l.images, l.from = m, file
			return l, nil
		}
		l.broken = append(l.broken, fmt.Sprintf("%s: %v", filepath.Join(root, file), err))
	}
	return l, nil
}

// recoverImages is loadImages for a start. What cannot be read is no word on which
// layers are needed: as long as there are layers and no readable copy, it is an
// error that names the files. After a power cut before the first sync there are no
// layers. A broken refs.json is moved aside, and Recovered tells of it.
func (s *Store) recoverImages() (images, error) {
	l, err := loadImages(s.root)
	if err != nil || len(l.broken) == 0 {
		return l.images, err
	}
	why := strings.Join(l.broken, "; ")
	if layers := len(s.layers.byN); l.from == "" && layers > 0 {
		return nil, fmt.Errorf("read image records: %s: no copy can be read, and %d layers are there that they may name; put one of the files back, or move them all away to start without images, which deletes the layers", why, layers)
	}
	aside := filepath.Join(s.root, brokenFile)
	if err := s.disk.rename(filepath.Join(s.root, refsFile), aside); errors.Is(err, fs.ErrNotExist) {
		aside = "nowhere, as it was not there"
	} else if err != nil {
		return nil, fmt.Errorf("move image records aside: %w", err)
	}
	used := "none is left, and no layer either: there are no images"
	if l.from != "" {
		used = fmt.Sprintf("%d images are known from %s", len(l.images), filepath.Join(s.root, l.from))
	}
	s.recovered = fmt.Sprintf("image records cannot be read: %s; %s was moved to %s; %s", why, refsFile, aside, used)
	return l.images, nil
}

// Recovered says what was wrong with the image records when the store was opened,
// where the broken file is, and what was used instead; "" when nothing was.
func (s *Store) Recovered() string { return s.recovered }
