package config

import (
	"errors"
	"fmt"
	"strings"
)

// ErrInvalid is what every refusal of a file or value is.
var ErrInvalid = errors.New("invalid configuration")

// Place is where a file sets a key.
type Place struct {
	File string
	Line int // from 1
}

// String is the form that editors jump to, FILE:LINE.
func (p Place) String() string { return fmt.Sprintf("%s:%d", p.File, p.Line) }

// Problem is one thing that is wrong.
type Problem struct {
	Key   string // empty: of the whole file
	Place Place  // zero: no file sets the key
	Text  string // names the key
}

// String is one line: where, and what.
func (p Problem) String() string {
	switch {
	case p.Place.File == "":
		return p.Text
	case p.Place.Line == 0:
		return p.Place.File + ": " + p.Text
	}
	return fmt.Sprintf("%s: line %d: %s", p.Place.File, p.Place.Line, p.Text)
}

// Problems is everything that was found wrong, and as an error ErrInvalid.
type Problems []Problem

// Refuse adds a problem of a key's value.
func (p *Problems) Refuse(key, format string, args ...any) {
	*p = append(*p, Problem{Key: key, Text: fmt.Sprintf("key %q: ", key) + fmt.Sprintf(format, args...)})
}

// Error is one line with all of them.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i := range p {
		lines[i] = p[i].String()
	}
	return ErrInvalid.Error() + ": " + strings.Join(lines, "; ")
}

// Unwrap is for errors.Is.
func (p Problems) Unwrap() error { return ErrInvalid }

// err avoids an error that is not nil and has no problem.
func (p Problems) err() error {
	if len(p) == 0 {
		return nil
	}
	return p
}
