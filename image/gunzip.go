package image

import (
	"bufio"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
)

// gunzip reads gzip members one after another, and the zeros that tapes and some
// builders fill up with behind the last one. Anything else there is an error.
type gunzip struct {
	z *gzip.Reader
	r *bufio.Reader
}

func newGunzip(r *bufio.Reader) (*gunzip, error) {
	z, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	z.Multistream(false)
	return &gunzip{z: z, r: r}, nil
}

func (g *gunzip) Read(p []byte) (int, error) {
	n, err := g.z.Read(p)
	if err == io.EOF {
		err = g.next()
	}
	return n, err
}

// next goes on with the next member; io.EOF when there is none.
func (g *gunzip) next() error {
	b, err := g.r.ReadByte()
	for padding := false; err == nil; b, err = g.r.ReadByte() {
		if b == 0 {
			padding = true
			continue
		}
		if padding {
			return fmt.Errorf("%w: gzip: bytes that belong to nothing behind the end", ErrInvalidImage)
		}
		if err := g.r.UnreadByte(); err != nil {
			return err
		}
		if err := g.z.Reset(g.r); err != nil {
			return err
		}
		g.z.Multistream(false)
		return nil
	}
	return err
}
