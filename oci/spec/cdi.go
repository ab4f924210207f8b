package spec

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cdiAnnotation begins the keys of annotations that ask for CDI devices: the
// form of device plugins from before the CRI had a field for them.
const cdiAnnotation = "cdi.k8s.io/"

// CDIDevices are the qualified names (vendor.com/class=name) of the devices
// that a container asks for: those of its field in their order, then those of
// its annotations by key; each once. Labels and annotations of an image never
// count, nor do the pod's. ErrInvalid.
func CDIDevices(config *cri.ContainerConfig) ([]string, error) {
	var names []string
	add := func(field, name string) error {
		if _, _, _, err := parser.ParseQualifiedName(name); err != nil {
			return Invalid(field, name, "is not of the form vendor/class=name: "+err.Error())
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		return nil
	}
	for i, d := range config.GetCDIDevices() {
		if err := add("CDI_devices["+strconv.Itoa(i)+"].name", d.GetName()); err != nil {
			return nil, err
		}
	}
	annotations := config.GetAnnotations()
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if !strings.HasPrefix(key, cdiAnnotation) {
			continue
		}
		for name := range strings.SplitSeq(annotations[key], ",") {
			if err := add("annotations["+key+"]", name); err != nil {
				return nil, err
			}
		}
	}
	return names, nil
}
