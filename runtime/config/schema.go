package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

var durationType = reflect.TypeFor[Duration]()

// leaf is a key that has a value, not a table.
type leaf struct {
	key   string
	value reflect.Value
	live  bool
}

// text is the value as TOML.
func (l leaf) text() string {
	b, err := toml.Marshal(map[string]any{"v": l.value.Interface()})
	if err != nil {
		return fmt.Sprint(l.value.Interface())
	}
	return strings.TrimSpace(strings.TrimPrefix(string(b), "v = "))
}

// leaves lists the values below a table in the schema's order. Those of a
// struct that v points to can be set.
func leaves(path []string, v reflect.Value) (out []leaf) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			below := leaves(append(slices.Clip(path), f.Tag.Get("toml")), v.Field(i))
			if _, live := f.Tag.Lookup("live"); live {
				below[0].live = true // a leaf's own tag
			}
			out = append(out, below...)
		}
	case reflect.Map:
		for _, name := range slices.Sorted(maps.Keys(v.Interface().(map[string]Handler))) {
			out = append(out, leaves(append(slices.Clip(path), name), v.MapIndex(reflect.ValueOf(name)))...)
		}
	default:
		out = []leaf{{key: dotted(path), value: v}}
	}
	return out
}

// dotted writes a key with its tables as TOML does.
func dotted(path []string) string {
	parts := slices.Clone(path)
	for i, p := range parts {
		if p == "" || strings.ContainsFunc(p, func(r rune) bool {
			return r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
		}) {
			parts[i] = fmt.Sprintf("%q", p)
		}
	}
	return strings.Join(parts, ".")
}

// HandlerKey is a key of the table [runtime.handlers.NAME].
func HandlerKey(name string, key ...string) string {
	return dotted(append([]string{"runtime", "handlers", name}, key...))
}

// document is a file held against the schema, before its values are looked at.
type document struct {
	file     string
	parser   unstable.Parser
	places   map[string]Place // of keys and of tables' headings
	problems Problems
}

// read notes where the keys of a syntactically right file are, and what of them
// is unknown or of a wrong type.
func (d *document) read(text []byte) {
	d.parser.Reset(text)
	var table []string
	for d.parser.NextExpression() {
		e := d.parser.Expression()
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			path, line := d.key(nil, e)
			table = path
			switch ty, ok := typeOf(path); {
			case !ok:
				d.unknown(path, line)
			case e.Kind == unstable.ArrayTable:
				d.mistyped(path, line, "a list of tables", ty)
			case ty.Kind() != reflect.Struct && ty.Kind() != reflect.Map:
				d.mistyped(path, line, "a table", ty)
			default:
				d.places[dotted(path)] = Place{d.file, line}
			}
		case unstable.KeyValue:
			d.value(table, e)
		}
	}
}

// key is the whole path of an expression and its line.
func (d *document) key(table []string, e *unstable.Node) (path []string, line int) {
	path = slices.Clone(table)
	for it := e.Key(); it.Next(); {
		if line == 0 {
			line = d.parser.Shape(it.Node().Raw).Start.Line
		}
		path = append(path, string(it.Node().Data))
	}
	return path, line
}

// value checks one key and its value; an inline table's keys likewise.
func (d *document) value(table []string, e *unstable.Node) {
	path, line := d.key(table, e)
	ty, ok := typeOf(path)
	if !ok {
		if _, ok := typeOf(table); ok || len(table) == 0 {
			d.unknown(path, line)
		}
		return // the table itself was told
	}
	v := e.Value()
	if ty.Kind() == reflect.Struct || ty.Kind() == reflect.Map {
		if v.Kind != unstable.InlineTable {
			d.mistyped(path, line, kindName(v), ty)
			return
		}
		d.places[dotted(path)] = Place{d.file, line}
		for it := v.Children(); it.Next(); {
			d.value(path, it.Node())
		}
		return
	}
	d.places[dotted(path)] = Place{d.file, line}
	switch {
	case !fits(v, ty):
		d.mistyped(path, line, kindName(v), ty)
	case ty == durationType:
		if _, err := time.ParseDuration(string(v.Data)); err != nil {
			d.mistyped(path, line, fmt.Sprintf("%q", v.Data), ty)
		}
	case ty.Kind() == reflect.Uint64 && strings.HasPrefix(string(v.Data), "-"):
		d.refuse(path, line, fmt.Sprintf("key %q: %s is negative", dotted(path), v.Data))
	}
}

func (d *document) unknown(path []string, line int) {
	d.refuse(path, line, fmt.Sprintf("unknown key %q", dotted(path)))
}

func (d *document) mistyped(path []string, line int, is string, want reflect.Type) {
	d.refuse(path, line, fmt.Sprintf("key %q: %s where %s belongs", dotted(path), is, typeName(want)))
}

func (d *document) refuse(path []string, line int, text string) {
	d.problems = append(d.problems, Problem{Key: dotted(path), Place: Place{d.file, line}, Text: text})
}

// typeOf finds a key in the schema.
func typeOf(path []string) (reflect.Type, bool) {
	ty := reflect.TypeFor[Config]()
	for _, name := range path {
		switch ty.Kind() {
		case reflect.Map:
			ty = ty.Elem()
			continue
		case reflect.Struct:
		default:
			return nil, false
		}
		i := slices.IndexFunc(reflect.VisibleFields(ty), func(f reflect.StructField) bool { return f.Tag.Get("toml") == name })
		if i < 0 {
			return nil, false
		}
		ty = ty.Field(i).Type
	}
	return ty, true
}

// fits says whether a value can be of a key's type.
func fits(v *unstable.Node, ty reflect.Type) bool {
	switch {
	case ty == durationType || ty.Kind() == reflect.String:
		return v.Kind == unstable.String
	case ty.Kind() == reflect.Bool:
		return v.Kind == unstable.Bool
	case ty.Kind() == reflect.Slice:
		for it := v.Children(); v.Kind == unstable.Array && it.Next(); {
			if it.Node().Kind != unstable.String {
				return false
			}
		}
		return v.Kind == unstable.Array
	}
	return v.Kind == unstable.Integer
}

func typeName(ty reflect.Type) string {
	switch {
	case ty == durationType:
		return `a duration such as "30s" or "5m"`
	case ty.Kind() == reflect.String:
		return "a string"
	case ty.Kind() == reflect.Bool:
		return "true or false"
	case ty.Kind() == reflect.Slice:
		return "a list of strings"
	case ty.Kind() == reflect.Struct, ty.Kind() == reflect.Map:
		return "a table"
	}
	return "a whole number"
}

func kindName(v *unstable.Node) string {
	switch v.Kind {
	case unstable.String:
		return fmt.Sprintf("the string %q", v.Data)
	case unstable.Integer, unstable.Float:
		return "the number " + string(v.Data)
	case unstable.Bool:
		return string(v.Data)
	case unstable.Array:
		return "a list of something else"
	case unstable.InlineTable:
		return "a table"
	}
	return "a date or time"
}
