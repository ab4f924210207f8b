package registries

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"go.podman.io/image/v5/pkg/sysregistriesv2"

	"berth/sandbox/regular"
)

// authFile is containers-auth.json(5), with docker's credsStore.
type authFile struct {
	Auths map[string]struct {
		Auth          string `json:"auth"`
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
		RegistryToken string `json:"registrytoken"`
	} `json:"auths"`
	CredHelpers map[string]string `json:"credHelpers"`
	CredsStore  string            `json:"credsStore"`
}

// readAuthFile reads the file, which must be there.
func readAuthFile(path string) (*authFile, error) {
	data, err := regular.Read(path, regular.Most)
	if err != nil {
		return nil, fmt.Errorf("%w: read auth file: %w", ErrConfig, err)
	}
	var f authFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("%w: auth file %s: line %d: %s", ErrConfig, path, lineOf(data, err), plainly(err))
	}
	for key, a := range f.Auths {
		if _, err := decodeAuth(a.Auth); err != nil {
			return nil, fmt.Errorf("%w: auth file %s: auths[%q]: auth %w", ErrConfig, path, key, err)
		}
	}
	return &f, nil
}

// lineOf is where in a JSON document an error of the decoder is.
func lineOf(data []byte, err error) int {
	offset := int64(len(data))
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		offset = syntax.Offset
	case errors.As(err, &kind):
		offset = kind.Offset
	}
	return 1 + bytes.Count(data[:min(offset, int64(len(data)))], []byte("\n"))
}

// plainly is a decoder's error without any of the file's values.
func plainly(err error) string {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		return fmt.Sprintf("%s must be %s", kind.Field, kind.Type)
	}
	return err.Error()
}

// decodeAuth reads base64 of "username:password". The password may hold colons.
func decodeAuth(auth string) (Login, error) {
	if auth == "" {
		return Login{}, nil
	}
	data, err := base64.StdEncoding.DecodeString(auth)
	if err != nil {
		return Login{}, errors.New("is not base64")
	}
	user, password, ok := strings.Cut(string(data), ":")
	if !ok {
		return Login{}, errors.New("has no colon")
	}
	return Login{Username: user, Password: strings.TrimRight(password, "\x00")}, nil
}

// storedLogin is the login for an endpoint from the places that the node's
// configuration names: the auth file, unless registries.conf puts other
// credential helpers before it or in its place. host is the endpoint's, name
// is host and repository.
func (c Config) storedLogin(ctx context.Context, host, name string) (Login, error) {
	helpers, err := sysregistriesv2.CredentialHelpers(c.system())
	if err != nil {
		return Login{}, fmt.Errorf("%w: %v", ErrConfig, err)
	}
	for _, helper := range helpers {
		var l Login
		if helper == sysregistriesv2.AuthenticationFileHelper {
			l, err = c.fileLogin(ctx, host, name)
		} else {
			l, err = c.runHelper(ctx, "registries.conf", helper, host)
		}
		if err != nil || l != (Login{}) {
			return l, err
		}
	}
	return Login{}, nil
}

func (c Config) fileLogin(ctx context.Context, host, name string) (Login, error) {
	if c.AuthFile == "" {
		return Login{}, nil // not root's own: which registries the node may use is said by its configuration
	}
	f, err := readAuthFile(c.AuthFile)
	if err != nil {
		return Login{}, err
	}
	if helper := f.CredHelpers[host]; helper != "" {
		return c.runHelper(ctx, c.AuthFile, helper, host)
	}
	if key, ok := f.find(host, name); ok {
		a := f.Auths[key]
		l, err := decodeAuth(a.Auth)
		if err != nil {
			return Login{}, fmt.Errorf("%w: auth file %s: auths[%q]: auth %w", ErrConfig, c.AuthFile, key, err)
		}
		if l.Username == "" {
			l.Username, l.Password = a.Username, a.Password
		}
		l.IdentityToken, l.RegistryToken = a.IdentityToken, a.RegistryToken
		if l != (Login{}) { // docker leaves an empty entry where a helper has it
			return l, nil
		}
	}
	if f.CredsStore == "" {
		return Login{}, nil
	}
	if host == "docker.io" {
		host = "https://index.docker.io/v1/" // what docker login stores it as
	}
	return c.runHelper(ctx, c.AuthFile, f.CredsStore, host)
}

// find looks for the entry that says most: the repository, the folders above
// it, the registry, the registry as older files spell it.
func (f *authFile) find(host, name string) (string, bool) {
	for key := name; ; {
		if _, ok := f.Auths[key]; ok {
			return key, true
		}
		i := strings.LastIndex(key, "/")
		if i < 0 {
			break
		}
		key = key[:i]
	}
	for key := range f.Auths {
		plain := strings.TrimSuffix(key, "/")
		for _, api := range []string{"/v1", "/v2"} {
			plain = strings.TrimSuffix(plain, api)
		}
		_, path, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(plain, "https://"), "http://"), "/")
		if path == "" && canonical(hostOf(key)) == canonical(host) {
			return key, true
		}
	}
	return "", false
}

// helperTime bounds a credential helper: a pull waits for it.
const helperTime = 30 * time.Second

// helperAnswer is what a helper says, which ends when it is too much for a login.
type helperAnswer struct {
	kept    []byte
	tooLong bool
}

// maxHelperAnswer bounds it, in bytes.
const maxHelperAnswer = 1 << 20

func (a *helperAnswer) Write(p []byte) (int, error) {
	if a.tooLong = len(a.kept)+len(p) > maxHelperAnswer; a.tooLong {
		return 0, io.ErrShortWrite
	}
	a.kept = append(a.kept, p...)
	return len(p), nil
}

// findHelper finds docker-credential-<helper> in PATH. ErrHangs.
func (c Config) findHelper(ctx context.Context, from, program string) (string, error) {
	path, err := regular.Program(program, func(path string) error {
		if c.Answer == nil {
			return nil
		}
		return c.Answer(ctx, path)
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return "", fmt.Errorf("%w: %s, named in %s: %w", ErrHangs, program, from, err)
	}
	return path, err
}

// runHelper asks docker-credential-<helper>, found in PATH and named in the file from,
// for a login.
func (c Config) runHelper(ctx context.Context, from, helper, server string) (Login, error) {
	program := "docker-credential-" + helper
	path, err := c.findHelper(ctx, from, program)
	if errors.Is(err, ErrHangs) {
		return Login{}, err
	}
	if err != nil {
		return Login{}, fmt.Errorf("%w: run %s get for %s: %w", ErrConfig, program, server, err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, helperTime, fmt.Errorf("no answer for %v", helperTime))
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "get")
	cmd.Stdin = strings.NewReader(server)
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what it starts ends with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var said helperAnswer
	cmd.Stdout = &said
	err = cmd.Run()
	out := said.kept
	if said.tooLong {
		err = fmt.Errorf("the answer has more than %d bytes", maxHelperAnswer)
	}
	if err != nil && ctx.Err() == nil && strings.Contains(string(out), "credentials not found in native keychain") {
		return Login{}, nil // the protocol's words for "none"
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		// Its output is not repeated: it may be a login.
		return Login{}, fmt.Errorf("%w: run %s get for %s: %w", ErrConfig, program, server, err)
	}
	var answer struct{ Username, Secret string }
	if json.Unmarshal(out, &answer) != nil {
		return Login{}, fmt.Errorf("%w: run %s get for %s: the answer is not JSON", ErrConfig, program, server)
	}
	if answer.Username == "<token>" {
		return Login{IdentityToken: answer.Secret}, nil
	}
	return Login{Username: answer.Username, Password: answer.Secret}, nil
}
