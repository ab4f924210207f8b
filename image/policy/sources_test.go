package policy

import (
	"path/filepath"
	"strings"
	"testing"

	"go.podman.io/image/v5/docker/reference"
)

func repository(t *testing.T, text string) reference.Named {
	t.Helper()
	n, err := reference.ParseNormalizedNamed(text)
	if err != nil {
		t.Fatal(err)
	}
	return reference.TagNameOnly(n)
}

func TestWhereSignaturesAre(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.yaml"), `
default-docker:
  sigstore: https://default.example/sigs
docker:
  vendor.example:
    use-sigstore-attachments: true
  vendor.example/team:
    lookaside: https://team.example/sigs
  vendor.example/team/loose:
    use-sigstore-attachments: false
`)
	write(t, filepath.Join(dir, "b.yaml"), "docker:\n  mirror.example:5000:\n    lookaside: file:///sigs\n  '*.example':\n    use-sigstore-attachments: true\n")
	write(t, filepath.Join(dir, "c.yml"), "not: [read")
	s, err := ReadSources(dir)
	if err != nil {
		t.Fatal(err)
	}
	for names, want := range map[string]Source{
		"docker.io/library/x":                               {"https://default.example/sigs", false},
		"vendor.example/x":                                  {"https://default.example/sigs", true},
		"vendor.example/team/x":                             {"https://team.example/sigs", true},
		"vendor.example/team/loose":                         {"https://team.example/sigs", false},
		"mirror.example:5000/team/loose":                    {"file:///sigs", true},
		"mirror.example:5000/x vendor.example/team/loose":   {"file:///sigs", true},
		"docker.io/library/x vendor.example/team/loose":     {"https://team.example/sigs", false},
		"docker.io/library/x docker.io/vendor.example/team": {"https://default.example/sigs", false},
	} {
		var list []reference.Named
		for n := range strings.FieldsSeq(names) {
			list = append(list, repository(t, n))
		}
		if got := s.Of(list...); got != want {
			t.Errorf("%s: %+v, want %+v", names, got, want)
		}
	}
	if got := (&Sources{}).Of(repository(t, "x")); got != (Source{Lookaside: defaultLookaside}) {
		t.Errorf("where nothing is said: %+v", got)
	}
}

func TestSourcesThatContradict(t *testing.T) {
	for name, tc := range map[string]struct{ a, b, want string }{
		"a place twice":    {"docker:\n  x.example: {}\n", "docker:\n  x.example: {}\n", `b.yaml: "x.example"`},
		"defaults twice":   {"default-docker: {}\n", "default-docker: {}\n", "b.yaml: default-docker"},
		"not YAML":         {"docker: {}\n", "docker: [\n", "b.yaml"},
		"the wrong type":   {"docker: {}\n", "docker:\n  x: {use-sigstore-attachments: perhaps}\n", "b.yaml"},
		"no directory":     {"docker: {}\n", "docker:\n  x: {lookaside: /sigs}\n", `b.yaml: "x": lookaside "/sigs"`},
		"another scheme":   {"docker: {}\n", "default-docker: {sigstore: 'ftp://x.example'}\n", "ftp://x.example"},
		"another's format": {"docker: 5\n", "", "a.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "a.yaml"), tc.a)
			write(t, filepath.Join(dir, "b.yaml"), tc.b)
			if _, err := ReadSources(dir); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	if _, err := ReadSources("/none"); err == nil {
		t.Error("a directory that is missing is read")
	}
}
