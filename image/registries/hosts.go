package registries

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
	"go.podman.io/image/v5/docker/reference"

	"berth/sandbox/regular"
)

// hostsFile is a hosts.toml of containerd's.
type hostsFile struct {
	file      string
	isDefault bool // that of _default, for hosts without one of their own
	upstream  string
	servers   []server // in the file's order, the upstream last
}

// server is one host of the file.
type server struct {
	scheme, host, path string
	hostSettings
	dial   time.Duration
	header http.Header
	tls    tlsFiles
}

// hostSettings are the keys of one host; those of the upstream stand at the top.
type hostSettings struct {
	Capabilities []string       `toml:"capabilities"`
	CA           any            `toml:"ca"`
	Client       any            `toml:"client"`
	SkipVerify   bool           `toml:"skip_verify"`
	Header       map[string]any `toml:"header"`
	OverridePath bool           `toml:"override_path"`
	DialTimeout  string         `toml:"dial_timeout"`
}

// hostsDirs are the directories that may speak for a host, in containerd's
// order: a port as _port_, the host as it is, then all others.
func hostsDirs(host string) []string {
	dirs := []string{host, "_default"}
	if i := strings.LastIndex(host, ":"); i > 0 {
		dirs = slices.Insert(dirs, 0, host[:i]+"_"+host[i+1:]+"_")
	}
	return dirs
}

// hostsFor reads what the hosts directory says for a host; nil: nothing.
func (c Config) hostsFor(host string) (*hostsFile, error) {
	if c.HostsDir == "" {
		return nil, nil
	}
	for _, name := range hostsDirs(host) {
		dir := filepath.Join(c.HostsDir, name)
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		file := filepath.Join(dir, "hosts.toml")
		data, err := regular.Read(file, regular.Most)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil // certificates only, see certsDirs
		}
		if err != nil {
			return nil, fmt.Errorf("%w: read hosts.toml: %w", ErrConfig, err)
		}
		h, err := parseHosts(data, dir, host)
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrConfig, file, err)
		}
		h.file, h.isDefault = file, name == "_default"
		return h, nil
	}
	return nil, nil
}

// NamedByHosts are the certificate and key files that each hosts.toml of a directory
// names, by that file, for those who ask whether they answer before a pull reads them.
// What cannot be read names none: a pull that needs it says why.
func NamedByHosts(dir string) map[string][]string {
	named := map[string][]string{}
	list, _ := os.ReadDir(dir)
	for _, item := range list {
		file := filepath.Join(dir, item.Name(), "hosts.toml")
		data, err := regular.Read(file, regular.Most)
		if err != nil {
			continue
		}
		h, err := parseHosts(data, filepath.Dir(file), item.Name())
		if err != nil {
			continue
		}
		for _, s := range h.servers {
			named[file] = append(named[file], s.tls.authorities...)
			for _, pair := range s.tls.pairs {
				named[file] = append(named[file], pair[:]...)
			}
		}
	}
	return named
}

// parseHosts reads a hosts.toml for one host. Relative files are dir's.
func parseHosts(data []byte, dir, host string) (*hostsFile, error) {
	var doc struct {
		hostSettings
		Server string                  `toml:"server"`
		Host   map[string]hostSettings `toml:"host"`
	}
	if err := toml.NewDecoder(strings.NewReader(string(data))).DisallowUnknownFields().Decode(&doc); err != nil {
		return nil, tomlError(err)
	}
	h := &hostsFile{upstream: host}
	for _, name := range hostOrder(data) {
		s, err := parseServer(name, doc.Host[name], dir)
		if err != nil {
			return nil, fmt.Errorf("host %q: %w", Redact(name, nil), err)
		}
		h.servers = append(h.servers, s)
	}
	if doc.Server == "" {
		doc.Server = "https://" + host
	}
	s, err := parseServer(doc.Server, doc.hostSettings, dir)
	if err != nil {
		return nil, fmt.Errorf("server %q: %w", Redact(doc.Server, nil), err)
	}
	// It may also stand among the hosts, with settings of its own.
	if !slices.ContainsFunc(h.servers, func(o server) bool { return o.scheme == s.scheme && o.host == s.host && o.path == s.path }) {
		h.servers = append(h.servers, s)
	}
	return h, nil
}

// tomlError says line and key, which the decoder keeps for itself.
func tomlError(err error) error {
	var unknown *toml.StrictMissingError
	if errors.As(err, &unknown) && len(unknown.Errors) > 0 {
		first := unknown.Errors[0]
		line, _ := first.Position()
		return fmt.Errorf("line %d: the key %q is not one that berth can honour", line, strings.Join(first.Key(), "."))
	}
	var broken *toml.DecodeError
	if errors.As(err, &broken) {
		line, _ := broken.Position()
		return fmt.Errorf("line %d: %s", line, broken.Error())
	}
	return err
}

