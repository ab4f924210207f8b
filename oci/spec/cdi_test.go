package spec

import (
	"slices"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestCDIDevices(t *testing.T) {
	in := base()
	in.Config.CDIDevices = []*cri.CDIDevice{{Name: "v.test/c=two"}, {Name: "v.test/c=one"}, {Name: "v.test/c=two"}}
	in.Config.Annotations = map[string]string{
		"cdi.k8s.io/b": "v.test/c=four", "cdi.k8s.io/a": "v.test/c=three,v.test/c=one", "xcdi.k8s.io/a": "nonsense", "cdi.k8s.io": "nonsense",
	}
	// What the image or the pod says about devices is nobody's request.
	in.Image.Config.Labels = map[string]string{"cdi.k8s.io/i": "v.test/c=image"}
	in.Sandbox.Annotations = map[string]string{"cdi.k8s.io/p": "v.test/c=pod"}
	want := []string{"v.test/c=two", "v.test/c=one", "v.test/c=three", "v.test/c=four"}
	for range 10 {
		got, err := CDIDevices(in.Config)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%v, %v; want %v", got, err, want)
		}
	}
	if _, _, err := Container(in); err != nil {
		t.Error(err)
	}
	if got, err := CDIDevices(base().Config); len(got) != 0 || err != nil {
		t.Errorf("nothing asked for: %v, %v", got, err)
	}
}
