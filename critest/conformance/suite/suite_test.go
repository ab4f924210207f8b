// Package suite is critest 1.37 as a test binary: cmd/critest of cri-tools has
// no main package, so `go install` cannot build it. All specs come from
// cri-tools; the one change is that the image pulled by digest is the one the
// local registry serves, since a digest cannot be served without its bytes.
package suite

import (
	"flag"
	"testing"
	_ "unsafe" // for go:linkname

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"sigs.k8s.io/cri-tools/pkg/framework"
	_ "sigs.k8s.io/cri-tools/pkg/validate" // registers the specs
)

// testImageWithDigest is cri-tools' variable. It is set by a callback of that
// package before the suite begins; ours, registered later, runs after it.
//
//go:linkname testImageWithDigest sigs.k8s.io/cri-tools/pkg/validate.testImageWithDigest
var testImageWithDigest string

// digestImage replaces the digest reference that only the Internet could serve.
var digestImage = flag.String("digest-image", "", "name@digest to pull in the spec about digests")

func init() {
	framework.RegisterFlags()
	framework.AddBeforeSuiteCallback(func() {
		if *digestImage != "" {
			testImageWithDigest = *digestImage
		}
	})
}

// TestCRI runs every spec that the ginkgo flags select.
func TestCRI(t *testing.T) {
	gomega.RegisterFailHandler(ginkgo.Fail)
	ginkgo.RunSpecs(t, "CRI validation")
}