// hostOrder lists the [host."…"] tables as they stand in the file: that is the
// order in which they are asked. The decoder's map has none.
func hostOrder(data []byte) []string {
	var p unstable.Parser
	p.Reset(data)
	var order []string
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table && e.Kind != unstable.KeyValue {
			continue
		}
		var key []string
		for it := e.Key(); it.Next(); {
			key = append(key, string(it.Node().Data))
		}
		if e.Kind == unstable.Table && len(key) >= 2 && key[0] == "host" && !slices.Contains(order, key[1]) {
			order = append(order, key[1])
		}
	}
	return order
}

func parseServer(name string, o hostSettings, dir string) (server, error) {
	s := server{hostSettings: o}
	if !strings.Contains(name, "://") {
		name = "https://" + name
	}
	u, err := url.Parse(name)
	if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return s, errors.New("not an address of the form https://host[:port][/path]")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return s, errors.New("an address must not hold a login or a query")
	}
	s.scheme, s.host, s.path = u.Scheme, u.Host, path.Clean("/"+u.Path)
	if s.path == "/" {
		s.path = ""
	}
	if !o.OverridePath && !strings.HasSuffix(s.path, "/v2") {
		s.path += "/v2"
	}
	for _, c := range o.Capabilities {
		switch c {
		case "pull", "resolve", "push", "referrers":
		default:
			return s, fmt.Errorf("capabilities: %q is none of pull, resolve, push, referrers", c)
		}
	}
	if o.DialTimeout != "" {
		if s.dial, err = time.ParseDuration(o.DialTimeout); err != nil || s.dial <= 0 {
			return s, fmt.Errorf("dial_timeout: %q is not a time such as 10s", o.DialTimeout)
		}
	}
	if s.header, err = parseHeader(o.Header); err != nil {
		return s, err
	}
	s.tls, err = parseTLS(o, dir)
	return s, err
}

func parseHeader(values map[string]any) (http.Header, error) {
	header := http.Header{}
	for name, value := range values {
		list, err := stringsOf(value)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", name, err)
		}
		header[http.CanonicalHeaderKey(name)] = list
	}
	return header, nil
}

// parseTLS reads ca (a file or several) and client (a file with certificate
// and key, several of them, or pairs).
func parseTLS(o hostSettings, dir string) (tlsFiles, error) {
	var f tlsFiles
	at := func(file string) string {
		if filepath.IsAbs(file) {
			return file
		}
		return filepath.Join(dir, file)
	}
	if o.CA != nil {
		list, err := stringsOf(o.CA)
		if err != nil {
			return f, fmt.Errorf("ca: %w", err)
		}
		for _, file := range list {
			f.authorities = append(f.authorities, at(file))
		}
	}
	list, _ := o.Client.([]any)
	if one, ok := o.Client.(string); ok {
		list = []any{one}
	} else if o.Client != nil && list == nil {
		return f, errors.New("client: neither a file nor a list of files")
	}
	for _, item := range list {
		pair, err := stringsOf(item)
		switch {
		case err != nil:
			return f, fmt.Errorf("client: %w", err)
		case len(pair) == 1:
			f.pairs = append(f.pairs, [2]string{at(pair[0]), at(pair[0])})
		case len(pair) == 2:
			f.pairs = append(f.pairs, [2]string{at(pair[0]), at(pair[1])})
		default:
			return f, fmt.Errorf("client: %d files where a certificate and its key belong", len(pair))
		}
	}
	return f, nil
}

func stringsOf(value any) ([]string, error) {
	if one, ok := value.(string); ok {
		return []string{one}, nil
	}
	list, ok := value.([]any)
	if !ok {
		return nil, errors.New("neither a text nor a list of texts")
	}
	var out []string
	for _, item := range list {
		text, ok := item.(string)
		if !ok {
			return nil, errors.New("neither a text nor a list of texts")
		}
		out = append(out, text)
	}
	return out, nil
}

// places are the file's hosts for one name.
func (h *hostsFile) places(named reference.Named) ([]place, error) {
	var list []place
	_, byDigest := named.(reference.Canonical)
	tags := false
	for _, s := range h.servers {
		can := func(c string) bool { return len(s.Capabilities) == 0 || slices.Contains(s.Capabilities, c) }
		p := place{
			host: s.host, scheme: s.scheme, path: s.path, repository: reference.Path(named), insecure: s.SkipVerify,
			header: s.header, tls: s.tls, dial: s.dial, noTags: !can("resolve"), noBlobs: !can("pull"),
		}
		if canonical(s.host) == canonical(h.upstream) {
			p.host = h.upstream
		} else {
			p.namespace = h.upstream
		}
		tags = tags || !p.noTags
		list = append(list, p)
	}
	if !byDigest && !tags {
		return nil, fmt.Errorf("%w: %s: no host has the capability resolve, so %s can be pulled by digest only", ErrConfig, h.file, named.Name())
	}
	if !slices.ContainsFunc(list, func(p place) bool { return !p.noBlobs }) {
		return nil, fmt.Errorf("%w: %s: no host has the capability pull", ErrConfig, h.file)
	}
	return list, nil
}
