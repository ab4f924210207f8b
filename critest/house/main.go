// Command house checks the project's own rules over Go files: functions of at
// most 60 lines and 5 parameters, files of at most 500 lines, a package comment
// in every package, and no marks of unfinished work. Test files are free of the
// limits on length. It prints one line per offence and exits 1 if there is any.
//
// Usage: house FOLDER
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The limits of CONTRIBUTING.md.
const (
	maxFunction   = 60
	maxParameters = 5
	maxFile       = 500
)

var unfinished = regexp.MustCompile(`\b(` + "TO" + `DO|FIX` + `ME|HA` + `CK|XX` + `X)\b`)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: house FOLDER")
		os.Exit(2)
	}
	offences, err := check(os.Args[1])
	for _, o := range offences {
		fmt.Println(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "house:", err)
	}
	if err != nil || len(offences) > 0 {
		os.Exit(1)
	}
}

// checker collects offences over one tree.
type checker struct {
	set      *token.FileSet
	offences []string
	packages map[string]bool // folder: has a package comment
}

// check walks a tree, without hidden folders, and returns its offences sorted.
func check(root string) ([]string, error) {
	c := &checker{set: token.NewFileSet(), packages: map[string]bool{}}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() && path != root && (strings.HasPrefix(name, ".") && name != ".." || name == "testdata") {
			return fs.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		return c.file(path)
	})
	if err != nil {
		return nil, fmt.Errorf("walk %s: %w", root, err)
	}
	for dir, documented := range c.packages {
		if !documented {
			c.offences = append(c.offences, dir+": the package has no comment that says what it owns")
		}
	}
	slices.Sort(c.offences)
	return c.offences, nil
}

// file checks one file.
func (c *checker) file(path string) error {
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	f, err := parser.ParseFile(c.set, path, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	test := strings.HasSuffix(path, "_test.go")
	for _, group := range f.Comments {
		for _, comment := range group.List {
			if mark := unfinished.FindString(comment.Text); mark != "" {
				c.offend(comment.Pos(), "the comment says "+mark)
			}
		}
	}
	if !test {
		dir := filepath.Dir(path)
		c.packages[dir] = c.packages[dir] || f.Doc != nil
		if lines := strings.Count(string(source), "\n"); lines > maxFile {
			c.offend(f.Package, fmt.Sprintf("the file has %d lines, more than %d", lines, maxFile))
		}
		c.functions(f)
	}
	return nil
}

// functions checks the declared functions and methods of a file.
func (c *checker) functions(f *ast.File) {
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		first, last := c.set.Position(fn.Pos()).Line, c.set.Position(fn.End()).Line
		if lines := last - first + 1; lines > maxFunction {
			c.offend(fn.Pos(), fmt.Sprintf("%s has %d lines, more than %d", fn.Name.Name, lines, maxFunction))
		}
		if n := fn.Type.Params.NumFields(); n > maxParameters {
			c.offend(fn.Pos(), fmt.Sprintf("%s has %d parameters, more than %d", fn.Name.Name, n, maxParameters))
		}
	}
}

func (c *checker) offend(at token.Pos, what string) {
	p := c.set.Position(at)
	c.offences = append(c.offences, fmt.Sprintf("%s:%d: %s", p.Filename, p.Line, what))
}
