package policy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/directory"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"

	"berth/sandbox/regular"
)

// Manifest is a manifest or an index with its signatures.
type Manifest struct {
	Digest     digest.Digest
	Data       []byte
	Signatures [][]byte // see ReadSignatures
}

// Subject is what a policy is asked about: an image under one name.
type Subject struct {
	// Reference is the name: what rules are looked up by and what signatures
	// are compared with. It is not read from.
	Reference types.ImageReference
	// Manifests each lead to the image, in the order to be asked about.
	Manifests []Manifest
	// Scratch is a directory for the time of the question.
	Scratch string
}

// Admit says whether the policy admits the subject: nil when it admits one of
// the manifests, else ErrRefused with the rules' reasons. It reads key files.
// Another error is one of the scratch directory's.
func (p *Policy) Admit(ctx context.Context, s Subject) error {
	if p == nil {
		return nil
	}
	return p.admit(ctx, s, p.rules)
}

// AdmitName is Admit for the name of an image that did not come by it but in an
// archive: only what the policy says of such names by a scope of theirs counts,
// not its default. A rule for one registry's images cannot be got round by an
// archive that gives its content such a name.
func (p *Policy) AdmitName(ctx context.Context, s Subject) error {
	if p == nil {
		return nil
	}
	return p.admit(ctx, s, &signature.Policy{
		Default:    signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()},
		Transports: p.rules.Transports,
	})
}

func (p *Policy) admit(ctx context.Context, s Subject, rules *signature.Policy) error {
	for _, path := range p.files { // the library would wait for the writer of a FIFO
		if err := regular.Check(path, regular.Most); errors.Is(err, regular.ErrNot) {
			return fmt.Errorf("%w: policy %s: %w", ErrRefused, p.file, err)
		}
	}
	var reasons []string
	for _, m := range s.Manifests {
		reason, err := m.ask(ctx, s, rules)
		if err != nil || reason == "" {
			return err
		}
		if len(reasons) == 0 || reasons[len(reasons)-1] != reason {
			reasons = append(reasons, reason)
		}
	}
	if len(reasons) == 0 {
		reasons = []string{"nothing is known of its manifest"}
	}
	return fmt.Errorf("%w: policy %s: %s", ErrRefused, p.file, strings.Join(reasons, "; its index: "))
}

// named is a stored manifest with its signatures under the name it is asked
// about.
type named struct {
	*image.UnparsedImage
	reference types.ImageReference
}

// Reference of the question, not of the directory.
func (n named) Reference() types.ImageReference { return n.reference }

// ask lets the library judge one manifest; no reason means that it is admitted.
// The manifest is handed over as a directory of the library's own form, the one
// way in for sigstore signatures.
func (m Manifest) ask(ctx context.Context, s Subject, rules *signature.Policy) (reason string, err error) {
	if digest.FromBytes(m.Data) != m.Digest {
		return fmt.Sprintf("manifest %s does not have its digest", m.Digest), nil
	}
	dir, err := os.MkdirTemp(s.Scratch, "policy-")
	if err != nil {
		return "", fmt.Errorf("ask the signature policy: %w", err)
	}
	defer os.RemoveAll(dir)
	if err := m.write(dir); err != nil {
		return "", fmt.Errorf("ask the signature policy: %w", err)
	}
	ref, err := directory.NewReference(dir)
	if err != nil {
		return "", fmt.Errorf("ask the signature policy: %w", err)
	}
	src, err := ref.NewImageSource(ctx, nil)
	if err != nil {
		return "", fmt.Errorf("ask the signature policy: %w", err)
	}
	defer src.Close()
	judge, err := signature.NewPolicyContext(rules)
	if err != nil {
		return "", fmt.Errorf("ask the signature policy: %w", err)
	}
	defer judge.Destroy()
	ok, err := judge.IsRunningImageAllowed(ctx, named{image.UnparsedInstance(src, nil), s.Reference})
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case err != nil:
		return err.Error(), nil
	case !ok:
		return "refused without a reason", nil
	}
	return "", nil
}

func (m Manifest) write(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), m.Data, 0o600); err != nil {
		return err
	}
	for i, blob := range m.Signatures {
		if err := os.WriteFile(filepath.Join(dir, "signature-"+strconv.Itoa(i+1)), blob, 0o600); err != nil {
			return err
		}
	}
	return nil
}
