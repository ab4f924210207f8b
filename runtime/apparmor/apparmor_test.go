package apparmor

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// kernel stands for the kernel's list and for apparmor_parser.
type kernel struct {
	loaded  bool
	broken  error // what the parser says
	blind   error // what reading the list says
	parsers int   // times the parser was run
}

func (k *kernel) profile() *Default {
	return &Default{
		install: func(name string) error {
			k.parsers++
			if k.broken == nil && name == Name {
				k.loaded = true
			}
			return k.broken
		},
		loaded: func(name string) (bool, error) { return k.loaded && name == Name, k.blind },
	}
}

var errParser = errors.New("no apparmor_parser")

func TestLoadAndEnsure(t *testing.T) {
	k := &kernel{}
	d := k.profile()
	if err := d.Load(); err != nil || d.Problem() != nil || k.parsers != 1 {
		t.Fatalf("load: %v, problem %v, %d runs", err, d.Problem(), k.parsers)
	}
	for range 3 {
		if err := d.Ensure(); err != nil {
			t.Fatal(err)
		}
	}
	if k.parsers != 1 {
		t.Errorf("the parser ran %d times for a profile that is there", k.parsers)
	}
	k.loaded = false // aa-remove-unknown
	if err := d.Ensure(); err != nil || !k.loaded || k.parsers != 2 {
		t.Errorf("after it was unloaded: %v, loaded %v, %d runs", err, k.loaded, k.parsers)
	}
	if err := d.Load(); err != nil || k.parsers != 3 {
		t.Errorf("a new daemon loads its own text: %v, %d runs", err, k.parsers)
	}
}

func TestFailures(t *testing.T) {
	k := &kernel{broken: errParser}
	d := k.profile()
	for name, call := range map[string]func() error{"Load": d.Load, "Ensure": d.Ensure} {
		err := call()
		if !errors.Is(err, errParser) || !strings.HasPrefix(err.Error(), "load AppArmor profile berth-default: ") {
			t.Errorf("%s: %v", name, err)
		}
		if !errors.Is(d.Problem(), errParser) {
			t.Errorf("%s: problem %v", name, d.Problem())
		}
	}
	k.broken = nil
	if err := d.Ensure(); err != nil || d.Problem() != nil {
		t.Errorf("once the parser is there: %v, problem %v", err, d.Problem())
	}
	// An older text stays in force: an error of the new one, but no problem.
	k.broken = errParser
	if err := d.Load(); !errors.Is(err, errParser) || d.Problem() != nil {
		t.Errorf("with an older text: %v, problem %v", err, d.Problem())
	}
	k.blind = os.ErrPermission
	if err := d.Ensure(); !errors.Is(err, errParser) || d.Problem() == nil {
		t.Errorf("with an unreadable list: %v, problem %v", err, d.Problem())
	}
}
