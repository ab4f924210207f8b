package runtime

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// supportPage is the page that says what of CRI berth does.
const supportPage = "../docs/cri-support.md"

// supportRow is a line of one of the page's tables: `name` | yes | tests.
var supportRow = regexp.MustCompile("^\\| `([A-Za-z_.0-9]+)` \\| (yes|partial|no) \\| (.*) \\|$")

// supported reads the page's rows by heading.
func supported(t *testing.T) map[string]map[string][2]string {
	t.Helper()
	text, err := os.ReadFile(supportPage)
	if err != nil {
		t.Fatal(err)
	}
	tables, heading := map[string]map[string][2]string{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "## "); ok {
			heading = name
			tables[heading] = map[string][2]string{}
		}
		if m := supportRow.FindStringSubmatch(line); m != nil {
			if _, twice := tables[heading][m[1]]; twice {
				t.Errorf("%s: %s stands there twice", heading, m[1])
			}
			tables[heading][m[1]] = [2]string{m[2], m[3]}
		} else if strings.HasPrefix(line, "| `") {
			t.Errorf("not a row: %s", line)
		}
	}
	return tables
}

// The page lists every RPC and every field of CRI that is not Windows', and none
// that there is not.
func TestSupportPageIsComplete(t *testing.T) {
	tables := supported(t)
	rpcs := map[string]bool{}
	for _, desc := range []string{"RuntimeService", "ImageService"} {
		methods := cri.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Services().ByName(protoreflect.Name(desc)).Methods()
		for i := range methods.Len() {
			rpcs[string(methods.Get(i).Name())] = true
		}
	}
	for name := range rpcs {
		if _, ok := tables["RPCs"][name]; !ok {
			t.Errorf("the page has no row for RPC %s", name)
		}
	}
	for name := range tables["RPCs"] {
		if !rpcs[name] {
			t.Errorf("the page has a row for RPC %s, which there is not", name)
		}
	}
	for heading, rows := range tables {
		d := cri.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Messages().ByName(protoreflect.Name(heading))
		if d == nil {
			continue
		}
		known := map[string]bool{}
		fieldsOf("", d, known, 0)
		for field, leaf := range known {
			if leaf && !hasRow(rows, field) {
				t.Errorf("%s: no row for %s", heading, field)
			}
		}
		for field := range rows {
			if _, ok := known[field]; !ok {
				t.Errorf("%s: there is no field %s", heading, field)
			}
		}
	}
	for _, message := range []string{"PodSandboxConfig", "ContainerConfig", "PodSandboxStatus", "ContainerStatus", "Image", "ImageSpec", "AuthConfig",
		"StatusResponse", "ContainerStats", "PodSandboxStats", "ImageFsInfoResponse", "RuntimeConfigResponse", "ContainerEventResponse"} {
		if len(tables[message]) == 0 {
			t.Errorf("the page has no table %s", message)
		}
	}
}

// hasRow: a row for a field speaks of all that is in it.
func hasRow(rows map[string][2]string, field string) bool {
	for {
		if _, ok := rows[field]; ok {
			return true
		}
		i := strings.LastIndexByte(field, '.')
		if i < 0 {
			return false
		}
		field = field[:i]
	}
}

// fieldsOf lists a message's fields by their paths, and whether each is one
// without fields of its own.
func fieldsOf(prefix string, d protoreflect.MessageDescriptor, known map[string]bool, depth int) {
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if f.Name() == "windows" {
			continue
		}
		path := prefix + string(f.Name())
		m := f.Message()
		known[path] = m == nil || f.IsMap() || depth == 6
		if !known[path] {
			fieldsOf(path+".", m, known, depth+1)
		}
	}
}

var testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9_]+)\(`)

// namesOfTests are those of the whole project.
func namesOfTests(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && (e.Name() == ".deps" || e.Name() == ".git" || e.Name() == "bin") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range testFunction.FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// Each test that the page names exists, and what is there has a test.
func TestSupportPageNamesItsTests(t *testing.T) {
	names := namesOfTests(t)
	for heading, rows := range supported(t) {
		for name, row := range rows {
			tests := regexp.MustCompile(`Test[A-Za-z0-9_]+`).FindAllString(row[1], -1)
			for _, test := range tests {
				if !names[test] {
					t.Errorf("%s, %s: there is no test %s", heading, name, test)
				}
			}
			if row[0] != "no" && len(tests) == 0 && !strings.Contains(row[1], "critest") {
				t.Errorf("%s, %s: no test is named", heading, name)
			}
		}
	}
}

// securityRow is a line of a table of the threat model that has tests.
var securityRow = regexp.MustCompile("^\\| (.*) \\| ((?:`[A-Za-z0-9_]+`(?:, )?)*) \\|$")

// The threat model names a test for each of its lines, and only tests that exist.
func TestSecurityPageNamesItsTests(t *testing.T) {
	page, err := os.ReadFile("../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	names, tested, rows := namesOfTests(t), false, 0
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			tested = false
			continue
		}
		if strings.HasSuffix(line, "| test |") {
			tested = true
			continue
		}
		if !tested || strings.HasPrefix(line, "|--") {
			continue
		}
		m := securityRow.FindStringSubmatch(line)
		if m == nil || m[2] == "" {
			t.Errorf("no test is named by: %s", line)
			continue
		}
		rows++
		for _, test := range strings.Split(m[2], ", ") {
			if !names[strings.Trim(test, "`")] {
				t.Errorf("%s: there is no test %s", m[1], test)
			}
		}
	}
	if rows < 40 {
		t.Errorf("the page has %d lines with tests", rows)
	}
}
