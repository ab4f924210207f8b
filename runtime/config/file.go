package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"berth/sandbox/regular"
)

// File is a configuration and where its values are from.
type File struct {
	Config
	places map[string][]Place // of each key that a file sets, the one that counts last
}

// Load reads a file and its drop-ins (the files FILE.d/*.toml, by name), merges
// and checks them. A key that several set has the value of the last; a list is
// replaced whole. Keys that none sets keep their defaults, except that a
// [runtime.handlers] table replaces the default one whole. An empty path gives
// the defaults.
//
// More are checks of what the caller knows; they are made when nothing else is
// wrong, and the places of the keys they name are added. Errors: Problems, with
// everything that is wrong, or that of a file that cannot be read.
func Load(path string, more ...func(Config) Problems) (*File, error) {
	f := &File{Config: Default(), places: map[string][]Place{}}
	if path != "" {
		names, err := filesOf(path)
		if err != nil {
			return nil, err
		}
		handlers := f.Runtime.Handlers
		f.Runtime.Handlers = nil
		for _, name := range names {
			if err := f.merge(name); err != nil {
				return nil, err
			}
		}
		if f.Runtime.Handlers == nil {
			f.Runtime.Handlers = handlers
		}
	}
	for _, check := range append([]func(Config) Problems{Config.Check}, more...) {
		if problems := check(f.Config); len(problems) > 0 {
			return nil, f.locate(problems)
		}
	}
	return f, nil
}

// filesOf lists a file and its drop-ins in the order in which they count. What
// editors and package managers leave beside drop-ins has other endings.
func filesOf(path string) ([]string, error) {
	entries, err := os.ReadDir(path + ".d")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read configuration's drop-ins: %w", err)
	}
	names := []string{path}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".toml") && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, filepath.Join(path+".d", e.Name()))
		}
	}
	return names, nil
}

// merge puts one file's values over those of the files before.
func (f *File) merge(name string) error {
	text, err := regular.Read(name, regular.Most)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	var syntax map[string]any
	if err := toml.Unmarshal(text, &syntax); err != nil {
		return syntaxError(name, err)
	}
	d := document{file: name, places: map[string]Place{}}
	d.read(text)
	if len(d.problems) > 0 {
		return d.problems
	}
	dec := toml.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f.Config); err != nil {
		return syntaxError(name, err)
	}
	for key, place := range d.places {
		f.places[key] = append(f.places[key], place)
	}
	return nil
}

// syntaxError is what the TOML library says of a file.
func syntaxError(file string, err error) error {
	text, line := err.Error(), 0
	var dec *toml.DecodeError
	if errors.As(err, &dec) {
		var column int
		line, column = dec.Position()
		text = fmt.Sprintf("column %d: %s", column, strings.TrimPrefix(dec.Error(), "toml: "))
	}
	return Problems{{Place: Place{file, line}, Text: text}}
}

// locate adds to problems where the files set the keys.
func (f *File) locate(problems Problems) Problems {
	for i := range problems {
		p := &problems[i]
		at := f.places[p.Key]
		if len(at) == 0 {
			at = f.places[p.Key[:max(0, strings.LastIndexByte(p.Key, '.'))]]
		}
		if len(at) > 0 && p.Place.File == "" {
			p.Place = at[len(at)-1]
		}
	}
	return problems
}

// Show is the configuration in force, a key per line, in TOML; the comment
// behind each says which file sets it, over which others, or that none does.
func (f *File) Show() string {
	var b strings.Builder
	for _, l := range leaves(nil, reflect.ValueOf(f.Config)) {
		from := "default"
		for i, at := range f.places[l.key] {
			if i == 0 {
				from = at.String()
			} else {
				from = at.String() + ", over " + from
			}
		}
		fmt.Fprintf(&b, "%s = %s # %s\n", l.key, l.text(), from)
	}
	return b.String()
}
